"""Stores that appear whole or not at all, for tools that make one out of others."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from lede.buffers.columns import check_record, stack
from lede.buffers.records import PromptRollout, PromptTrace
from lede.buffers.settings import SCHEMA_VERSION, StoreSettings
from lede.buffers.shards import ROOT, create_root, read_commits, write_shard
from lede.buffers.storage import Place, Storage, storage_for

CLAIM = ".making"
"""File that is there while a store is made; whoever put it there may remove what is there."""

SHARD = "part-"
"""How the names of the shards begin."""

SHARD_PROMPTS = 256
"""Prompts of a shard, unless its rows are enough before."""

SHARD_ROWS = 65536
"""Rows (decisions or decided tokens) that are enough for a shard."""


def write_whole_store(place: Place, settings: StoreSettings, records: Iterable[PromptTrace | PromptRollout]) -> int:
    """Make a store of records; the same records give the same files.

    Its root, which makes a place a store, is written when all shards are committed: a process killed before leaves
    something that nobody takes for a store. Anything else that goes wrong leaves nothing.

    Args:
        place: Where; nothing may be there.
        settings: Settings of the store; it gets the current schema version.
        records: Its prompts, each once.

    Returns:
        Number of prompts.

    Raises:
        OSError: The place refuses.
        ValueError: Something is there already, or a record doesn't fit the settings.
    """
    storage = free_storage(place)
    _claim(storage)
    settings = replace(settings, schema_version=SCHEMA_VERSION)
    held: list[PromptTrace | PromptRollout] = []
    n_prompts = n_shards = 0
    try:
        for record in records:
            check_record(record, settings)
            held.append(record)
            n_prompts += 1
            if len(held) >= SHARD_PROMPTS or sum(each.n_rows for each in held) >= SHARD_ROWS:
                write_shard(storage, f"{SHARD}{n_shards:06d}", stack(held, settings))
                held, n_shards = [], n_shards + 1
        if held:
            write_shard(storage, f"{SHARD}{n_shards:06d}", stack(held, settings))
        if not create_root(storage, settings):
            raise _taken(storage)
    except BaseException:
        with suppress(OSError):  # what went wrong before is what counts
            _clear(storage)
        raise
    with suppress(OSError):
        storage.remove([CLAIM])
    return n_prompts


def free_storage(place: Place) -> Storage:
    """The storage of a place where nothing is.

    Raises:
        ValueError: Something is there.
    """
    storage = storage_for(place)
    if storage.state() != "absent":
        raise _taken(storage)
    return storage


def _claim(storage: Storage) -> None:
    """Take a place where nothing is, so that of two commands that make a store there one is refused.

    Hours may lie between the first look and the first shard, and either would remove what the other had made.
    """
    try:
        is_ours = storage.create(CLAIM, b"")
    except OSError:
        with suppress(OSError):
            if not storage.names():
                storage.remove_folder("")
        raise
    if not is_ours:
        raise _taken(storage)
    if storage.names() != [CLAIM]:  # made since it was found to be free
        storage.remove([CLAIM])
        raise _taken(storage)


def _clear(storage: Storage) -> None:
    """Remove what was written; where a collection has made a store meanwhile, the shards that are not its own."""
    if storage.size(ROOT) is None:
        return storage.remove_folder("")
    for commit in read_commits(storage):
        if commit.name.startswith(SHARD):
            storage.remove([commit.record])
    for name in storage.names("shards"):
        if name.startswith(SHARD):
            storage.remove_folder(f"shards/{name}")
    storage.remove([CLAIM])


def _taken(storage: Storage) -> ValueError:
    return ValueError(f"{storage.url} exists already: choose another place, or remove it first")
