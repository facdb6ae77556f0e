"""Processes that compile kernels: what they are asked for, what they tell, and what they died of."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from lede.kernel_compiler import LONGEST, KernelJob
from lede.kernel_store import PARTIAL, make_folder

COMMAND = ("-m", "lede.kernel_compiler")
"""What Python is asked to run."""
LAST = 8192
"""Bytes at the end of what a process wrote to stderr that are looked at."""
WHAT_TO_DO = (
    (("SIGKILL", "MemoryError", "allocate memory"), "memory may have run out: give --workers 1, or free some"),
    (("No working C++ compiler",), "install one, such as g++, or name it by the environment variable CXX"),
    (("No space left", "quota exceeded"), "free some space, or set LEDE_KERNELS to a folder where there is more"),
    (("Permission denied", "Read-only file system"), "set LEDE_KERNELS to a folder that can be written"),
    (("ModuleNotFoundError", "ImportError"), "`pip check` tells what this environment lacks"),
)
"""What to do, by words in what went wrong."""


def compile_jobs(jobs: Sequence[KernelJob], n_workers: int) -> Generator[tuple[str, str], None, None]:
    """Compile kernels in so many processes; yields the key of each, and what went wrong, empty where nothing did.

    A process that dies costs the kernel that it was at; another one compiles the rest of its share. All that compilers
    write, torch's cache and g++'s files too, goes to a folder that is gone at the end; one that a killed command leaves
    lies among the kernels, where the next one finds it.

    Raises:
        ValueError: Nothing can be written there.
    """
    new_folder = tempfile.TemporaryDirectory(PARTIAL, ".compiling.", make_folder(), ignore_cleanup_errors=True)
    with new_folder as folder, contextlib.ExitStack() as stack:
        shares = [jobs[i::n_workers] for i in range(min(n_workers, len(jobs)))]
        workers = [_Worker(share, Path(folder) / str(number)) for number, share in enumerate(shares)]
        for worker in workers:
            stack.callback(worker.stop)
            worker.start()
        for worker in workers:
            yield from worker.work()


class _Worker:
    """One process at a time, for a share of the kernels.

    Args:
        jobs: The share.
        folder: Where its files go; made here.
    """

    def __init__(self, jobs: Sequence[KernelJob], folder: Path) -> None:
        self._left = list(jobs)
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        folder.mkdir()

    def start(self) -> None:
        """Start a process for what is left."""
        request = self._folder / "request.pickle"
        request.write_bytes(pickle.dumps(self._left))
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *COMMAND, str(request)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(self._folder),
            )

    def stop(self) -> None:
        """End the process, wherever it is."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def work(self) -> Iterator[tuple[str, str]]:
        """Tell of each kernel of the share, as it is compiled."""
        while self._left:
            is_ready = False
            assert self._process is not None
            assert self._process.stdout is not None
            for line in self._process.stdout:
                with contextlib.suppress(json.JSONDecodeError):  # cut off in the midst of a word
                    told: dict[str, str] = json.loads(line)
                    is_ready = is_ready or "ready" in told
                    if "key" in told:
                        self._left = [job for job in self._left if job.key != told["key"]]
                        yield told["key"], advised(told.get("error", ""))
            died = advised(f"its compiler {_ended(self._process.wait())}{_last_words(self._errors)}")
            lost, self._left = (self._left[:1], self._left[1:]) if is_ready else (self._left, [])
            for job in lost:
                yield job.key, died
            if self._left:
                self.stop()
                self.start()

    @property
    def _errors(self) -> Path:
        return self._folder / "stderr.txt"


def advised(said: str) -> str:
    """What went wrong, and what to do where that is known."""
    advice = next((advice for words, advice in WHAT_TO_DO if any(word in said for word in words)), "")
    return f"{said}; {advice}" if advice else said


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _last_words(file: Path) -> str:
    """The last line on stderr, or, of a traceback's, the error; empty where there is none."""
    with file.open("rb") as errors:
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - LAST))
        text = errors.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(" ")]
    return f": {lines[-1].strip()[:LONGEST]}" if lines else ""


def _environment(folder: Path) -> dict[str, str]:
    """The environment of a compiler: it finds the modules that this process finds, and starts no helpers of its own."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TMPDIR": str(folder),
    }
