"""Processes that compile kernels, and what they die of; real ones are replaced by a line of Python."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lede import kernel_processes
from lede.cli import main
from lede.kernel_compiler import KernelJob, _check_open, reason
from lede.kernel_processes import compile_jobs
from lede.kernel_store import FOLDER_VARIABLE, PARTIAL
from lede.models import load_model
from tests.tiny_models import tiny_hf_model

READY = 'print(\'{"ready": ""}\', flush=True)'


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kernels"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


def jobs(*keys: str) -> list[KernelJob]:
    hidden = torch.empty(1, 1, 4, device="meta")
    return [KernelJob(key, key, nn.Identity(), None, "", hidden, None, 0, False, 1, "") for key in keys]


def told(*keys: str) -> str:
    return "; ".join(f'print(\'{{"key": "{key}"}}\', flush=True)' for key in keys)


def process(monkeypatch: pytest.MonkeyPatch, *code: str) -> None:
    monkeypatch.setattr(kernel_processes, "COMMAND", ("-S", "-c", "\n".join(("import os, sys", *code))))


def test_a_process_that_is_killed_costs_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process compiles the rest; who is killed has no last words."""
    flag = tmp_path / "died"
    die = f"open({str(flag)!r}, 'w').close(); os.kill(os.getpid(), 9)"
    process(
        monkeypatch,
        READY,
        f"if os.path.exists({str(flag)!r}): {told('c')}; sys.exit()",
        told("a"),
        "os.write(2, b'a warning\\n  with more')",
        die,
    )
    found = dict(compile_jobs(jobs("a", "b", "c"), 1))
    assert found == {
        "a": "",
        "b": "its compiler was ended by SIGKILL: a warning; memory may have run out: give --workers 1, or free some",
        "c": "",
    }


def test_a_process_that_can_not_begin_fails_all(monkeypatch: pytest.MonkeyPatch) -> None:
    process(monkeypatch, "import no_such_module")
    found = dict(compile_jobs(jobs("a", "b", "c"), 2))
    said = "its compiler ended with exit code 1: ModuleNotFoundError: No module named 'no_such_module'; `pip check`"
    assert sorted(found) == ["a", "b", "c"]
    assert all(each.startswith(said) for each in found.values())


def test_errors_of_kernels_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    process(
        monkeypatch,
        READY,
        """print('{"key": "a", "error": "OSError: [Errno 28] No space left on device"}', flush=True)""",
        """print('{"key": "b", "error": "ValueError: no"}\\n{"key": "c"', flush=True)""",
        "os.write(2, b'x' * 100_000)",
    )
    found = dict(compile_jobs(jobs("a", "b"), 1))
    assert found["a"].endswith(
        "No space left on device; free some space, or set LEDE_KERNELS to a folder where there is more"
    )
    assert found["b"] == "ValueError: no"


def test_nothing_is_left_behind(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither requests nor torch's cache, which has megabytes for each kernel; and no process."""
    process(
        monkeypatch,
        "cache = os.environ['TORCHINDUCTOR_CACHE_DIR']; os.makedirs(cache); assert os.environ['TMPDIR'] in cache",
        READY,
        """print('{"key": "a", "error": "%s %d"}' % (cache, os.getpid()), flush=True)""",
        "while True: pass",
    )
    telling = compile_jobs(jobs("a", "b"), 1)
    _, said = next(telling)
    cache, number = said.split()
    left = next(kernels.iterdir())
    assert Path(cache).is_relative_to(left), "where a killed command leaves it, the next one finds it"
    assert left.match(f".*{PARTIAL}")
    telling.close()
    assert not list(kernels.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)


def test_the_command_says_why_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model((tiny_hf_model("llama"), None))
    monkeypatch.setattr("lede.compiling.load_model", lambda *args, **settings: model)
    process(monkeypatch, "os.write(2, b'Fatal Python error: Aborted\\n'); os.abort()")
    assert main(["compile", "--rows", "1", "4"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("0 kernels compiled in 0 s, 0 were there")
    wanted = "LlamaDecoderLayer 1, 1 row and 4 more: its compiler was ended by SIGABRT: Fatal Python error: Aborted"
    assert out[1:] == [f"failed: {wanted}"]


def test_the_error_of_a_c_compiler_is_further_down() -> None:
    error = RuntimeError(
        "C++ compile error\n\nCommand:\ng++ a.cpp\n\nOutput:\na.cpp:1: error: no vec.h\na.cpp:2: error: b"
    )
    assert reason(error) == "RuntimeError: C++ compile error a.cpp:1: error: no vec.h"
    assert reason(KeyError()) == "KeyError: "
    assert len(reason(ValueError("x" * 9999))) < 400


def test_a_size_that_torch_fixed_is_an_error() -> None:
    """It would compile code for a text of one length, which computes something else for others."""
    open_size = object.__new__(torch.SymInt)

    def exported(*shape: Any) -> Any:
        nodes = [
            SimpleNamespace(name="states", meta={"val": SimpleNamespace(shape=shape)}),
            SimpleNamespace(name="add"),
        ]
        return SimpleNamespace(
            graph_signature=SimpleNamespace(user_inputs=["states"]), graph=SimpleNamespace(nodes=nodes)
        )

    _check_open(exported(1, open_size), ({1: "open"},))
    with pytest.raises(ValueError, match="its code would be for a states of 7 alone"):
        _check_open(exported(1, 7), ({1: "open"},))
