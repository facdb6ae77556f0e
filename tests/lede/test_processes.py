"""Several processes train together: the learning curve of one, each with a share of every batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lede.checkpoint import load_policy
from lede.learning_curve import CurvePoint, read_curve
from lede.policies.learned import LearnedPolicy
from lede.processes import ALONE, Processes, check_alone, joined_processes
from lede.run_folder import RunFolder
from lede.sweep import SweepConfig, train_or_sweep
from lede.training import TrainConfig, _train, train
from tests.lede.test_windowed_training import PLAYED, write

ROOT = Path(__file__).parent.parent.parent
SETTINGS = {"steps": 40, "batch_size": 64, "eval_interval": 10, "checkpoint_interval": 20, "min_exits": 20}
WINDOWED = {**SETTINGS, "window": 700, "holdout": 0.5}


def flags(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def torchrun(n: int, buffer: str, out: Path, *more: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc-per-node n train.py ...`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    command = [*launcher, str(ROOT / "train.py"), "--buffer", buffer, "--out", str(out), *flags(settings), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("played") / "a.zarr", PLAYED.settings, PLAYED)


def close(ours: list[CurvePoint], theirs: list[CurvePoint], tolerance: float) -> None:
    """The same curve within a tolerance; a score may differ by a token on which two values are as good as equal."""
    assert [point.step for point in ours] == [point.step for point in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for name in ("loss", "q_continue", "q_exit"):
            assert asdict(one)[name] == pytest.approx(asdict(other)[name], abs=tolerance), (one.step, name)
        assert one.score.reward == pytest.approx(other.score.reward, abs=0.02)
        assert one.score.exit_rate == pytest.approx(other.score.exit_rate, abs=0.02)


def compare(tmp_path: Path, buffer: str, settings: dict[str, Any], tolerance: float = 1e-4) -> None:
    done = torchrun(2, buffer, tmp_path / "two", **settings)
    assert done.returncode == 0, done.stderr
    policy = train(TrainConfig(buffer=buffer, out=str(tmp_path / "one"), **settings), progress=False)
    curves = [read_curve(RunFolder(tmp_path / out).curve) for out in ("one", "two")]
    assert len(curves[0]) == 5
    assert curves[0][0] == curves[1][0]  # both begin with the same weights
    close(curves[1], curves[0], tolerance)
    ours = load_policy(tmp_path / "two" / "policy")
    assert isinstance(ours, LearnedPolicy)
    for name, tensor in policy.tensors().items():
        np.testing.assert_allclose(ours.tensors()[name], tensor, atol=10 * tolerance)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("memory: ")
    assert lines[0].endswith("of data in each of 2 processes")
    assert len([line for line in lines if line.startswith("step ")]) == 5  # one of them speaks
    assert len(list((tmp_path / "two" / "logs").glob("events.out.tfevents.*"))) == 1


def test_two_processes_have_the_learning_curve_of_one(tmp_path: Path, buffer: str) -> None:
    compare(tmp_path, buffer, WINDOWED)
    # and one process takes the run of two further, as its own
    further = {**WINDOWED, "steps": 50}
    for out in ("one", "two"):
        train(TrainConfig(buffer=buffer, out=str(tmp_path / out), resume=True, **further), progress=False)  # type: ignore[arg-type]  # of several types
    curves = [read_curve(RunFolder(tmp_path / out).curve) for out in ("two", "one")]
    assert curves[0][-1].step == 50
    close(curves[0], curves[1], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["dqn", "double-dqn", "cql"])
def test_two_processes_have_the_learning_curve_of_one_with_every_algorithm(
    tmp_path: Path, buffer: str, algo: str
) -> None:
    compare(tmp_path, buffer, {**SETTINGS, "algo": algo}, 1e-3)


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit(tmp_path: Path, buffer: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert torchrun(2, buffer, whole, **WINDOWED).returncode == 0
    assert torchrun(2, buffer, parts, **{**WINDOWED, "steps": 25}).returncode == 0
    assert torchrun(2, buffer, parts, "--resume", **WINDOWED).returncode == 0
    assert read_curve(RunFolder(whole).curve)[-1] == read_curve(RunFolder(parts).curve)[-1]
    refused = torchrun(2, buffer, parts, **WINDOWED)
    assert refused.returncode != 0
    assert "holds a run already" in refused.stderr


def test_shares_make_up_the_batch() -> None:
    rows = np.arange(23)
    for size in (1, 2, 4):
        for cut in (0, 5, 23):  # a batch may come in two pieces
            shares = [
                np.concatenate(
                    [rows[:cut][Processes(rank, size).share(0)], rows[cut:][Processes(rank, size).share(cut)]]
                )
                for rank in range(size)
            ]
            assert sorted(np.concatenate(shares).tolist()) == rows.tolist()
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            for rank, share in enumerate(shares):
                np.testing.assert_array_equal(share, rows[rank::size])


def test_one_process_is_alone() -> None:
    with joined_processes("cpu") as processes:
        assert (processes.rank, processes.size, processes.device) == (0, 1, "cpu")
        assert processes.first
        assert processes.mean(0.1) == 0.1
        processes.wait()
    with joined_processes("cuda") as processes:
        assert processes.device == "cuda:0"
    check_alone("a sweep")
    assert not torch.distributed.is_initialized()


@pytest.fixture
def of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun would start the second of three processes."""
    for name, value in {
        "TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "RANK": "1", "LOCAL_RANK": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("of_three")
def test_what_several_processes_cannot_do_is_refused(
    tmp_path: Path, buffer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in ("cuda:1", "mps"):
        with pytest.raises(ValueError, match=f"device '{device}' for 3 processes"), joined_processes(device):
            pass
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="3 processes for 1 GPUs"), joined_processes("cuda"):
        pass
    config: dict[str, Any] = {"buffer": buffer, "out": str(tmp_path / "run")}
    with pytest.raises(ValueError, match="a sweep is not shared among processes, torchrun started 3"):
        train_or_sweep(SweepConfig(seeds=2, **config))
    with pytest.raises(ValueError, match="the search for thresholds is not shared"):
        train_or_sweep(SweepConfig(algo="thresholds", **config))
    with pytest.raises(ValueError, match="batch_size 256 can't be shared evenly among 3 processes"):
        _train(TrainConfig(**config), None, None, False, Processes(1, 3))
    assert not (tmp_path / "run").exists()


def test_a_process_that_is_not_the_first_writes_nothing(tmp_path: Path, buffer: str) -> None:
    """The second of two writes nothing: its part of the run, without the other one."""
    silent = Processes(1, 1)
    config = TrainConfig(buffer=buffer, out=str(tmp_path / "run"), **SETTINGS)  # type: ignore[arg-type]  # of several types
    policy = _train(config, None, None, True, silent)
    assert not (tmp_path / "run").exists()
    assert policy.tensors().keys()
    assert ALONE.first


def test_the_command_says_how_much_memory_first(
    tmp_path: Path, buffer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train_or_sweep(SweepConfig(buffer=buffer, out=str(tmp_path / "run"), **{**WINDOWED, "steps": 2}))  # type: ignore[arg-type]  # of several types
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"memory: {PLAYED.n_rows:,} decisions, read in windows of 700: about ")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["window"] == 700
