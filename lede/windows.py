"""Transitions that are too many to hold: a window of them in memory, another one when all its rows were drawn.

The store comes in parts, a shard each. An epoch puts the parts in random order and cuts that order into windows of
about equal size; within a window the rows come in random order. Every row is so drawn exactly once an epoch, parts that
share a window change from epoch to epoch, and what is drawn depends on the seed and on how many rows were drawn before,
on nothing else: a resumed run needs no state but its count of updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lede.seeding import Purpose, numpy_stream
from lede.transitions import EpisodeUnit, Transitions

_STREAM = 3  # of the draws of windows, among those of training
_COLUMNS = ("actions", "rewards", "exit_layer", "match", "token_end", "episode_end", "terminated")


@dataclass(frozen=True)
class PartSize:
    """How much there is in a part."""

    rows: int
    """Decisions."""
    closings: int
    """Closing states."""


class TransitionWindows:
    """Transitions drawn without replacement from windows over the parts of a store.

    Args:
        load: Reads a part by its number.
        sizes: What each part holds.
        episode: What an episode is.
        window: Rows that a window may have. It has more if a part has more than half of it: two parts then.
        seed: Of all draws.
        mean: Mean of each feature over the states, `(feature,)`.
        std: Their standard deviations; 1 for a feature that never changes.
        probe: Some of the states, `(state, feature)`.

    Raises:
        ValueError: There is no decision at all.
    """

    def __init__(
        self,
        load: Callable[[int], Transitions],
        sizes: Sequence[PartSize],
        episode: EpisodeUnit,
        window: int,
        seed: int,
        mean: npt.NDArray[np.float64],
        std: npt.NDArray[np.float64],
        probe: npt.NDArray[np.float32],
    ) -> None:
        self._load, self._seed, self._sizes = load, seed, list(sizes)
        self.mean, self.std, self._probe = mean, std, probe
        self._rows = np.asarray([size.rows for size in sizes], dtype=np.int64)
        self._n_rows = int(self._rows.sum())
        if not self._n_rows:
            raise ValueError("the buffer holds no decision: collect prompts with max_new_tokens of at least 2")
        largest = int(self._rows.max())
        # a part that begins within a window ends in it
        self.n_windows = max(1, -(-self._n_rows // max(window - largest, largest)))
        most = min(self._n_rows, -(-self._n_rows // self.n_windows) + largest)
        closings = np.asarray([size.closings for size in sizes], dtype=np.int64)
        # twice the mean of a window, and a part: what is not used of an array takes no memory
        likely = min(int(closings.sum()), 2 * -(-int(closings.sum()) // self.n_windows) + int(closings.max()))
        self._buffers = _Buffers(mean.size, episode, most, likely)
        self._epoch: tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
        self._entered: tuple[int, int] | None = None
        self._held: Transitions | None = None
        self._order = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._n_rows

    def probe(self, n: int) -> npt.NDArray[np.float32]:
        """Some of the states, the same at any time, `(at most n, feature)`."""
        return self._probe[:: max(1, -(-len(self._probe) // n))]

    def draw(
        self, rng: np.random.Generator | None, position: int, n: int
    ) -> Iterator[tuple[Transitions, npt.NDArray[np.int64]]]:
        """The next `n` rows, and what they are rows of, in as many pieces as windows.

        Use a piece before the next one is asked for: its memory is used again.

        Args:
            rng: Not used; the draws have streams of their own.
            position: Rows drawn before.
            n: Rows.
        """
        while n > 0:
            epoch, place = divmod(position, self._n_rows)
            held, begin = self._enter(epoch, place)
            rows = self._order[place - begin : place - begin + n]
            yield held, rows
            position, n = position + rows.size, n - rows.size

    def windows(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """The parts of each window of an epoch, in order."""
        parts, window = self._cut(epoch)
        return [parts[window == number] for number in range(int(window[-1]) + 1)]

    def _cut(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The parts in the order of an epoch, and the window that each falls into."""
        if self._epoch is None or self._epoch[0] != epoch:
            parts = numpy_stream(self._seed, Purpose.TRAINING, _STREAM, epoch).permutation(len(self._sizes))
            parts = parts[self._rows[parts] > 0]
            before = np.cumsum(self._rows[parts]) - self._rows[parts]
            _, window = np.unique(before * self.n_windows // self._n_rows, return_inverse=True)
            self._epoch = (epoch, parts, window.reshape(-1))
        return self._epoch[1], self._epoch[2]

    def _enter(self, epoch: int, place: int) -> tuple[Transitions, int]:
        """The window in which a place of an epoch lies, read if it is another one, and the place of its first row."""
        parts, window = self._cut(epoch)
        ends = np.cumsum(self._rows[parts])
        number = int(window[np.searchsorted(ends, place, side="right")])
        mine = np.flatnonzero(window == number)
        begin = int(ends[mine[0]] - self._rows[parts[mine[0]]])
        if self._held is None or self._entered != (epoch, number):
            self._entered, self._held = (epoch, number), None
            self._order = self._order[:0]  # its memory goes before the new one's comes
            chosen = [int(part) for part in parts[mine]]
            self._held = self._buffers.fill(
                (self._read(part) for part in chosen),
                sum(self._sizes[part].rows for part in chosen),
                sum(self._sizes[part].closings for part in chosen),
            )
            stream = numpy_stream(self._seed, Purpose.TRAINING, _STREAM, epoch, number)
            self._order = stream.permutation(len(self._held))
        return self._held, begin

    def _read(self, part: int) -> Transitions:
        found, size = self._load(part), self._sizes[part]
        if (len(found), len(found.observations) - len(found)) != (size.rows, size.closings):
            raise ValueError(
                f"part {part} of the buffer has {len(found)} decisions, {size.rows} were there when training began: "
                "a store must not be changed while it is learned from"
            )
        return found


class _Buffers:
    """The memory of a window, used again for the next one.

    Args:
        n_features: Width of an observation.
        episode: What an episode is.
        most_rows: Rows of the largest window.
        most_closings: Closing states of the largest window; should one have more, memory is taken anew.
    """

    def __init__(self, n_features: int, episode: EpisodeUnit, most_rows: int, most_closings: int) -> None:
        self._n_features, self._episode = n_features, episode
        self._most_rows, self._most_closings = most_rows, most_closings
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def fill(self, parts: Iterator[Transitions], n_rows: int, n_closings: int) -> Transitions:
        """Put parts end to end; they are asked for one at a time."""
        self._most_closings = max(self._most_closings, n_closings)
        observations = self._array("observations", np.float32, n_rows + n_closings, self._n_features)
        next_row = self._array("next_row", np.int64, n_rows)
        columns: dict[str, npt.NDArray[Any]] = {}
        row, closing = 0, n_rows
        for part in parts:
            n, end = len(part), closing + len(part.observations) - len(part)
            observations[row : row + n] = part.states
            observations[closing:end] = part.observations[n:]
            next_row[row : row + n] = np.where(part.next_row < n, part.next_row + row, part.next_row - n + closing)
            for name in _COLUMNS:
                values = getattr(part, name)
                columns.setdefault(name, self._array(name, values.dtype, n_rows))[row : row + n] = values
            row, closing = row + n, end
        return Transitions(observations=observations, next_row=next_row, episode=self._episode, **columns)

    def _array(self, name: str, dtype: npt.DTypeLike, n: int, *width: int) -> npt.NDArray[Any]:
        kept = self._arrays.pop(name, None)
        if kept is None or len(kept) < n:
            del kept  # before the larger one is made
            most = self._most_rows + (self._most_closings if name == "observations" else 0)
            kept = np.empty((max(n, most), *width), dtype=dtype)
        self._arrays[name] = kept
        return kept[:n]
