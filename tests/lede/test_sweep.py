"""Sweeps: what the flags mean, which runs they make, how they go on, and what is made of the results."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lede import sweep as sweeping
from lede.buffers.settings import StoreSettings
from lede.buffers.store import TraceStore
from lede.buffers.writer import StoreWriter
from lede.checkpoint import load_policy
from lede.cli import main
from lede.cost_model import CostModel
from lede.cost_profile import CostProfile
from lede.intervals import Interval
from lede.learner import Learner
from lede.optimal_stopping import StoppingProblem
from lede.policies.learned import LearnedPolicy
from lede.seed_interval import seed_interval, student_quantile
from lede.sweep import SweepConfig, sweep
from lede.sweep_grid import SWEPT, Setting, grid, parse_sweeps
from lede.sweep_results import RunResult, SweepResults, SweepRun
from lede.training import TrainConfig, train
from lede.training_data import load_data
from tests.planted_costs import PLANTED

PROBLEM = StoppingProblem()
FINGERPRINT = {
    "name": "stopping",
    "architecture": {"n_layers": 16},
    "tokenizer": None,
    "logits": [1.0, 2.0],
    "dtype": "float32",
}
SETTINGS = StoreSettings(
    kind="traces",
    model="stopping",
    n_layers=16,
    vocab_size=64,
    candidates=PROBLEM.candidates,
    fingerprint=FINGERPRINT,
    max_new_tokens=21,
)
QUICK: dict[str, Any] = {
    "steps": 30,
    "batch_size": 32,
    "hidden": (8,),
    "eval_interval": 10,
    "checkpoint_interval": 10,
    "passes": 1,
    "min_exits": 20,
}
FLAGS = [
    *["--steps", "30", "--batch-size", "32", "--hidden", "8", "--eval-interval", "10"],
    *["--checkpoint-interval", "10", "--passes", "1", "--min-exits", "20"],
]


@pytest.fixture(scope="module")
def traces() -> TraceStore:
    return TraceStore(SETTINGS, PROBLEM.traces(n_prompts=20, n_tokens=21, seed=0))


@pytest.fixture
def start(tmp_path: Path, traces: TraceStore) -> Callable[..., SweepResults]:
    def run(*sweeps: str, out: str = "sweep", store: TraceStore = traces, **settings: Any) -> SweepResults:
        config = SweepConfig(buffer="memory", out=str(tmp_path / out), sweep=sweeps, **{**QUICK, **settings})
        return sweep(config, store, progress=False)

    return run


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    costs = CostModel(16, (None,) * 16, PLANTED)
    path = tmp_path / "profile.json"
    found = CostProfile(
        model="stopping", fingerprint=FINGERPRINT, candidates=PROBLEM.candidates, contexts=(32,), repeats=1,
        device="cpu", device_name="planted", threads=1, dtype="float32", attention="eager", versions={},
        measurements=(), costs=costs, residuals={},
    )  # fmt: skip
    path.write_text(json.dumps(found.to_json()))
    return path


def same_weights(a: Any, b: Any) -> bool:
    assert isinstance(a, LearnedPolicy)
    assert isinstance(b, LearnedPolicy)
    ours, theirs = a.tensors(), b.tensors()
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_values_are_typed_by_the_settings() -> None:
    assert parse_sweeps(["n-steps=1,3", "learning_rate=1e-3, 0.01", "hidden=64x64,32", "cut-at-greedy=true,false"]) == {
        "n_steps": (1, 3),
        "learning_rate": (0.001, 0.01),
        "hidden": ((64, 64), (32,)),
        "cut_at_greedy": (True, False),
    }
    assert parse_sweeps(["candidates=2x4,2+4+8,all,none", "features=depth+entropy,none", "algo=dqn,cql"]) == {
        "candidates": ("2,4", "2,4,8", "all", None),
        "features": (("depth", "entropy"), None),
        "algo": ("dqn", "cql"),
    }


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["n_steps"], "'n_steps' is no sweep; sweeps look like n-steps=1,3"),
        (["n_stps=1"], "there is no setting 'n_stps' to sweep; settings are objective, sources, .*n-steps, "),
        (["seed=1,2"], "seed can't be swept: --seeds says"),
        (["holdout=0.1,0.2"], "holdout can't be swept: scores on other prompts"),
        (["n-steps=1,x"], "'n-steps' must be a whole number, got 'x'"),
        (["algo=dqn,sac"], "'algo' must be dqn or double-dqn or cql or thresholds, got 'sac'"),
        (["hidden=64x64,64x"], "joined by x and words by"),
        (["n-steps="], "'n-steps' must be a whole number"),
        (["n-steps=1", "n_steps=3"], "n_steps is swept twice"),
        (["learning-rate=1e-3,0.001"], "given the value 0.001 twice"),
        (["candidates=../x"], r"'\.\./x' can't be a value of candidates"),
    ],
)
def test_what_is_no_sweep_is_told_in_a_line(texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_sweeps(texts)
    assert "\n" not in str(caught.value)


def test_every_setting_is_swept_or_refused_with_a_reason() -> None:
    assert {"objective", "candidates", "features", "algo", "n_steps", "hidden", "episode", "explore"} <= set(SWEPT)
    assert not {"buffer", "out", "seed", "resume", "validation", "profile", "branches"} & set(SWEPT)


def test_folders_are_named_by_setting_and_seed() -> None:
    names = [each.run_name(7) for each in grid(parse_sweeps(["n-steps=1,3", "hidden=64x64,8"]))]
    assert names == [
        "n-steps=1,hidden=64x64,seed=7",
        "n-steps=1,hidden=8,seed=7",
        "n-steps=3,hidden=64x64,seed=7",
        "n-steps=3,hidden=8,seed=7",
    ]
    assert [each.run_name(0) for each in grid({})] == ["seed=0"]
    long = [Setting((("hidden", (8,) * 150 + (last,)),)).run_name(0) for last in (1, 2)]
    assert long[0] != long[1]
    assert max(map(len, long)) < 255


def test_students_quantiles_are_those_of_the_tables() -> None:
    known = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 30: 2.0423, 199: 1.9720}
    assert {each: round(student_quantile(each), 4) for each in known} == known
    assert round(student_quantile(4, 0.9), 4) == 2.1318
    found = seed_interval([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.value, round(found.lower, 4), round(found.upper, 4)) == (2.0, -0.4841, 4.4841)
    assert seed_interval([1.0]) is None
    assert seed_interval([2.0, 2.0]) == Interval(2.0, 2.0, 2.0)


def test_best_setting_by_mean_then_its_best_seed() -> None:
    steady, lucky, broken = (Setting((("n_steps", n),)) for n in (1, 2, 3))

    def made(setting: Setting, score: float | None, seconds: float | None, error: str | None = None) -> SweepRun:
        result = None if score is None else RunResult(score, "speedup", 10, seconds)
        return SweepRun(setting, 0, f"{setting.name}:{score}", result, error)

    found = SweepResults.of(
        [
            made(lucky, 1.9, 1.0), made(lucky, 1.0, 3.0),
            made(steady, 1.5, 4.0), made(steady, 1.6, None),
            made(broken, 9.0, 1.0), made(broken, None, None, "exploded"),
        ]
    )  # fmt: skip
    assert [each.setting for each in found.settings] == [steady, lucky, broken]
    assert found.chosen == "n-steps=1:1.6"
    best, second, last = found.settings
    assert best.mean == pytest.approx(1.55)
    assert (best.seconds, second.seconds) == (4.0, 2.0)  # a run that was stopped in between has no time
    assert (last.n_finished, last.n_seeds, last.error) == (1, 2, "exploded")
    assert found.complete


def test_a_sweep_leaves_runs_tables_a_picture_and_the_best_policy(
    start: Callable[..., SweepResults], traces: TraceStore, tmp_path: Path
) -> None:
    found = start("n-steps=1,3", "hidden=8,4x4", seeds=2, seed=5)
    out = tmp_path / "sweep"
    assert {path.parent.name for path in out.glob("*/result.json")} == {run.name for run in found.runs}
    assert len(found.runs) == 8
    assert {run.seed for run in found.runs[:4]} == {5}
    given: dict[str, Any] = {**QUICK, "hidden": (4, 4), "seed": 6, "split_seed": 5}
    trained = train(TrainConfig(buffer="memory", out=str(tmp_path / "alone"), **given), traces, progress=False)
    assert same_weights(load_policy(out / "n-steps=3,hidden=4x4,seed=6" / "policy"), trained)
    told = json.loads((out / "results.json").read_text())
    assert (told["complete"], told["measure"], told["chosen"]) == (True, "reward", found.chosen)
    assert same_weights(load_policy(out / "policy"), load_policy(out / told["chosen"] / "policy"))
    scores = {run["folder"]: run["result"]["score"] for run in told["runs"]}
    for setting in told["settings"]:
        ours = [score for name, score in scores.items() if name.startswith(f"{setting['name']},seed=")]
        assert len(ours) == 2
        assert setting["mean"] == pytest.approx(statistics.fmean(ours))
        half = 12.7062 * statistics.stdev(ours) / 2**0.5
        assert setting["upper"] - setting["mean"] == pytest.approx(half, rel=1e-4)
        assert scores[setting["best"]] == max(ours)
        assert setting["seconds"] > 0
    means = [setting["mean"] for setting in told["settings"]]
    assert means == sorted(means, reverse=True)
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["mean"]) for row in rows] == means
    assert {(row["n_steps"], row["hidden"]) for row in rows} == {("1", "8"), ("1", "4x4"), ("3", "8"), ("3", "4x4")}
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]


@pytest.mark.parametrize("keep", ["last", "best"])
def test_the_score_is_that_of_the_frozen_policy(
    start: Callable[..., SweepResults], traces: TraceStore, tmp_path: Path, keep: str
) -> None:
    found = start(seeds=2, keep=keep, steps=25, learning_rate=0.03)
    for run in found.runs:
        config = TrainConfig(buffer="memory", out="none", **{**QUICK, "seed": run.seed, "split_seed": 0})
        policy = load_policy(tmp_path / "sweep" / run.name / "policy")
        assert isinstance(policy, LearnedPolicy)
        assert run.result is not None
        assert run.result.score == pytest.approx(load_data(config.settled("traces"), traces, None).score(policy).merit)


def test_with_a_profile_the_score_is_the_speedup(start: Callable[..., SweepResults], profile: Path) -> None:
    found = start("objective=paper,wall-clock", seeds=1, profile=str(profile))
    assert found.measure == "speedup"
    assert all(each.mean is not None and each.interval is None for each in found.settings)


def test_stopped_sweeps_go_on_and_finished_runs_are_left_alone(
    start: Callable[..., SweepResults], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start("n-steps=1,3", seeds=2, out="whole")
    update, done = Learner.update, 0

    def interrupted(self: Learner, batch: Any) -> float:
        nonlocal done
        done += 1
        if done > 45:
            raise KeyboardInterrupt
        return update(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start("n-steps=1,3", seeds=2)
    out = tmp_path / "sweep"
    told = json.loads((out / "results.json").read_text())
    assert [run["result"] is not None for run in told["runs"]] == [True, False, False, False]
    assert not told["complete"]
    assert not (out / "policy").exists()
    with pytest.raises(ValueError, match="holds a sweep already"):
        start("n-steps=1,3", seeds=2)
    trained: list[TrainConfig] = []

    def noted(config: TrainConfig, *rest: Any, **more: Any) -> LearnedPolicy:
        trained.append(config)
        return train(config, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(sweeping, "train", noted)
        found = start("n-steps=1,3", seeds=2, resume=True)
    assert [Path(config.out).name for config in trained] == [run.name for run in found.runs[1:]]
    assert [each.mean for each in found.settings] == [each.mean for each in whole.settings]
    assert [run.result is not None and run.result.seconds is None for run in found.runs] == [False, True, False, False]
    more = start("n-steps=1,3,2", seeds=3, resume=True)  # the grid may grow
    assert len(more.runs) == 9
    assert more.complete


def test_going_on_with_other_settings_or_data_is_refused(start: Callable[..., SweepResults], tmp_path: Path) -> None:
    start("n-steps=1", seeds=1)
    with pytest.raises(ValueError, match=r"n-steps=1,seed=0 was trained with other settings .*: steps: 30 / 40"):
        start("n-steps=1", seeds=1, steps=40, resume=True)
    other = TraceStore(SETTINGS, PROBLEM.traces(n_prompts=21, n_tokens=21, seed=0))
    with pytest.raises(ValueError, match="was trained on other data"):
        start("n-steps=1", seeds=1, store=other, resume=True)
    (tmp_path / "sweep" / "n-steps=1,seed=0" / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result\.json is damaged"):
        start("n-steps=1", seeds=1, resume=True)


def test_settings_that_do_not_fit_are_refused_before_the_first_run(
    start: Callable[..., SweepResults], tmp_path: Path
) -> None:
    for text, message in (
        ("n-steps=3,0", "n_steps must be at least 1"), ("episode=token,round", "belongs to the wall-clock objective"),
        ("algo=dqn,thresholds", "a sweep trains networks"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            start(text)
    assert not (tmp_path / "sweep").exists()
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        SweepConfig(buffer="b", out="o", seeds=0)


def test_a_run_that_fails_does_not_stop_the_others(start: Callable[..., SweepResults], tmp_path: Path) -> None:
    found = start("learning-rate=1e18,1e-3", seeds=2)
    assert [each.setting.name for each in found.settings] == ["learning-rate=0.001", "learning-rate=1e+18"]
    assert found.settings[1].error is not None
    assert "values exploded" in found.settings[1].error
    assert found.chosen is not None
    assert found.chosen.startswith("learning-rate=0.001,")
    with pytest.raises(ValueError, match="every run failed; learning-rate=1e\\+18,seed=0: the loss is"):
        start("learning-rate=1e18", seeds=1, out="bad")
    assert json.loads((tmp_path / "bad" / "results.json").read_text())["chosen"] is None


def test_tensorboard_has_curves_and_hyperparameters_of_each_run(
    start: Callable[..., SweepResults], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    found = start("hidden=8,4x4", seeds=1)
    for run in found.runs:
        logs = tmp_path / "sweep" / run.name / "logs"
        curve = EventAccumulator(str(logs)).Reload()
        assert [event.step for event in curve.Scalars("greedy/reward")] == [0, 10, 20, 30]
        events = EventAccumulator(str(logs / "hparams")).Reload()
        assert run.result is not None
        assert [event.value for event in events.Scalars("sweep/reward")] == [pytest.approx(run.result.score)]
        content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        values = HParamsPluginData.FromString(content).session_start_info.hparams
        assert values["hidden"].string_value == run.setting.spelled[0]
        assert values["seed"].number_value == 0


@pytest.fixture
def on_disk(tmp_path: Path, traces: TraceStore) -> str:
    path = tmp_path / "traces.zarr"
    with StoreWriter.open(path, SETTINGS) as writer:
        for trace in traces:
            writer.add(trace)
    return str(path)


def test_the_command_sweeps(on_disk: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    command = ["train", "--buffer", on_disk, "--out", out, *FLAGS]
    assert main([*command, "--sweep", "n-steps=1,3", "--sweep", "algo=dqn,double-dqn", "--seeds", "2"]) == 0
    told = capsys.readouterr().out
    assert "4 setting(s) x 2 seed(s) = 8 runs" in told
    assert "8/8 n-steps=3,algo=double-dqn,seed=1: reward " in told
    assert "n-steps=1 algo=double-dqn" in told.split("best run")[1]
    assert max(map(len, told.split("best run")[1].splitlines()[:8])) <= 80
    assert main(command) == 2
    assert "holds a sweep: give its --sweep and --seeds again" in capsys.readouterr().err
    assert main([*command, "--sweep", "n_stps=1"]) == 2
    told = capsys.readouterr().err
    assert "there is no setting 'n_stps' to sweep; settings are objective, sources, lookups, prune-at, max" in told


def test_without_a_sweep_the_command_trains_once(
    on_disk: str, traces: TraceStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["train", "--buffer", on_disk, "--out", str(out), *FLAGS]
    assert main(command) == 0
    names = "checkpoints config.json logs policy seconds.json"
    assert sorted(path.name for path in out.iterdir()) == names.split()
    alone = train(TrainConfig(buffer="memory", out=str(tmp_path / "alone"), **QUICK), traces, progress=False)
    assert same_weights(load_policy(out / "policy"), alone)
    config = json.loads((out / "config.json").read_text())
    assert not {"sweep", "seeds"} & set(config)
    assert main([*command, "--seeds", "2"]) == 2
    assert "holds a single run; give the sweep another folder" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(
    on_disk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def second(config: TrainConfig, *rest: Any, **more: Any) -> LearnedPolicy:
        if config.seed:
            raise KeyboardInterrupt
        return train(config, *rest, **more)

    monkeypatch.setattr(sweeping, "train", second)
    assert main(["train", "--buffer", on_disk, "--out", str(tmp_path / "out"), "--seeds", "3", *FLAGS]) == 130
    assert "stopped with 1 of 3 runs finished; the same command with --resume goes on" in capsys.readouterr().out


def test_defaults_are_five_seeds_in_a_sweep_and_one_without() -> None:
    config = SweepConfig(buffer="b", out="o")
    assert config.n_seeds == 1
    assert replace(config, sweep=("n-steps=1",)).n_seeds == 5
    assert type(config.single) is TrainConfig
