"""A real local Ray cluster: its actors write what one process would have written, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lede.buffers import open_store
from lede.cli import main
from lede.collectors import WorkerError, collect
from lede.collectors.crew import Event, Progressed
from tests.collectors.saved_model import (
    PROMPTS,
    assert_close_content,
    assert_equal_content,
    config_of,
    save_tiny_model,
)

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]

HEAD = """
import sys

import ray

context = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
print("cluster", context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a cluster of this machine that this process has joined."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # it would write a token into the home folder
        patch.setenv("PYTHONPATH", str(ROOT))  # where lede is not installed
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # some versions warn of a change to come without it
        patch.delenv("RAY_ADDRESS", raising=False)
        # started by another process: Ray leaves files and processes to the garbage collector
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", HEAD], **pipes) as head:
            assert head.stdout is not None
            address = next(line.split()[1] for line in head.stdout if line.startswith("cluster "))
            ray.init(address, log_to_driver=False)
            yield address
            ray.shutdown()
            head.communicate()  # the end of its input is the end of it


def test_two_actors_equal_one_process(model: Path, tmp_path: Path, cluster: str) -> None:
    import ray

    settings: dict[str, Any] = {"explore": "random", "epsilon": "0.5"}
    collect(config_of(model, tmp_path / "two", ray="", workers=2, **settings), prompts=PROMPTS)
    collect(config_of(model, tmp_path / "one", **settings), prompts=PROMPTS)
    assert_equal_content(tmp_path / "one", tmp_path / "two")
    assert len({commit.stem.split("-")[1] for commit in (tmp_path / "two" / "commits").iterdir()}) == 2  # two processes
    assert ray.is_initialized()  # it was there before


def test_an_actor_killed_in_the_middle_changes_nothing(
    model: Path, tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    from lede.collectors.ray_workers import RayCrew

    killed: list[int] = []

    class Crew(RayCrew):
        def events(self) -> Iterator[Event]:
            for event in super().events():
                if isinstance(event, Progressed) and event.n_tokens and not killed:
                    killed.append(event.worker)
                    os.kill(ray.get(self.actor(event.worker).pid.remote()), signal.SIGKILL)
                yield event

    monkeypatch.setattr("lede.collectors.ray_workers.RayCrew", Crew)
    monkeypatch.setattr("lede.collectors.ray_workers.ASK_EVERY", 0.05)
    teacher: dict[str, Any] = {"collector": "teacher", "branches": 0.5, "batch_size": 3, "shard_prompts": 6}
    longer: dict[str, Any] = {"episodes": 48, "cycle": True, "max_new_tokens": 24}
    collect(config_of(model, tmp_path / "two", ray="", workers=2, **teacher, **longer), prompts=PROMPTS)
    assert f"worker {killed[0]} ended with 'The actor died unexpectedly" in capsys.readouterr().out
    collect(config_of(model, tmp_path / "one", **teacher, **longer), prompts=PROMPTS)
    assert_close_content(tmp_path / "one", tmp_path / "two")
    assert open_store(tmp_path / "two").duplicates == 0


@pytest.mark.parametrize("joined", [True, False], ids=["joins", "starts"])
def test_the_command_line_joins_a_cluster_or_starts_one(tmp_path: Path, cluster: str, joined: bool) -> None:
    (tmp_path / "prompts.txt").write_text("def f():\nclass A:\n")
    address = cluster if joined else ""
    command = f"-m lede.cli collect --ray {address} --max-new-tokens 3 --out store.zarr --prompts prompts.txt"
    done = subprocess.run([sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ("Started a local Ray instance" in done.stderr) != joined
    assert open_store(tmp_path / "store.zarr", verify=True).prompt_indices == (0, 1)


def test_what_an_actor_refuses_is_said_here_in_a_line(
    tmp_path: Path, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "s")
    assert main(["collect", "--ray", "--candidates", "99", "--out", out]) == 2
    assert capsys.readouterr().err.startswith("lede: error: candidates ")
    assert not Path(out).exists()


def test_gpus_that_are_not_there_are_missed(model: Path, tmp_path: Path, cluster: str) -> None:
    with pytest.raises(WorkerError, match="the Ray cluster has no GPU, and device is cuda; leave out device"):
        collect(config_of(model, tmp_path / "s", ray="", device="cuda"), prompts=PROMPTS)


def test_shares_of_a_cluster(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> None:
    from lede.collectors.ray_workers import _shares

    def shares(n_gpus: int, n_machines: int, most: int = 100, **settings: Any) -> tuple[int, float | None, int]:
        nodes = [{"Alive": True, "Resources": {"CPU": 8.0}}] * n_machines + [{"Alive": False, "Resources": {}}]
        monkeypatch.setattr("ray.nodes", lambda: nodes)
        monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": float(n_gpus)} if n_gpus else {})
        size, options, threads = _shares(config_of(model, tmp_path / "s", ray="", **settings), most)
        return size, options.get("num_gpus"), threads

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert shares(4, 2, device="cuda") == (4, 1.0, 4)  # one a GPU
    assert shares(4, 2, device="cuda", most=3) == (3, 1.0, 4)
    assert shares(2, 1, device="cuda", workers=3) == (3, 0.5, 2)  # two share one
    assert shares(4, 3) == (3, None, 8)  # one a machine
    assert shares(0, 2, workers=5) == (5, None, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert shares(0, 2) == (2, None, 1)


def test_reasons_are_a_line() -> None:
    from lede.collectors.ray_workers import _reason

    told = "The actor died because of an error raised in its creation task, ray::A.__init__()"
    assert _reason(RuntimeError(f"{told}\n  File x\nImportError: no\n")) == "'ImportError: no'"
    assert _reason(RuntimeError("The actor died unexpectedly.\n\tclass_name: A")) == "'The actor died unexpectedly'"
    assert _reason(RuntimeError()) == "'RuntimeError'"
