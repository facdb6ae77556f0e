"""Writing a store: prompts go in, whole shards come out."""

from __future__ import annotations

import uuid
from contextlib import suppress
from types import TracebackType
from typing import Self

from lede.buffers.columns import check_record, stack
from lede.buffers.commits import FOLDER, Commit, read_commits
from lede.buffers.records import PromptRollout, PromptTrace, Record, StoreError
from lede.buffers.settings import StoreSettings
from lede.buffers.shards import ROOT, create_root, read_settings, write_shard
from lede.buffers.storage import Place, Storage, storage_for
from lede.buffers.writer_name import is_abandoned, writer_name

PARTIAL = ".partial"  # ending of what `Storage.publish` is writing


class StoreWriter:
    """One writer of a store; several may write to one store at once, each its own shards.

    Complete prompts are held in memory and committed as a shard when there are enough of them, so a killed process
    loses at most that shard. As a context manager it commits what it holds on the way out, on an exception and on
    Ctrl-C as well: what was added is complete.

    Leftovers: a process killed in the middle of a commit leaves a shard folder without a commit record. Nobody reads
    it; the next writer on the same machine removes it, once the process that its name tells of has ended. Those of
    other machines, of before a restart, and on object stores are left for `lede buffer repair`.

    Use `open`, not the constructor.
    """

    def __init__(self, place: Place, settings: StoreSettings, shard_prompts: int, shard_rows: int) -> None:
        if shard_prompts < 1 or shard_rows < 1:
            raise ValueError(f"shard_prompts and shard_rows must be at least 1, got {shard_prompts} and {shard_rows}")
        self.storage = storage_for(place)
        self.settings = settings
        self.shard_prompts = shard_prompts
        self.shard_rows = shard_rows
        self._held: dict[int, Record] = {}
        self._held_rows = 0
        self._failure: StoreError | None = None
        self._done = {index for commit in read_commits(self.storage) for index in commit.prompts}

    @classmethod
    def open(
        cls,
        path: Place,
        settings: StoreSettings,
        resume: bool = True,
        shard_prompts: int = 32,
        shard_rows: int = 65536,
    ) -> Self:
        """Make a store, or go on with one.

        Args:
            path: Folder or URL of the store; made if absent.
            settings: What the store is made with.
            resume: Whether an existing store may be gone on with.
            shard_prompts: Prompts after which a shard is committed.
            shard_rows: Rows (decisions or decided tokens) after which a shard is committed, if that comes first.

        Raises:
            StoreError: Something that is no store of lede is in the way, or the store can't be made there.
            ValueError: The store has other settings (each is named), or exists and `resume` is off.
        """
        storage = storage_for(path)
        try:
            state = storage.state()
            if state == "file":
                raise StoreError(f"{storage.url} is a file, a store is a folder: choose another path")
            if state == "absent" or _is_fresh(storage):
                create_root(storage, settings)
            elif not resume:
                raise ValueError(f"{storage.url} exists already: resume it, or choose another path")
        except OSError as error:
            raise StoreError(f"{storage.url}: the store can't be made: {error}") from error
        read_settings(storage).check_same(settings, storage.url)
        if storage.is_local:
            with suppress(OSError):  # they are in nobody's way
                _remove_leftovers(storage)
        return cls(storage, settings, shard_prompts, shard_rows)

    @property
    def done(self) -> frozenset[int]:
        """Indices of the prompts that are committed."""
        return frozenset(self._done)

    @property
    def n_done(self) -> int:
        """Prompts that are committed."""
        return len(self._done)

    def add(self, record: PromptTrace | PromptRollout) -> None:
        """Take the complete record of one prompt; commit a shard if there are enough.

        Raises:
            ValueError: The record doesn't fit the settings, or its prompt is in the store already.
            StoreError: The shard can't be committed, see `commit`.
        """
        check_record(record, self.settings)
        if record.prompt_index in self._done or record.prompt_index in self._held:
            raise ValueError(f"prompt {record.prompt_index} is in {self.storage.url} already; skip those in `done`")
        self._held[record.prompt_index] = record
        self._held_rows += record.n_rows
        if len(self._held) >= self.shard_prompts or self._held_rows >= self.shard_rows:
            self.commit()

    def commit(self) -> None:
        """Commit what is held in memory, if anything, as one shard.

        Raises:
            StoreError: The place refuses, e.g. because the disk is full. The store is as it was, and what is held can
                be committed again.
        """
        if not self._held:
            return
        commit = Commit(f"{writer_name()}-{uuid.uuid4().hex}", self._held_rows, tuple(self._held), {})
        try:
            write_shard(self.storage, commit.name, stack(list(self._held.values()), self.settings))
        except BaseException as error:  # Ctrl-C too: it may come when the record is there already
            if self._is_published(commit):
                self._forget()
                kept = "the shard is there, but a crash of the machine may lose it"
            else:
                kept = f"{len(self._held)} prompts are not in the store, what was committed before is: resume later"
            if not isinstance(error, OSError | StoreError):
                raise
            self._failure = StoreError(f"{self.storage.url}: a shard can't be written ({error}); {kept}")
            raise self._failure from error
        self._forget()

    def close(self) -> None:
        """Commit the rest."""
        self.commit()

    def _forget(self) -> None:
        self._done.update(self._held)
        self._held, self._held_rows = {}, 0

    def _is_published(self, commit: Commit) -> bool:
        """Whether a commit that failed can be seen all the same; without its record, makes room if that is certain."""
        with suppress(OSError):
            if self.storage.size(commit.record) is not None:
                return True
            if self.storage.is_local:  # elsewhere the record may still arrive
                self.storage.remove_folder(commit.folder)
        return False

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Commit the rest, whatever ended the block; only not again what a commit has just failed to write."""
        if exc is None or exc is not self._failure:
            self.close()


def leftovers(place: Place) -> list[str]:
    """Shard folders without a commit record: interrupted, or being written right now."""
    storage = storage_for(place)
    shards = storage.names("shards")  # before the records, or a shard committed in between would look left over
    committed = {commit.name for commit in read_commits(storage)}
    return [name for name in shards if name not in committed]


def _is_fresh(storage: Storage) -> bool:
    """Whether there is no store yet: nothing, or only what a writer killed before the root was written left."""
    names = {name for name in storage.names() if not name.endswith(PARTIAL)}
    return ROOT not in names and (not names or (names == {FOLDER} and not storage.names(FOLDER)))


def _remove_leftovers(storage: Storage) -> None:
    abandoned = {name for name in storage.names("shards") if is_abandoned(name)}
    # read after their writers were found to have ended: none of them commits any more
    committed = {commit.name for commit in read_commits(storage)} if abandoned else set()
    for name in sorted(abandoned - committed):
        storage.remove_folder(f"shards/{name}")
    partial = [name for name in storage.names(FOLDER) if name.startswith(".") and name.endswith(PARTIAL)]
    storage.remove(f"{FOLDER}/{name}" for name in partial if is_abandoned(name.removeprefix(".")))
