"""What a learned policy took, read from the files of its run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lede.bench_runs import Cost
from lede.collectors import CollectConfig, collect
from lede.policies import StaticPolicy
from lede.policy_cost import cost_of_folder, stores_of
from lede.run_folder import RunFolder
from lede.stopwatch import SECONDS, Spent, Stopwatch
from lede.training import TrainConfig, train
from lede.tuning import budget_of
from tests.tiny_models import prompt, tiny_model

PROMPTS = [prompt(n, 5) for n in range(12)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of 12 prompts, 2 more for validation, and a run of 40 updates with 3 points of its curve."""
    folder = tmp_path_factory.mktemp("made")
    model = tiny_model("llama")
    for name, some in (("traces.zarr", PROMPTS[:10]), ("validation.zarr", PROMPTS[10:])):
        collect(CollectConfig(folder / name, collector="teacher", max_new_tokens=16, branches=0.0), model, some)
    train(config_of(folder), progress=False)
    return folder


def config_of(folder: Path, name: str = "run", **settings: int | bool) -> TrainConfig:
    sizes = {"steps": 40, "eval_interval": 20, "checkpoint_interval": 20, "batch_size": 16, "min_exits": 1, "passes": 1}
    return TrainConfig(
        buffer=str(folder / "traces.zarr"),
        validation=str(folder / "validation.zarr"),
        out=str(folder / name),
        hidden=(8,),
        **{**sizes, **settings},  # type: ignore[arg-type]  # as the fields are
    )


def test_the_cost_of_a_run(made: Path) -> None:
    cost = cost_of_folder(made / "run" / "policy")
    collected = [Spent.read(made / name) for name in ("traces.zarr", "validation.zarr")]
    trained = Spent.read(made / "run")
    assert trained is not None
    assert all(spent is not None and spent.seconds > 0 and spent.sittings == 1 for spent in collected)
    assert cost == Cost(
        prompts=12,
        collecting_seconds=sum(spent.seconds for spent in collected if spent is not None),
        training_seconds=trained.seconds,
        evaluations=3 * 2,  # points of the curve, validation prompts
        note="",
    )
    assert cost.training_seconds > 0
    assert budget_of([str(made / "run" / "policy"), "static"], 16, 8, 64) == 6
    assert budget_of([str(made / "run")], 16, 8, 64) == 0  # no policy itself


def test_the_stores_of_a_run(made: Path, tmp_path: Path) -> None:
    wanted = [(made / name).resolve() for name in ("traces.zarr", "validation.zarr")]
    assert stores_of(made / "run" / "policy") == wanted
    assert stores_of(tmp_path) == []


def test_the_seconds_of_a_cost_profile_are_said_to_be_missing(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "run", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps({**config, "profile": "profile.json"}))
    said = "the cost profile's seconds are not counted"
    assert said in cost_of_folder(tmp_path / "run" / "policy").note
    assert said not in cost_of_folder(made / "run" / "policy").note


def test_a_copy_of_the_policy_is_traced_to_its_run(made: Path, tmp_path: Path) -> None:
    whole = tmp_path / "moved"
    shutil.copytree(made, whole)
    shutil.copytree(made / "run" / "policy", whole / "policy")
    cost = cost_of_folder(whole / "policy")
    assert cost.note == "copied from run"
    assert (cost.prompts, cost.evaluations) == (12, 6)
    StaticPolicy().save_pretrained(str(tmp_path / "static"))
    assert cost_of_folder(tmp_path / "static").note.startswith("no training run was found")


def test_what_the_files_do_not_tell_is_said(made: Path, tmp_path: Path) -> None:
    for name in ("run", "validation.zarr"):
        shutil.copytree(made / name, tmp_path / name)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["buffer"], config["validation"] = "nowhere/gone.zarr", "elsewhere/validation.zarr"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    (tmp_path / "run" / SECONDS).write_text("{")
    (tmp_path / "validation.zarr" / SECONDS).write_text(json.dumps({"seconds": 7.5, "sittings": 3}))
    cost = cost_of_folder(tmp_path / "run" / "policy")
    assert (cost.prompts, cost.collecting_seconds, cost.training_seconds) == (2, 7.5, 0.0)
    assert cost.note == (
        "the seconds of training were not recorded; the buffer store nowhere/gone.zarr was not found; "
        "collecting validation.zarr took 3 sittings"
    )


def test_the_policy_of_a_sweep_has_cost_all_of_its_runs(made: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(made / "run", tmp_path / name)
    shutil.copytree(made / "run" / "policy", tmp_path / "policy")
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": ["a", "b"]}))
    one, both = cost_of_folder(made / "run" / "policy"), cost_of_folder(tmp_path / "policy")
    assert both.note == "a sweep of 2 runs"
    assert both.training_seconds == 2 * one.training_seconds
    assert both.evaluations == 2 * one.evaluations
    assert (both.prompts, both.collecting_seconds) == (one.prompts, one.collecting_seconds)  # stores are shared


def test_seconds_go_on_over_sittings(made: Path, tmp_path: Path) -> None:
    first = Stopwatch(tmp_path).write()
    assert (Spent.read(tmp_path), first.sittings) == (first, 1)
    watch = Stopwatch(tmp_path)
    second = watch.write()
    third = watch.write()
    assert second.sittings == third.sittings == 2
    assert first.seconds < second.seconds < third.seconds
    assert Spent.read(tmp_path / "nothing") is None


def test_resumed_jobs_add_up_and_finished_ones_stay(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "copy")
    copy, model = tmp_path / "copy", tiny_model("llama")
    before = {name: Spent.read(copy / name) for name in ("run", "traces.zarr")}
    train(config_of(copy, resume=True), progress=False)
    settings = CollectConfig(copy / "traces.zarr", collector="teacher", max_new_tokens=16, branches=0.0)
    collect(settings, model, PROMPTS[:10])
    assert {name: Spent.read(copy / name) for name in before} == before  # nothing was left to do
    train(config_of(copy, resume=True, steps=50), progress=False)
    after = {name: Spent.read(copy / name) for name in before}
    ran, was = after["run"], before["run"]
    assert ran is not None
    assert was is not None
    assert ran.sittings == 2
    assert ran.seconds > was.seconds
    assert "training took 2 sittings" in cost_of_folder(copy / "run" / "policy").note
    assert RunFolder(copy / "run").last_checkpoint() is not None
