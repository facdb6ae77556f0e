"""Writing a store: prompts go in, whole shards come out."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from lede.buffers.columns import check_record, stack
from lede.buffers.records import PromptRollout, PromptTrace, Record, StoreError
from lede.buffers.settings import StoreSettings
from lede.buffers.shards import create_root, read_commits, read_settings, write_shard


class StoreWriter:
    """One writer of a store; several may write to one store at once, each its own shards.

    Complete prompts are held in memory and committed as a shard when there are enough of them, so a killed process
    loses at most that shard. As a context manager it commits what it holds on the way out, on an exception and on
    Ctrl-C as well: what was added is complete.

    Leftovers: a process killed in the middle of a commit leaves a shard folder without a commit record. Nobody reads
    it; the next writer on the same machine removes it, once the process that its name tells of has ended. Folders of
    other machines are left alone.

    Use `open`, not the constructor.
    """

    def __init__(self, path: Path, settings: StoreSettings, shard_prompts: int, shard_rows: int) -> None:
        if shard_prompts < 1 or shard_rows < 1:
            raise ValueError(f"shard_prompts and shard_rows must be at least 1, got {shard_prompts} and {shard_rows}")
        self.path = path
        self.settings = settings
        self.shard_prompts = shard_prompts
        self.shard_rows = shard_rows
        self._held: dict[int, Record] = {}
        self._held_rows = 0
        self._done = {index for commit in read_commits(path) for index in commit.prompts}

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        settings: StoreSettings,
        resume: bool = True,
        shard_prompts: int = 32,
        shard_rows: int = 65536,
    ) -> Self:
        """Make a store, or go on with one.

        Args:
            path: Folder of the store; made if absent.
            settings: What the store is made with.
            resume: Whether an existing store may be gone on with.
            shard_prompts: Prompts after which a shard is committed.
            shard_rows: Rows (decisions or decided tokens) after which a shard is committed, if that comes first.

        Raises:
            StoreError: Something that is no store of lede is in the way.
            ValueError: The store has other settings (each is named), or exists and `resume` is off.
        """
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise StoreError(f"{path} is a file, a store is a folder: choose another path")
        if _is_fresh(path):
            create_root(path, settings)
        elif not resume:
            raise ValueError(f"{path} exists already: resume it, or choose another path")
        read_settings(path).check_same(settings, str(path))
        _remove_leftovers(path)
        return cls(path, settings, shard_prompts, shard_rows)

    @property
    def done(self) -> frozenset[int]:
        """Indices of the prompts that are committed."""
        return frozenset(self._done)

    def add(self, record: PromptTrace | PromptRollout) -> None:
        """Take the complete record of one prompt; commit a shard if there are enough.

        Raises:
            ValueError: The record doesn't fit the settings, or its prompt is in the store already.
        """
        check_record(record, self.settings)
        if record.prompt_index in self._done or record.prompt_index in self._held:
            raise ValueError(f"prompt {record.prompt_index} is in {self.path} already; skip those in `done`")
        self._held[record.prompt_index] = record
        self._held_rows += record.n_rows
        if len(self._held) >= self.shard_prompts or self._held_rows >= self.shard_rows:
            self.commit()

    def commit(self) -> None:
        """Commit what is held in memory, if anything, as one shard."""
        if not self._held:
            return
        write_shard(self.path, f"{_writer_name()}-{uuid.uuid4().hex}", stack(list(self._held.values()), self.settings))
        self._done.update(self._held)
        self._held, self._held_rows = {}, 0

    def close(self) -> None:
        """Commit the rest."""
        self.commit()

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Commit the rest, whatever ended the block."""
        self.close()


def leftovers(path: Path) -> list[str]:
    """Shard folders without a commit record: interrupted, or being written right now."""
    committed = {commit.name for commit in read_commits(path)}
    folder = path / "shards"
    return sorted(f.name for f in folder.iterdir() if f.name not in committed) if folder.is_dir() else []


def _is_fresh(path: Path) -> bool:
    """Whether there is no store yet: nothing, or only what a writer killed before the root was written left."""
    if not path.exists() or (path / "zarr.json").exists():
        return not path.exists()
    names = {entry.name for entry in path.iterdir() if entry.suffix != ".partial"}
    return not names or (names == {"commits"} and not any((path / "commits").iterdir()))


def _writer_name() -> str:
    host = hashlib.sha256(platform.node().encode()).hexdigest()[:12]
    return f"{host}-{os.getpid()}"


def _is_alive(pid: int) -> bool:
    if os.name != "posix":
        return True  # signal 0 would end the process elsewhere
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _is_abandoned(shard: str) -> bool:
    """Whether the writer that a shard's name tells of ran on this machine and has ended."""
    host, pid, *_ = (*shard.split("-"), "")
    return host == _writer_name().split("-")[0] and pid.isdigit() and not _is_alive(int(pid))


def _remove_leftovers(path: Path) -> None:
    folder = path / "shards"
    abandoned = [f.name for f in folder.iterdir() if _is_abandoned(f.name)] if folder.is_dir() else []
    # read after their writers were found to have ended: none of them commits any more
    committed = {commit.name for commit in read_commits(path)} if abandoned else set()
    for name in set(abandoned) - committed:
        shutil.rmtree(folder / name, ignore_errors=True)
    for file in (path / "commits").glob(".*.partial"):
        if _is_abandoned(file.name.removeprefix(".")):
            file.unlink(missing_ok=True)
