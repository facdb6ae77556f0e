"""Shards on disk: a zarr group of columns, made visible by a commit record.

Layout of a store::

    STORE.zarr/zarr.json                 root group, its attributes are the settings
    STORE.zarr/shards/<name>/<column>/   zarr arrays
    STORE.zarr/commits/<name>.json       rows, prompts, size and SHA-256 of every file of the shard

A shard is written whole, never appended to. Its commit record is written last, in one step. Readers know only shards
with a commit record and check every file against it, because zarr reads a lost chunk as zeros.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from lede.buffers.columns import LENGTHS, Columns, branch_columns, no_branches, prompt_columns, row_columns
from lede.buffers.commits import Commit, digest, read_commits
from lede.buffers.encoding import CHUNK_ROWS, decode, encode
from lede.buffers.records import StoreError
from lede.buffers.settings import StoreSettings
from lede.buffers.storage import Place, Storage, storage_for

__all__ = [
    "CHUNK_ROWS",
    "Commit",
    "check_shard",
    "check_shards",
    "create_root",
    "read_commits",
    "read_settings",
    "read_shard",
    "write_shard",
]

ROOT = "zarr.json"
"""The file that makes a folder a store."""

_SEAL = "sha256"  # attribute of the root: checksum of the others


def write_shard(place: Place, name: str, columns: Columns) -> Commit:
    """Write a shard and commit it; when this returns it survives a crash of the process and of the machine.

    Raises:
        OSError: The place refuses. Unless the commit record is there, the shard is not part of the store.
        StoreError: A file is not there as it was written.
    """
    storage = storage_for(place)
    files = encode(columns)
    commit = Commit(
        name=name,
        rows=int(columns["row_count"].sum()),
        prompts=tuple(columns["prompt_index"].tolist()),
        files={file: (len(content), digest(content)) for file, content in files.items()},
    )
    try:
        storage.write({f"{commit.folder}/{file}": content for file, content in files.items()})
        check_shard(storage, commit)
    except BaseException:
        with suppress(OSError):  # make room; nothing refers to it
            storage.remove_folder(commit.folder)
        raise
    storage.publish(commit.record, commit.to_bytes())
    return commit


def check_shard(place: Place, commit: Commit, verify: bool = False) -> None:
    """Check the files of a shard against its commit record.

    Args:
        place: The store.
        commit: The shard.
        verify: Whether to compare checksums too, which reads every byte; otherwise presence and size.

    Raises:
        StoreError: A file is missing or altered.
    """
    storage = storage_for(place)
    try:
        _check_sizes(storage, commit, storage.sizes(commit.folder))
        if verify:
            read_files(storage, commit, commit.files)
    except OSError as error:
        raise StoreError(f"{_where(storage, commit)} can't be read: {error}") from error


def check_shards(place: Place, commits: Iterable[Commit], verify: bool = False) -> None:
    """`check_shard` for many, with one listing of the store.

    Raises:
        StoreError: A file is missing or altered.
    """
    storage = storage_for(place)
    found: dict[str, dict[str, int]] = {}
    try:
        for path, size in storage.sizes("shards").items():
            shard, _, file = path.partition("/")
            found.setdefault(shard, {})[file] = size
    except OSError as error:
        raise StoreError(f"{storage.url}: the shards can't be listed: {error}") from error
    for commit in commits:
        _check_sizes(storage, commit, found.get(commit.name, {}))
        if verify:
            read_files(storage, commit, commit.files)


def read_shard(place: Place, commit: Commit, settings: StoreSettings, names: Iterable[str] | None = None) -> Columns:
    """Columns of a committed shard; every file that is read is compared with its checksum.

    Args:
        place: The store.
        commit: The shard.
        settings: Settings of the store.
        names: Columns to read; None for all.

    Raises:
        StoreError: A file is missing or altered, or an array is not what the commit record says.
    """
    storage = storage_for(place)
    prompts, rows = prompt_columns(settings), row_columns(settings)
    every = [*prompts, "prompt_ids", "token_ids", *rows, *branch_columns(settings)]
    wanted = every if names is None else list(names)
    unknown = sorted(set(wanted) - set(every))
    if unknown:
        raise ValueError(f"a store of {settings.kind} has no columns {unknown}; it has {every}")
    columns: Columns = {}
    if (
        settings.kind == "traces"
        and settings.schema_version == 1
        and f"{LENGTHS['branches']}/{ROOT}" not in commit.files
    ):
        columns = {n: c for n, c in no_branches(settings, len(commit.prompts)).items() if n in wanted}
    stored = [name for name in wanted if name not in columns]
    where = _where(storage, commit)
    files = read_files(storage, commit, [file for file in commit.files if file.split("/")[0] in stored])
    try:
        columns |= decode(files, stored)
    except ValueError as error:
        raise StoreError(f"{where}: {error}") from error
    if "row_count" in columns and (held := int(columns["row_count"].sum())) != commit.rows:
        raise StoreError(f"{where} holds {held} rows, {commit.rows} were committed")
    if "prompt_index" in columns and tuple(columns["prompt_index"].tolist()) != commit.prompts:
        raise StoreError(f"{where} holds other prompts than were committed")
    for name in stored:
        length = len(commit.prompts) if name in prompts else commit.rows if name in rows else None
        if length is not None and len(columns[name]) != length:
            raise StoreError(f"{where}: array '{name}' has {len(columns[name])} rows, expected {length}")
    return {name: columns[name] for name in wanted}


def read_files(storage: Storage, commit: Commit, names: Iterable[str]) -> dict[str, bytes]:
    """Contents of files of a shard, by their path within it, each compared with its checksum.

    Raises:
        StoreError: One is missing or altered.
    """
    names = list(names)
    try:
        contents = storage.read(f"{commit.folder}/{name}" for name in names)
    except FileNotFoundError as error:
        check_shard(storage, commit)  # names the file
        raise StoreError(f"{_where(storage, commit)} has lost a file: {error}") from error
    except OSError as error:
        raise StoreError(f"{_where(storage, commit)} can't be read: {error}") from error
    files = {}
    for name in names:
        content = files[name] = contents[f"{commit.folder}/{name}"]
        size, sha256 = commit.files[name]
        if len(content) != size:
            raise StoreError(_other_size(storage, commit, name, len(content)))
        if digest(content) != sha256:
            raise StoreError(f"{_where(storage, commit)}: file {name} was altered, its checksum differs")
    return files


def create_root(place: Place, settings: StoreSettings) -> bool:
    """Make an empty store, unless another writer makes it at this moment; whether it was this call that made it.

    Raises:
        OSError: The place refuses.
    """
    attributes = settings.to_json()
    return storage_for(place).create(ROOT, _root({**attributes, _SEAL: _checksum(attributes)}))


def read_settings(place: Place) -> StoreSettings:
    """Settings of a store.

    Raises:
        StoreError: The place is no store of lede, one from a newer schema, or its settings were altered.
    """
    storage = storage_for(place)
    where = storage.url
    try:
        if storage.size(ROOT) is None:
            if storage.state() == "absent":
                raise StoreError(f"there is no store at {where}")
            raise StoreError(f"{where} is no store of lede: it has no file {ROOT}")
        content = storage.read([ROOT])[ROOT]
    except OSError as error:
        raise StoreError(f"{where} can't be read: {error}") from error
    try:
        root: dict[str, Any] = json.loads(content)
        attributes: dict[str, Any] = dict(root["attributes"])
        if (root["zarr_format"], root["node_type"]) != (3, "group"):
            raise ValueError("its root is another kind of zarr node")
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{where} is no store of lede: {ROOT} is not that of a zarr v3 group ({error!r})") from error
    settings = StoreSettings.from_json(attributes, where)
    sealed = attributes.pop(_SEAL, None)
    if sealed is None and settings.schema_version < 3:
        return settings
    if sealed != _checksum(attributes) or content != _root({**attributes, _SEAL: sealed}):
        raise StoreError(f"{where}: {ROOT} was altered, its checksum differs")
    return settings


def _checksum(attributes: dict[str, Any]) -> str:
    return digest(json.dumps(attributes).encode())


def _root(attributes: dict[str, Any]) -> bytes:
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}, indent=2).encode()


def _check_sizes(storage: Storage, commit: Commit, found: dict[str, int]) -> None:
    for name, (size, _) in commit.files.items():
        if name not in found:
            raise StoreError(f"{_where(storage, commit)} has lost its file {name}")
        if found[name] != size:
            raise StoreError(_other_size(storage, commit, name, found[name]))


def _other_size(storage: Storage, commit: Commit, name: str, got: int) -> str:
    return f"{_where(storage, commit)}: file {name} has {got} bytes, {commit.files[name][0]} were committed"


def _where(storage: Storage, commit: Commit) -> str:
    return f"{storage.url}: shard {commit.name}"
