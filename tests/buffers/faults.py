"""A file system that fails, or a process that dies, at a chosen file operation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from lede.buffers import local_storage

OPERATIONS = "open write fsync close replace link unlink mkdir rmdir listdir scandir stat".split()
"""Everything by which a local store looks at files and changes them."""

MAKING = ("write", "fsync", "replace", "link", "mkdir")  # and `open` of a new file

Happening = Callable[[str, tuple[Any, ...]], None]


class Killed(BaseException):
    """The process is gone: nothing that it would still have done happens."""


class Faults:
    """Counts the file operations of this process and lets something happen at the n-th.

    Operations come one at a time and in order. Syncing is counted but left out, for speed: nothing here takes the
    machine down.

    Args:
        monkeypatch: Puts the operations back at the end of the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []  # operation, path
        self._opened: dict[int, str] = {}
        self._happens: Happening | None = None
        monkeypatch.setattr(local_storage, "SYNC_THREADS", 1)
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def count(self) -> None:
        """Only count operations from now."""
        self._start(lambda name, arguments: None)

    def error(self, at: int, number: int, lasting: bool) -> None:
        """Raise OSError at the n-th operation from now and, if `lasting`, at every later one that makes something."""

        def happens(name: str, arguments: tuple[Any, ...]) -> None:
            makes = name in MAKING or (name == "open" and arguments[1] & os.O_CREAT)
            if len(self.calls) == at or (lasting and len(self.calls) > at and makes):
                raise OSError(number, os.strerror(number))

        self._start(happens)

    def kill(self, at: int, half_written: bool = False) -> None:
        """Die at the n-th operation from now, before it or, if it writes, in the middle of it."""

        def happens(name: str, arguments: tuple[Any, ...]) -> None:
            if len(self.calls) == at and half_written and name == "write":
                with open(arguments[0], "wb", closefd=False) as file:
                    file.write(arguments[1][: len(arguments[1]) // 2])
            if len(self.calls) >= at:
                raise Killed

        self._start(happens)

    def watch(self, look: Callable[[], None]) -> None:
        """Call a function before every operation from now; its own operations don't count."""

        def happens(name: str, arguments: tuple[Any, ...]) -> None:
            calls, self._happens = self.calls.copy(), None
            look()
            self.calls[:], self._happens = calls, happens

        self._start(happens)

    def stop(self) -> list[str]:
        """Let everything work again; the names of the operations since the start."""
        self._happens = None
        return [name for name, _ in self.calls]

    def _start(self, happens: Happening) -> None:
        self.calls.clear()
        self._happens = happens

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if self._happens is not None:
                self.calls.append((name, self._opened.get(args[0], "") if isinstance(args[0], int) else str(args[0])))
                try:
                    self._happens(name, args)
                except BaseException:
                    if name == "close":
                        real(*args)  # the handle is gone in any case
                    raise
            if name == "fsync":
                return None
            result = real(*args, **kwargs)
            if name == "open":
                self._opened[result] = str(args[0])
            return result

        return operation


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory where the system has such: these tests make and remove many thousand files."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def files_below(path: Path) -> list[str]:
    """Every file and folder of a store, with the names of shards left out."""
    shards = {folder.name for folder in (path / "shards").iterdir()}
    names = []
    for file in path.rglob("*"):
        name = file.relative_to(path).as_posix()
        for shard in shards:
            name = name.replace(shard, "SHARD")
        names.append(name)
    return sorted(names)
