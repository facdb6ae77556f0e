"""Writes runs.jsonl, a line a decode, so that a run can be stopped at any moment and taken up again.

A line is appended and flushed once its decode is complete; a line that a stop tore is dropped. What a contender learns
online is kept beside it, so that a resumed one knows exactly what it knew after its last recorded decode.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lede.atomic import write_atomically
from lede.bench_runs import RUNS, PromptRun, read_runs

STATES = "states"
"""Folder of what contenders learned online, a file each."""


def file_name(suite: str, policy: str) -> str:
    """A name for files of a suite's contender: the same every time, and another one's for nobody else."""
    readable = re.sub(r"[^a-z0-9]+", "-", policy.lower()).strip("-")[:40]
    digest = sha256(f"{suite} {policy}".encode()).hexdigest()[:8]
    return f"{readable}-{digest}"


class RunLog:
    """Appends decodes to runs.jsonl, each with the online state that its contender was left in.

    Args:
        out: Folder of the benchmark.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.runs = read_runs(out)
        self._done = {run.key for run in self.runs}
        self._drop_torn()
        self._file = (out / RUNS).open("ab")

    def has(self, suite: str, policy: str, prompt_index: int, repeat: int) -> bool:
        """Whether this decode is done."""
        return (suite, policy, prompt_index, repeat) in self._done

    def append(self, run: PromptRun, state: dict[str, Any] | None = None) -> None:
        """Record a decode; `state` is what its contender knows after it, if it learns."""
        if state:
            self._write_state(run.suite, run.policy, state)
        self._file.write(json.dumps(asdict(run), ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.runs.append(run)
        self._done.add(run.key)

    def state(self, suite: str, policy: str) -> dict[str, Any]:
        """What a contender knew after its last recorded decode; empty when it has none."""
        found: dict[str, Any] = self._states(suite, policy).get(str(self._count(suite, policy)), {})
        return found

    def __enter__(self) -> Self:
        """The log itself."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def _count(self, suite: str, policy: str) -> int:
        return sum(run.suite == suite and run.policy == policy for run in self.runs)

    def _states(self, suite: str, policy: str) -> dict[str, Any]:
        path = self._state_path(suite, policy)
        if not path.exists():
            return {}
        states: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return states

    def _write_state(self, suite: str, policy: str, state: dict[str, Any]) -> None:
        """Keep the state of the decode that comes beside that of the last one: either may be the last on disk."""
        count = self._count(suite, policy)
        before = self._states(suite, policy).get(str(count))
        states = {str(count + 1): state} if before is None else {str(count): before, str(count + 1): state}
        path = self._state_path(suite, policy)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, json.dumps(states).encode())

    def _state_path(self, suite: str, policy: str) -> Path:
        return self.out / STATES / f"{file_name(suite, policy)}.json"

    def _drop_torn(self) -> None:
        path = self.out / RUNS
        if path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                write_atomically(path, content[:whole])
