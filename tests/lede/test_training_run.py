"""Runs: what they leave behind, how they go on, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lede.buffers.playback import synthesize
from lede.buffers.records import PromptTrace
from lede.buffers.settings import StoreSettings
from lede.buffers.store import TraceStore
from lede.buffers.writer import StoreWriter
from lede.checkpoint import load_policy
from lede.learner import Learner
from lede.learning_curve import read_curve
from lede.optimal_stopping import StoppingProblem
from lede.policies.learned import LearnedPolicy
from lede.run_folder import RunFolder
from lede.threshold_training import train_thresholds
from lede.training import TrainConfig, train
from lede.training_data import check_finite_record

PROBLEM = StoppingProblem()
SETTINGS = StoreSettings(
    kind="traces",
    model="stopping",
    n_layers=16,
    vocab_size=64,
    candidates=PROBLEM.candidates,
    fingerprint={
        "name": "stopping",
        "architecture": {"n_layers": 16},
        "tokenizer": None,
        "logits": [1.0, 2.0],
        "dtype": "float32",
    },
    temperature=0.7,
)
QUICK: dict[str, Any] = {
    "steps": 60,
    "batch_size": 32,
    "hidden": (8,),
    "eval_interval": 20,
    "checkpoint_interval": 15,
    "target_update_interval": 7,
    "passes": 1,
    "min_exits": 20,
}


@pytest.fixture(scope="module")
def traces() -> TraceStore:
    return TraceStore(SETTINGS, PROBLEM.traces(n_prompts=20, n_tokens=21, seed=0))


@pytest.fixture
def run(tmp_path: Path, traces: TraceStore) -> Callable[..., LearnedPolicy]:
    def start(out: str = "run", store: Any = traces, validation: Any = None, **settings: Any) -> LearnedPolicy:
        config = TrainConfig(buffer="memory", out=str(tmp_path / out), **{**QUICK, **settings})
        return train(config, store, validation, progress=False)

    return start


def same_weights(a: LearnedPolicy, b: LearnedPolicy) -> bool:
    ours, theirs = a.tensors(), b.tensors()
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def same_state(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same_state(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def test_a_run_leaves_policy_settings_checkpoints_and_logs(run: Callable[..., LearnedPolicy], tmp_path: Path) -> None:
    policy = run()
    out = tmp_path / "run"
    loaded = load_policy(out / "policy")
    assert isinstance(loaded, LearnedPolicy)
    assert same_weights(loaded, policy)
    assert loaded.fingerprint == SETTINGS.fingerprint
    assert loaded.config.candidates == PROBLEM.candidates
    assert loaded.config.trained_temperature == 0.7
    config = json.loads((out / "config.json").read_text())
    assert (config["n_steps"], config["gamma"], config["hidden"]) == (3, 1.0, [8])
    assert config["resolved"]["network"] == [4, 8, 2]
    assert config["resolved"]["features"]["names"] == list(SETTINGS.features.names)
    assert config["resolved"]["held_out"]
    steps = sorted(int(path.stem.removeprefix("step_")) for path in (out / "checkpoints").iterdir())
    assert steps == [15, 30, 45, 60]
    assert [point.step for point in read_curve(out / "logs" / "learning_curve.jsonl")] == [0, 20, 40, 60]
    assert list((out / "logs").glob("events.out.tfevents.*"))
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]  # no temporary file is left


@pytest.mark.parametrize("algo", ["dqn", "double-dqn", "cql"])
@pytest.mark.parametrize("stop_at", [10, 37, 52])
def test_resumed_equals_uninterrupted_bit_for_bit(
    run: Callable[..., LearnedPolicy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str, stop_at: int
) -> None:
    whole = run("whole", algo=algo, keep="best")
    update, done = Learner.update, 0

    def interrupted(self: Learner, batch: Any) -> float:
        nonlocal done
        done += 1
        if done > stop_at:
            raise KeyboardInterrupt
        return update(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run("parts", algo=algo, keep="best")
    resumed = run("parts", algo=algo, keep="best", resume=True)
    assert same_weights(resumed, whole)
    curves = [read_curve(tmp_path / out / "logs" / "learning_curve.jsonl") for out in ("whole", "parts")]
    assert curves[0] == curves[1]
    last = [RunFolder(tmp_path / out).last_checkpoint() for out in ("whole", "parts")]
    assert last[0] is not None
    assert {"learner", "rng", "best", "losses"} <= last[0].keys()
    assert same_state(last[0], last[1])


def test_a_finished_run_can_be_taken_further(run: Callable[..., LearnedPolicy], tmp_path: Path) -> None:
    whole = run("whole", steps=90)
    run("parts", steps=50)  # ends off both grids
    further = run("parts", steps=90, resume=True)
    assert same_weights(further, whole)
    curves = [read_curve(tmp_path / out / "logs" / "learning_curve.jsonl") for out in ("whole", "parts")]
    assert curves[0] == curves[1]
    assert same_weights(run("parts", steps=90, resume=True), whole)  # nothing left to do
    with pytest.raises(ValueError, match="90 updates already"):
        run("parts", steps=60, resume=True)


def test_resume_starts_where_there_is_nothing(run: Callable[..., LearnedPolicy]) -> None:
    assert same_weights(run("new", resume=True), run("other"))


def test_seeds_differ(run: Callable[..., LearnedPolicy]) -> None:
    assert not same_weights(run("a"), run("b", seed=1))


def test_an_existing_run_is_not_overwritten(run: Callable[..., LearnedPolicy]) -> None:
    run(steps=10)
    with pytest.raises(ValueError, match="holds a run already"):
        run(steps=10)


@pytest.mark.parametrize("algo", ["dqn", "thresholds"])
def test_a_file_in_the_way_is_told_before_any_data_are_read(algo: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = TrainConfig(buffer=str(tmp_path / "missing.zarr"), out=str(tmp_path / "file" / "run"), algo=algo)
    with pytest.raises(ValueError, match=r"cannot make the folder of the run .*run: .*file is a file"):
        (train_thresholds if algo == "thresholds" else train)(config)
    assert (tmp_path / "file").read_text() == ""


def test_resume_with_other_settings_or_data_is_refused_by_name(
    run: Callable[..., LearnedPolicy], tmp_path: Path
) -> None:
    run()
    with pytest.raises(ValueError, match=r"n_steps: 3 / 2; .*learning_rate: 0\.001 / 0\.01"):
        run(n_steps=2, learning_rate=0.01, resume=True)
    other = TraceStore(SETTINGS, PROBLEM.traces(n_prompts=21, n_tokens=21, seed=0))
    with pytest.raises(ValueError, match="was trained on other data"):
        run(store=other, resume=True)
    newest = tmp_path / "run" / "checkpoints" / "step_000000060.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"step_000000060\.pt is damaged"):
        run(resume=True)


@pytest.mark.parametrize("from_disk", [False, True])
def test_transitions_give_a_policy_too(
    run: Callable[..., LearnedPolicy], traces: TraceStore, tmp_path: Path, from_disk: bool
) -> None:
    played = synthesize(traces, seed=1)
    in_memory = run(store=played)
    if from_disk:
        path = tmp_path / "buffer.zarr"
        with StoreWriter.open(path, played.settings) as writer:
            for rollout in played:
                writer.add(rollout)
        config = TrainConfig(buffer=str(path), out=str(tmp_path / "disk"), **QUICK)
        assert same_weights(train(config, progress=False), in_memory)
    curve = read_curve(tmp_path / "run" / "logs" / "learning_curve.jsonl")
    assert 0 < curve[-1].score.n_tokens < 40  # of 2 held-out prompts, the tokens that agree


def test_validation_traces_are_scored_in_full(run: Callable[..., LearnedPolicy], tmp_path: Path) -> None:
    validation = TraceStore(SETTINGS, PROBLEM.traces(n_prompts=3, n_tokens=11, seed=9))
    run(validation=validation)
    assert {p.score.n_tokens for p in read_curve(tmp_path / "run" / "logs" / "learning_curve.jsonl")} == {30}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["resolved"]["held_out"] == []


def test_unfit_validation_is_refused(run: Callable[..., LearnedPolicy], traces: TraceStore) -> None:
    with pytest.raises(ValueError, match="validation must be a store of traces"):
        run(validation=synthesize(traces))
    warm = TraceStore(replace(SETTINGS, temperature=0.0), PROBLEM.traces(n_prompts=2, n_tokens=11, seed=9))
    with pytest.raises(ValueError, match=r"temperature: 0\.7 / 0\.0"):
        run(validation=warm)
    tuned = {**SETTINGS.fingerprint, "logits": [1.0, 3.0]}
    fine = TraceStore(replace(SETTINGS, fingerprint=tuned), PROBLEM.traces(n_prompts=2, n_tokens=11, seed=9))
    with pytest.raises(ValueError, match="fingerprint: logits"):
        run(validation=fine)
    with pytest.warns(UserWarning, match="20 of 20 validation prompts are in the buffer too"):
        run(validation=traces)


def test_copies_of_a_prompt_are_held_out_together(
    run: Callable[..., LearnedPolicy], traces: TraceStore, tmp_path: Path
) -> None:
    twice = [*traces, *(replace(trace, prompt_index=20 + trace.prompt_index) for trace in traces)]
    run(store=TraceStore(SETTINGS, twice))
    held_out = json.loads((tmp_path / "run" / "config.json").read_text())["resolved"]["held_out"]
    assert len(held_out) == 4
    assert {index + 20 for index in held_out if index < 20} == {index for index in held_out if index >= 20}


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(
    run: Callable[..., LearnedPolicy], tmp_path: Path, device: str
) -> None:
    with pytest.raises(ValueError, match=f"cannot train on device '{device}'"):
        run(device=device)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused_with_their_row(
    run: Callable[..., LearnedPolicy], traces: TraceStore, bad: float
) -> None:
    prompts = list(traces)
    entropy = prompts[2].entropy.copy()
    entropy[3, 5] = bad
    damaged = TraceStore(SETTINGS, [*prompts[:2], replace(prompts[2], entropy=entropy), *prompts[3:]])
    with pytest.raises(ValueError, match=rf"row 43 \(prompt 2\) .* holds {bad} in `entropy`"):
        run(store=damaged)
    for name in ("top2", "closing_top1", "branch_entropy"):
        odd = copy(prompts[2])
        object.__setattr__(odd, name, np.full((2, 3), bad))
        with pytest.raises(ValueError, match=rf"\(prompt 2\) of a shard holds {bad} in `{name}`"):
            check_finite_record(odd, 0, "a shard")
    rollouts = synthesize(traces).prompts
    rewards = rollouts[1].rewards.copy()
    rewards[4] = bad
    store = synthesize(traces)
    broken = type(store)(store.settings, [rollouts[0], replace(rollouts[1], rewards=rewards), *rollouts[2:]])
    with pytest.raises(ValueError, match=rf"row {rollouts[0].n_rows + 4} \(prompt 1\) .* holds {bad} in `rewards`"):
        run(store=broken)


def test_a_candidate_with_too_few_exits_is_refused_by_name(
    run: Callable[..., LearnedPolicy], traces: TraceStore
) -> None:
    rollouts = synthesize(traces)
    counts = {layer: sum(int((r.exit_layer == layer).sum()) for r in rollouts) for layer in PROBLEM.candidates}
    fewest = min(counts, key=lambda layer: counts[layer])
    rest = sorted(counts.values())[1]
    with pytest.raises(ValueError, match=rf"at candidate layer {fewest} \({counts[fewest]} exits\); {rest} are wanted"):
        run(store=rollouts, min_exits=rest)
    assert TrainConfig(buffer="b", out="o").min_exits == 100


def test_prompt_episodes_need_an_end_or_a_discount(run: Callable[..., LearnedPolicy], traces: TraceStore) -> None:
    def cut(trace: PromptTrace) -> PromptTrace:
        return replace(trace, ended_by_eos=False)

    truncated = TraceStore(SETTINGS, [cut(trace) for trace in traces])
    with pytest.raises(ValueError, match="trained on ends by EOS: the value of going on without end is infinite"):
        run(store=truncated, episode="prompt")
    run("discounted", store=truncated, episode="prompt", gamma=0.9)
    run("ended", episode="prompt")


def test_an_exploding_loss_is_reported(run: Callable[..., LearnedPolicy]) -> None:
    with pytest.raises(ValueError, match="Lower learning_rate"):
        run(learning_rate=1e18)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.5}, "gamma must be within"),
        ({"hidden": ()}, "hidden must name"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"averaging": 1.0}, "averaging must be within"),
        ({"seed": -1}, "seed must not be negative"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(buffer="b", out="o", **settings)
