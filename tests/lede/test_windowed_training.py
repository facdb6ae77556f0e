"""Stores that are too large to be held: checked, measured and learned from a shard at a time."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lede.buffers.playback import synthesize
from lede.buffers.records import PromptRollout, PromptTrace
from lede.buffers.settings import StoreSettings
from lede.buffers.store import Store, TraceStore, TransitionStore, open_store
from lede.buffers.writer import StoreWriter
from lede.learner import Learner
from lede.learning_curve import read_curve
from lede.optimal_stopping import StoppingProblem
from lede.policies.learned import LearnedPolicy
from lede.rewards import EXIT
from lede.run_folder import RunFolder
from lede.store_parts import sample_shards
from lede.training import TrainConfig, train
from lede.training_config import fixed_settings
from lede.training_data import TrainingData, load_data
from lede.windows import TransitionWindows
from tests.lede.test_training_run import SETTINGS, same_state, same_weights

PROBLEM = StoppingProblem()
TRACES = TraceStore(SETTINGS, PROBLEM.traces(n_prompts=40, n_tokens=21, seed=0))
PLAYED = synthesize(TRACES, seed=1)  # about 3,000 decisions
QUICK: dict[str, Any] = {
    "steps": 25,  # of 64 rows: over a window's end, and with the smaller ones over an epoch's
    "batch_size": 64,
    "hidden": (8,),
    "eval_interval": 10,
    "checkpoint_interval": 9,
    "target_update_interval": 7,
    "passes": 2,
    "min_exits": 20,
    "window": 700,
    "holdout": 0.5,  # of a window: about an eighth of the store
}


def write(
    path: Path, settings: StoreSettings, records: Iterable[PromptTrace | PromptRollout], shard_prompts: int = 4
) -> str:
    with StoreWriter.open(path, settings, shard_prompts=shard_prompts) as writer:
        for record in records:
            writer.add(record)
    return str(path)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("played") / "a.zarr", PLAYED.settings, PLAYED)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("traces") / "a.zarr", SETTINGS, TRACES)


@pytest.fixture
def run(tmp_path: Path, played: str) -> Callable[..., LearnedPolicy]:
    def start(out: str = "run", buffer: str = played, validation: Any = None, **settings: Any) -> LearnedPolicy:
        config = TrainConfig(buffer=buffer, out=str(tmp_path / out), **{**QUICK, **settings})
        return train(config, validation=validation, progress=False)

    return start


def load(buffer: str, validation: Any = None, **settings: Any) -> TrainingData:
    store = open_store(buffer)
    config = TrainConfig(buffer=buffer, out="unused", **{**QUICK, **settings}).settled(store.kind)
    data = load_data(config, store, validation)
    assert isinstance(data, TrainingData)
    return data


def all_rows(data: TrainingData) -> np.ndarray[Any, Any]:
    """Everything that an epoch draws, sorted: state, action, reward, next state."""
    drawn = [held.batch(rows, 1, 1.0) for held, rows in data.transitions.draw(None, 0, len(data.transitions))]  # type: ignore[arg-type]  # windows draw by themselves
    columns = [np.concatenate([getattr(each, name) for each in drawn]) for name in vars(drawn[0])]
    table = np.concatenate(columns, axis=1)
    return table[np.lexsort(table.T)]


@pytest.mark.parametrize("kind", ["played", "traces"])
@pytest.mark.parametrize("episode", ["token", "prompt"])
def test_windows_hold_what_memory_would(kind: str, episode: str, request: pytest.FixtureRequest) -> None:
    buffer = request.getfixturevalue(kind)
    validation = TraceStore(SETTINGS, PROBLEM.traces(n_prompts=3, n_tokens=11, seed=9))  # so nothing is held out
    windows, whole = (load(buffer, validation, window=window, episode=episode) for window in (700, 10**6))
    assert isinstance(windows.transitions, TransitionWindows)
    assert windows.transitions.n_windows > 3
    assert not isinstance(whole.transitions, TransitionWindows)
    everything = whole.transitions.batch(np.arange(len(whole.transitions)), 1, 1.0)
    table = np.concatenate([getattr(everything, name) for name in vars(everything)], axis=1)
    np.testing.assert_array_equal(all_rows(windows), table[np.lexsort(table.T)])
    np.testing.assert_allclose(windows.mean, whole.mean, rtol=1e-12)
    np.testing.assert_allclose(windows.std, whole.std, rtol=1e-9)
    assert windows.settings == whole.settings
    assert windows.validation_kind == whole.validation_kind == "traces"


def test_what_is_held_out_is_not_learned_from_and_is_a_share_of_a_window(played: str) -> None:
    data = load(played)
    assert 0 < len(data.held_out) < 12
    assert [record.prompt_index for record in data.validation] == sorted(data.held_out)
    kept = [rollout for rollout in PLAYED if rollout.prompt_index not in data.held_out]
    assert len(data.transitions) == sum(rollout.n_rows for rollout in kept)
    assert load(played).held_out == data.held_out
    assert load(played, seed=1).held_out != data.held_out
    unheld = load(played, holdout=0.0)
    assert unheld.held_out == ()
    assert len(unheld.transitions) == PLAYED.n_rows
    assert unheld.validation
    with pytest.raises(ValueError, match="none was held out by chance"):
        load(played, holdout=1e-6)


def test_copies_of_a_prompt_are_held_out_together(tmp_path: Path) -> None:
    twice = [*PLAYED, *(replace(rollout, prompt_index=40 + rollout.prompt_index) for rollout in PLAYED)]
    held_out = load(write(tmp_path / "a.zarr", PLAYED.settings, twice)).held_out
    assert {index + 40 for index in held_out if index < 40} == {index for index in held_out if index >= 40} != set()


def test_what_is_held_out_keeps_no_shard_in_memory(played: str) -> None:
    for record in load(played).validation:
        arrays = [value for value in vars(record).values() if isinstance(value, np.ndarray)]
        assert all(array.base is None for array in arrays)


@pytest.mark.parametrize("kind", ["played", "traces"])
def test_resumed_equals_uninterrupted_bit_for_bit(
    kind: str,
    run: Callable[..., LearnedPolicy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    buffer = request.getfixturevalue(kind)
    whole = run("whole", buffer)
    update, done = Learner.update, 0

    def interrupted(self: Learner, batch: Any) -> float:
        nonlocal done
        done += 1
        if done > 21:
            raise KeyboardInterrupt
        return update(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run("parts", buffer)
    assert same_weights(run("parts", buffer, resume=True), whole)
    curves = [read_curve(tmp_path / out / "logs" / "learning_curve.jsonl") for out in ("whole", "parts")]
    assert curves[0] == curves[1]
    last = [RunFolder(tmp_path / out).last_checkpoint() for out in ("whole", "parts")]
    assert same_state(last[0], last[1])
    resolved = json.loads((tmp_path / "whole" / "config.json").read_text())["resolved"]
    assert resolved["windows"] > 3


def test_another_seed_is_another_policy(run: Callable[..., LearnedPolicy]) -> None:
    whole = run("whole", steps=5)
    assert same_weights(run("again", steps=5), whole)
    assert not same_weights(run("other", steps=5, seed=1), whole)


def test_the_order_of_the_writers_does_not_show(played: str, tmp_path: Path, run: Callable[..., LearnedPolicy]) -> None:
    """Shards of the same prompts give the same policy, whoever wrote them and when."""
    groups = [list(PLAYED)[i : i + 4] for i in range(0, 40, 4)]
    backwards = write(tmp_path / "b.zarr", PLAYED.settings, [rollout for group in groups[::-1] for rollout in group])
    assert same_weights(run("a", steps=12), run("b", backwards, steps=12))


def test_a_prompt_of_two_shards_is_learned_from_once(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    late = StoreWriter.open(path, PLAYED.settings, shard_prompts=4)
    write(path, PLAYED.settings, PLAYED)
    with late:
        for rollout in list(PLAYED)[:4]:
            late.add(rollout)
    assert open_store(path).duplicates == 4
    assert len(load(str(path), holdout=0.0).transitions) == PLAYED.n_rows


def test_other_shards_are_other_data(run: Callable[..., LearnedPolicy], tmp_path: Path) -> None:
    buffer = write(tmp_path / "a.zarr", PLAYED.settings, PLAYED)
    run("run", buffer, steps=5)
    extra = replace(PLAYED.prompts[0], prompt_index=40)
    write(tmp_path / "a.zarr", PLAYED.settings, [extra])
    with pytest.raises(ValueError, match="was trained on other data"):
        run("run", buffer, resume=True, steps=5)
    with pytest.raises(ValueError, match="window: 700 / 800"):
        run("run", buffer, resume=True, window=800, steps=5)


def test_damaged_numbers_are_refused_with_shard_and_row(tmp_path: Path) -> None:
    rollouts = list(PLAYED)
    rewards = rollouts[5].rewards.copy()
    rewards[3] = np.nan
    rollouts[5] = replace(rollouts[5], rewards=rewards)
    buffer = write(tmp_path / "a.zarr", PLAYED.settings, rollouts)
    row = rollouts[4].n_rows + 3
    with pytest.raises(ValueError, match=rf"row {row} \(prompt 5\) of shard \S+ of .*a\.zarr holds nan in `rewards`"):
        load(buffer)


def test_rare_exits_and_endless_prompts_are_refused(played: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"too few exits to learn from at candidate layer 2 \(\d+ exits\)"):
        load(played, min_exits=10**6)
    endless = [replace(rollout, ended_by_eos=False) for rollout in PLAYED]
    buffer = write(tmp_path / "a.zarr", PLAYED.settings, endless)
    with pytest.raises(ValueError, match="no prompt that is trained on ends by EOS"):
        load(buffer, episode="prompt")


def test_validation_prompts_in_the_buffer_are_told_of(traces: str) -> None:
    validation = TraceStore(SETTINGS, TRACES.prompts[:3])
    with pytest.warns(UserWarning, match="3 of 3 validation prompts are in the buffer too"):
        load(traces, validation)


def test_a_store_in_memory_or_of_one_window_is_held(played: str) -> None:
    assert not isinstance(load(played, window=PLAYED.n_rows).transitions, TransitionWindows)
    config = TrainConfig(buffer="memory", out="unused", **QUICK).settled("transitions")
    data = load_data(config, TransitionStore(PLAYED.settings, PLAYED.prompts), None)
    assert not isinstance(data.transitions, TransitionWindows)


def test_a_checkpoint_from_before_there_were_windows_goes_on(
    run: Callable[..., LearnedPolicy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"steps": 20, "window": 524288}
    with monkeypatch.context() as patch:
        without = lambda config: {k: v for k, v in fixed_settings(config).items() if k != "window"}  # noqa: E731
        patch.setattr("lede.training_run.fixed_settings", without)
        run(**known)
    saved = RunFolder(tmp_path / "run").last_checkpoint()
    assert saved is not None
    assert "window" not in json.loads(saved["settings"])
    run(**{**known, "steps": 25}, resume=True)
    with pytest.raises(ValueError, match="window: 524288 / 700"):
        run(steps=25, resume=True)


def test_a_sample_of_shards_is_whole_and_fits(traces: str) -> None:
    store = open_store(traces)
    assert isinstance(store, TraceStore)
    sample = sample_shards(store, 250, seed=0)
    assert sample.n_rows == 240  # three shards of 4 prompts of 20 decisions
    groups = {index // 4 for index in sample.prompt_indices}
    assert sample.prompt_indices == tuple(4 * group + i for group in sorted(groups) for i in range(4))
    others: list[Store[Any]] = [sample_shards(store, 250, seed=seed) for seed in range(8)]
    assert len({other.prompt_indices for other in others}) > 1
    assert sample_shards(store, 1, seed=0).n_rows == 80  # a shard at least


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["played", "traces"])
def test_memory_does_not_grow_with_the_store(kind: str, tmp_path: Path) -> None:
    """Named for field note A6.9: four times the rows, the same peak, over an epoch and its first window again."""
    peaks, validation = [], TraceStore(SETTINGS, PROBLEM.traces(n_prompts=3, n_tokens=11, seed=9))
    for n_prompts in (60, 240):
        store: Store[Any] = TraceStore(SETTINGS, PROBLEM.traces(n_prompts, n_tokens=201, seed=0))
        store = synthesize(store, seed=1) if kind == "played" else store  # type: ignore[arg-type]  # of traces
        buffer = write(tmp_path / f"{n_prompts}.zarr", store.settings, store, shard_prompts=5)
        del store
        tracemalloc.start()
        opened = open_store(buffer)  # names and checksums of the shards' files
        index = tracemalloc.get_traced_memory()[0]
        del opened
        data = load(buffer, validation, window=10_000, passes=1)
        for position in range(0, len(data.transitions) + 10_000, 5000):
            for held, rows in data.transitions.draw(None, position, 5000):  # type: ignore[arg-type]  # windows draw by themselves
                held.batch(rows, 3, 1.0)
        peaks.append(tracemalloc.get_traced_memory()[1] - index)
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.slow
def test_windows_lead_to_the_optimum(tmp_path: Path) -> None:
    """The problem with a known solution, from a store that is eight times a window, as near as from memory."""
    played = synthesize(TraceStore(SETTINGS, PROBLEM.traces(n_prompts=400, n_tokens=51, seed=0)), seed=1)
    buffer = write(tmp_path / "a.zarr", played.settings, played, shard_prompts=8)
    config = TrainConfig(buffer=buffer, out=str(tmp_path / "run"), window=played.n_rows // 8)
    exits = train(config, progress=False).greedy(PROBLEM.observations(SETTINGS.features)) == EXIT
    assert PROBLEM.value(exits) > 0.98 * PROBLEM.solve()[1]
