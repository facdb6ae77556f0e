"""Real processes: whoever is killed, the store holds what one process would have written."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lede.buffers import open_store
from lede.collectors import WorkerError, collect
from lede.collectors.crew import Committed, Event
from lede.collectors.recorder import own_device, portable, shown
from lede.collectors.workers import ProcessCrew, ending
from tests.collectors.saved_model import (
    PROMPTS,
    assert_close_content,
    assert_equal_content,
    config_of,
    save_tiny_model,
)

ROOT = Path(__file__).parents[2]

# Collects into argv[2] with two workers, and prints their process ids when both have begun.
SCRIPT = """
import signal
import sys
from pathlib import Path

from lede.collectors import collect, workers
from tests.collectors.saved_model import PROMPTS, config_of

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell are started deaf to it

class Crew(workers.ProcessCrew):
    begun, told = set(), False

    def events(self):
        for event in super().events():
            if isinstance(event, (workers.Progressed, workers.Committed)):
                self.begun.add(event.worker if isinstance(event, workers.Progressed) else "committed")
                if self.begun == {0, 1, "committed"} and not self.told:
                    print(*(self.pid(worker) for worker in (0, 1)), flush=True)
                    self.told = True
            yield event

if __name__ == "__main__":
    import lede.collectors.parallel

    lede.collectors.parallel.ProcessCrew = Crew
    try:
        collect(config_of(Path(sys.argv[1]), Path(sys.argv[2]), workers=2, episodes=2000, cycle=True), prompts=PROMPTS)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_two_workers_one_of_them_killed_equal_one_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []

    class Crew(ProcessCrew):
        def events(self) -> Iterator[Event]:
            for event in super().events():
                if isinstance(event, Committed) and not killed:  # it gets other prompts before it dies
                    yield event
                    killed.append(event.worker)
                    os.kill(self.pid(event.worker) or 0, signal.SIGKILL)
                else:
                    yield event

    monkeypatch.setattr("lede.collectors.parallel.ProcessCrew", Crew)
    settings: dict[str, Any] = {"explore": "random", "epsilon": "0.5"}
    collect(config_of(model, tmp_path / "two", workers=2, **settings), prompts=PROMPTS)
    told = capsys.readouterr().out
    assert f"worker {killed[0]} ended with signal 9 (SIGKILL); prompts to redo: " in told
    assert told.splitlines()[-1].startswith("12/12 prompts, ")
    collect(config_of(model, tmp_path / "one", **settings), prompts=PROMPTS)
    assert_equal_content(tmp_path / "one", tmp_path / "two")
    assert open_store(tmp_path / "two").duplicates == 0
    assert (tmp_path / "two" / "seconds.json").exists()


@pytest.mark.slow
def test_teachers_with_batches_and_more_of_them_later_agree(model: Path, tmp_path: Path) -> None:
    teacher: dict[str, Any] = {"collector": "teacher", "branches": 0.5, "batch_size": 3, "shard_prompts": 4}
    collect(config_of(model, tmp_path / "a", episodes=3, **teacher), prompts=PROMPTS)
    collect(config_of(model, tmp_path / "a", workers=2, **teacher), prompts=PROMPTS)
    collect(config_of(model, tmp_path / "b", **teacher), prompts=PROMPTS)
    assert_close_content(tmp_path / "b", tmp_path / "a")


def test_what_a_worker_refuses_is_said_here(model: Path, tmp_path: Path) -> None:
    collect(config_of(model, tmp_path / "s", episodes=11), prompts=PROMPTS)
    with pytest.raises(ValueError, match=r"was made with other settings .*: seed: 5 / 6\. Use") as caught:
        collect(config_of(model, tmp_path / "s", seed=6, workers=2), prompts=PROMPTS)
    assert "in worker 0:\nTraceback" in caught.value.__notes__[0]
    assert len(open_store(tmp_path / "s")) == 11


def begun(model: Path, out: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A collection in a process group of its own, when both its workers, whose ids these are, have begun and one has
    committed something."""
    script = out.with_suffix(".py")
    script.write_text(SCRIPT)  # what spawns needs a file to import
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(model), str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        words = line.split()
        if len(words) == 2 and all(word.isdigit() for word in words):
            return process, [int(word) for word in words]
    raise AssertionError(f"it ended with {process.wait()}")


def wait_until_gone(pid: int) -> None:
    for _ in range(600):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]:
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} is still there")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize("how", ["ctrl-c", pytest.param("kill -9", marks=pytest.mark.slow)])
def test_ctrl_c_or_the_parents_death_ends_the_workers_and_what_is_complete_stays(
    model: Path, tmp_path: Path, how: str
) -> None:
    process, pids = begun(model, tmp_path / "s")
    assert process.stdout is not None
    if how == "ctrl-c":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all processes get it
        with process:
            told = process.stdout.read()
        assert process.returncode == 130
        n_safe = len(open_store(tmp_path / "s"))
        assert (
            f"interrupted; {n_safe} prompts are safe in {tmp_path / 's'}; the same `lede collect` goes on from there"
            in told
        )
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    else:
        with process:
            process.kill()
        for pid in pids:
            wait_until_gone(pid)
    store = open_store(tmp_path / "s", verify=True)
    assert 0 < len(store) < 2000
    assert store.duplicates == 0
    collect(config_of(model, tmp_path / "one", episodes=store.prompt_indices[-1] + 1, cycle=True), prompts=PROMPTS)
    wanted = {record.prompt_index: record for record in open_store(tmp_path / "one")}
    for record in store:
        assert record.token_ids.tolist() == wanted[record.prompt_index].token_ids.tolist()


@pytest.mark.slow
def test_a_prompt_that_kills_real_workers_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crew(ProcessCrew):
        def give(self, worker: int, prompts: Any) -> None:
            super().give(worker, prompts)
            if 5 in prompts:
                os.kill(self.pid(worker) or 0, signal.SIGKILL)

    monkeypatch.setattr("lede.collectors.parallel.ProcessCrew", Crew)
    with pytest.raises(WorkerError, match=r"prompt 5 \(counted from 0\) ended each worker"):
        collect(config_of(model, tmp_path / "s", workers=2), prompts=PROMPTS)
    assert open_store(tmp_path / "s", verify=True).prompt_indices == tuple(i for i in range(12) if i != 5)


def test_a_model_object_or_a_store_in_memory_cannot_be_shared(tmp_path: Path, model: Path) -> None:
    from tests.tiny_models import tiny_model

    with pytest.raises(ValueError, match="workers load the model themselves: save it"):
        collect(config_of(model, tmp_path / "s", workers=2), tiny_model("llama"), PROMPTS)
    with pytest.raises(ValueError, match="memory://s is the memory of one process"):
        collect(config_of(model, Path("memory://s"), workers=2), prompts=PROMPTS)
    with pytest.raises(ValueError, match="got a single one"):
        collect(config_of(model, tmp_path / "s", workers=2), prompts="def f():")
    with pytest.raises(ValueError, match="13 episodes need as many prompts, there are 12"):
        collect(config_of(model, tmp_path / "s", workers=2, episodes=13), prompts=PROMPTS)
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        config_of(model, tmp_path / "s", workers=0)
    assert not (tmp_path / "s").exists()


def test_gpus_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [own_device("cuda", worker) for worker in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [own_device(device, 1) for device in ("cuda:0", "cpu", None)] == ["cuda:0", "cpu", None]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert own_device("cuda", 3) == "cuda"


class StubbornError(Exception):
    """Does not survive pickling."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def test_errors_travel_with_their_story() -> None:
    def met(error: Exception) -> BaseException:
        try:
            raise error
        except Exception as caught:
            found: BaseException = pickle.loads(pickle.dumps(portable(caught, "worker 3")))
            return found

    for error, kind, text in (
        (FileNotFoundError(2, "gone", "a.txt"), FileNotFoundError, "[Errno 2] gone: 'a.txt'"),
        (StubbornError(1, 2), RuntimeError, "StubbornError: 1 and 2"),
    ):
        found = met(error)
        assert (type(found), str(found)) == (kind, text)
        assert found.__notes__[0].startswith("in worker 3:\nTraceback")


def test_words_for_ends_and_prompts() -> None:
    assert [ending(code) for code in (0, 1, -9, -99)] == ["code 0", "code 1", "signal 9 (SIGKILL)", "signal 99"]
    assert shown([3, 1, 2]) == "1, 2, 3"
    assert shown(range(12), 2) == "0, 1 and 10 more"
