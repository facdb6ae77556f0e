"""Windows over a store: every row once an epoch, evenly in time, the same from any step on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from lede.buffers.records import PromptRollout
from lede.transitions import EpisodeUnit, NStepBatch, Transitions
from lede.windows import PartSize, TransitionWindows
from tests.buffers.samples import make_rollout

N_FEATURES = 4
Rows = npt.NDArray[np.int64]


def rollout(index: int, tokens: tuple[int, ...], first: int) -> PromptRollout:
    """A prompt whose rewards count its decisions from `first`."""
    made = make_rollout(index, tokens, eos=index % 2 == 0)
    object.__setattr__(made, "rewards", np.arange(first, first + made.n_rows, dtype=np.float32))
    return made


def parts_of(n_parts: int, episode: EpisodeUnit = "token") -> list[Transitions]:
    """Parts of unequal sizes; the reward of a row is its number over all parts."""
    parts, first, rng = [], 0, np.random.default_rng(0)
    for part in range(n_parts):
        rollouts = []
        for prompt in range(int(rng.integers(1, 4))):
            tokens = tuple(rng.integers(1, 4, int(rng.integers(1, 6))).tolist())
            rollouts.append(rollout(4 * part + prompt, tokens, first))
            first += sum(tokens)
        parts.append(Transitions.from_rollouts(rollouts, episode))
    return parts


def windows_of(parts: list[Transitions], window: int, seed: int = 0) -> TransitionWindows:
    states = np.concatenate([part.states for part in parts])
    sizes = [PartSize(len(part), len(part.observations) - len(part)) for part in parts]
    load: Callable[[int], Transitions] = parts.__getitem__
    mean, std = states.mean(axis=0, dtype=np.float64), states.std(axis=0, dtype=np.float64)
    return TransitionWindows(load, sizes, parts[0].episode, window, seed, mean, std, states)


def numbers(windows: TransitionWindows, position: int, n: int) -> Rows:
    """The numbers of the rows that are drawn, by their rewards."""
    drawn = [held.rewards[rows] for held, rows in windows.draw(None, position, n)]
    return np.concatenate(drawn).astype(np.int64)


@pytest.mark.parametrize("window", [1, 40, 70, 10**6])
def test_every_row_is_drawn_once_an_epoch(window: int) -> None:
    windows = windows_of(parts_of(30), window)
    n = len(windows)
    assert n > 200
    batch = 7  # divides neither epochs nor windows: batches run over both ends
    drawn = np.concatenate([numbers(windows, start, batch) for start in range(0, 3 * n, batch)])
    for epoch in range(3):
        np.testing.assert_array_equal(np.sort(drawn[epoch * n : (epoch + 1) * n]), np.arange(n))
    assert not np.array_equal(drawn[:n], drawn[n : 2 * n])


@pytest.mark.parametrize("window", [40, 70])
def test_no_window_is_larger_than_told_and_each_has_its_share(window: int) -> None:
    parts = parts_of(60)
    sizes = np.asarray([len(part) for part in parts])
    assert window > sizes.max()
    windows = windows_of(parts, window)
    for epoch in range(5):
        cut = windows.windows(epoch)
        assert sorted(np.concatenate(cut).tolist()) == list(range(60))
        rows = [int(sizes[part].sum()) for part in cut]
        assert max(rows) <= max(window, 2 * sizes.max())
        assert min(rows) >= len(windows) / windows.n_windows - sizes.max()


def places(windows: TransitionWindows, bins: int, epochs: int) -> tuple[npt.NDArray[np.float64], Rows]:
    """How often each row came in each part of an epoch, `(row, bin)`, and the places of each bin."""
    n = len(windows)
    counts, place = np.zeros((n, bins)), np.arange(n) * bins // n
    for epoch in range(epochs):
        counts[numbers(windows, epoch * n, n), place] += 1
    return counts, np.bincount(place)


def test_rows_are_drawn_evenly_in_time() -> None:
    """Every row is as likely at every place of an epoch: chi-square over 1,000 epochs, of parts that are alike."""
    parts = [Transitions.from_rollouts([rollout(i, (3, 2, 1), 6 * i)]) for i in range(24)]
    bins, epochs = 8, 1000
    counts, sizes = places(windows_of(parts, 40), bins, epochs)
    expected = epochs * sizes / sizes.sum()
    statistic = ((counts - expected) ** 2 / expected).sum(axis=1)  # one for each row, of 7 degrees of freedom
    assert statistic.mean() == pytest.approx(bins - 1, rel=0.15)
    assert statistic.max() < 35  # 1 in 10 million


def test_rows_of_unequal_parts_are_drawn_nearly_evenly_in_time() -> None:
    bins, epochs = 4, 600
    counts, sizes = places(windows_of(parts_of(60), 120), bins, epochs)
    share = counts / epochs / (sizes / sizes.sum())
    assert np.abs(share - 1).max() < 0.33  # 5 deviations of a binomial
    assert np.abs(share.mean(axis=0) - 1).max() < 1e-9


def test_neighbours_are_mixed() -> None:
    """What comes in a batch is of many parts: as many pairs of one part as a window's size makes likely, not more."""
    parts = parts_of(60)
    owner = np.repeat(np.arange(60), [len(part) for part in parts])
    windows = windows_of(parts, 120)
    pairs = same = 0
    for epoch in range(20):
        drawn = owner[numbers(windows, epoch * len(windows), len(windows))]
        same += int((drawn[1:] == drawn[:-1]).sum())
        pairs += drawn.size - 1
    in_window = [
        sum(len(parts[part]) * (len(parts[part]) - 1) for part in cut) / sum(len(parts[part]) for part in cut) ** 2
        for cut in windows.windows(0)
    ]
    assert same / pairs == pytest.approx(np.mean(in_window), rel=0.2)


@pytest.mark.parametrize("episode", ["token", "prompt"])
def test_a_row_means_the_same_in_a_window_as_in_its_part(episode: EpisodeUnit) -> None:
    parts = parts_of(20, episode)
    windows = windows_of(parts, 60)
    first = np.cumsum([0, *(len(part) for part in parts)])

    def greedy(observations: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        return (observations[:, 0] > 0.5).astype(np.int64)

    for held, rows in windows.draw(None, 0, len(windows)):
        got = held.batch(rows, 3, 0.9, greedy)
        for i, number in enumerate(held.rewards[rows].astype(int).tolist()):
            part = int(np.searchsorted(first, number, side="right")) - 1
            expected = parts[part].batch(np.asarray([number - first[part]]), 3, 0.9, greedy)
            for name in vars(expected):
                np.testing.assert_array_equal(getattr(got, name)[i], getattr(expected, name)[0])


def test_what_is_drawn_depends_on_seed_and_position_alone() -> None:
    parts = parts_of(30)
    whole = windows_of(parts, 70)
    n = len(whole)
    drawn = np.concatenate([numbers(whole, start, 16) for start in range(0, 2 * n, 16)])
    for position in (0, 16, n - 3, n, n + 160):
        np.testing.assert_array_equal(numbers(windows_of(parts, 70), position, 16), drawn[position : position + 16])
    np.testing.assert_array_equal(numbers(whole, 16, 16), drawn[16:32])  # going back
    assert not np.array_equal(numbers(windows_of(parts, 70, seed=1), 0, 16), drawn[:16])


def test_one_part_is_in_memory_beside_the_window() -> None:
    parts, alive = parts_of(30), 0

    class Counted(Transitions):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    most = 0

    def load(part: int) -> Transitions:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return Counted(**vars(parts[part]))

    sizes = [PartSize(len(part), len(part.observations) - len(part)) for part in parts]
    width = parts[0].observations.shape[1]
    states = parts[0].states
    windows = TransitionWindows(load, sizes, "token", 70, 0, np.zeros(width), np.ones(width), states)
    for start in range(0, 2 * len(windows), 16):
        numbers(windows, start, 16)
    assert most <= 2  # the one that is put into the window, and the next while it is bound


def test_a_store_that_changes_is_noticed() -> None:
    parts = parts_of(5)
    windows = windows_of(parts, 10**6)
    parts[3] = parts[4]
    with pytest.raises(ValueError, match=r"part 3 .* a store must not be changed while it is learned from"):
        numbers(windows, 0, 4)


def test_batches_of_pieces_are_joined() -> None:
    part = parts_of(1)[0]
    whole = part.batch(np.arange(4), 2, 1.0)
    pieces = [part.batch(np.arange(3), 2, 1.0), part.batch(np.asarray([3]), 2, 1.0)]
    joined = NStepBatch.join(pieces)
    for name, value in vars(whole).items():
        np.testing.assert_array_equal(getattr(joined, name), value)
    assert NStepBatch.join([whole]) is whole
