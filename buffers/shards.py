"""Shards on disk: a zarr group of columns, made visible by a commit record.

Layout of a store::

    STORE.zarr/zarr.json                 root group, its attributes are the settings
    STORE.zarr/shards/<name>/<column>/   zarr arrays
    STORE.zarr/commits/<name>.json       rows, prompts, size and SHA-256 of every file of the shard

A shard is written whole, never appended to. Its commit record is written last: temporary file, fsync, rename. Readers
know only shards with a commit record and check every file against it, because zarr reads a lost chunk as zeros.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import zarr
from zarr.codecs import ZstdCodec
from zarr.errors import ContainsGroupError

from lede.atomic import sync_folder, write_atomically
from lede.buffers.columns import LENGTHS, Columns, branch_columns, no_branches, prompt_columns, row_columns
from lede.buffers.records import StoreError
from lede.buffers.settings import StoreSettings

CHUNK_ROWS = 16384
"""Rows of a chunk, in every array."""


@dataclass(frozen=True)
class Commit:
    """One committed shard."""

    name: str
    """Name of the shard."""
    rows: int
    """Decisions or decided tokens in it."""
    prompts: tuple[int, ...]
    """Indices of its prompts, in the order in which they lie in it."""
    files: dict[str, tuple[int, str]]
    """Size in bytes and SHA-256 of every file, by its path within the shard."""


def write_shard(path: Path, name: str, columns: Columns) -> Commit:
    """Write a shard and commit it; when this returns it survives a crash of the process and of the machine."""
    folder = path / "shards" / name
    group = zarr.create_group(folder, zarr_format=3)
    for column, values in columns.items():
        group.create_array(
            column,
            data=values,
            chunks=(CHUNK_ROWS, *values.shape[1:]),
            compressors=ZstdCodec(level=3, checksum=True),
            chunk_key_encoding={"name": "default", "separator": "."},  # no folders to sync below the array's
            config={"write_empty_chunks": True},
        )
    commit = Commit(
        name=name,
        rows=int(columns["row_count"].sum()),
        prompts=tuple(columns["prompt_index"].tolist()),
        files=_manifest(folder, sync=True),
    )
    record = {"rows": commit.rows, "prompts": commit.prompts, "files": commit.files}
    _sync_folders(folder)
    (path / "commits").mkdir(exist_ok=True)
    write_atomically(path / "commits" / f"{name}.json", json.dumps(record).encode())
    return commit


def read_commits(path: Path) -> list[Commit]:
    """Commit records of a store, by name.

    Raises:
        StoreError: A record is damaged.
    """
    commits = []
    for file in sorted((path / "commits").glob("*.json")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            files = {str(name): (int(size), str(digest)) for name, (size, digest) in record["files"].items()}
            prompts = tuple(int(index) for index in record["prompts"])
            commits.append(Commit(file.stem, int(record["rows"]), prompts, files))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"{path}: commit record {file.name} is damaged: {error}") from error
    return commits


def check_shard(path: Path, commit: Commit, verify: bool = False) -> None:
    """Check the files of a shard against its commit record.

    Args:
        path: The store.
        commit: The shard.
        verify: Whether to compare checksums too, which reads every byte; otherwise presence and size.

    Raises:
        StoreError: A file is missing or altered.
    """
    folder = path / "shards" / commit.name
    for name, (size, digest) in commit.files.items():
        file = folder / name
        try:
            got = file.stat().st_size
        except OSError:
            raise StoreError(f"{path}: shard {commit.name} has lost its file {name}") from None
        if got != size:
            raise StoreError(f"{path}: shard {commit.name}: file {name} has {got} bytes, {size} were committed")
        if verify and _digest(file) != digest:
            raise StoreError(f"{path}: shard {commit.name}: file {name} was altered, its checksum differs")


def read_shard(path: Path, commit: Commit, settings: StoreSettings) -> Columns:
    """The columns of a committed shard.

    Raises:
        StoreError: A file is missing or altered, or an array is not what the commit record says.
    """
    check_shard(path, commit)
    columns: Columns = {}
    names = [*prompt_columns(settings), "prompt_ids", "token_ids", *row_columns(settings), *branch_columns(settings)]
    if settings.kind == "traces" and settings.schema_version == 1 and not _has_array(commit, LENGTHS["branches"]):
        columns = no_branches(settings, len(commit.prompts))
    for name in (name for name in names if name not in columns):
        try:
            array = zarr.open_array(path / "shards" / commit.name / name, mode="r", zarr_format=3)
            columns[name] = np.asarray(array[...])
        except Exception as error:  # whatever a codec or zarr raises on damaged bytes
            raise StoreError(f"{path}: shard {commit.name}: array '{name}' can't be read: {error}") from error
    where = f"{path}: shard {commit.name}"
    rows = int(columns["row_count"].sum())
    if rows != commit.rows:
        raise StoreError(f"{where} holds {rows} rows, {commit.rows} were committed")
    if tuple(columns["prompt_index"].tolist()) != commit.prompts:
        raise StoreError(f"{where} holds other prompts than were committed")
    return columns


def _has_array(commit: Commit, name: str) -> bool:
    """Whether a shard has an array, going by its commit record."""
    return f"{name}/zarr.json" in commit.files


def create_root(path: Path, settings: StoreSettings) -> None:
    """Make an empty store, unless another writer makes it at this moment."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "commits").mkdir(exist_ok=True)
    with suppress(ContainsGroupError):
        # last: a folder with this file is a store
        zarr.create_group(path, attributes=settings.to_json(), zarr_format=3, overwrite=False)
    _sync_folders(path)


def read_settings(path: Path) -> StoreSettings:
    """Settings of a store.

    Raises:
        StoreError: The path is no store of lede.
    """
    if not path.exists():
        raise StoreError(f"there is no store at {path}")
    try:
        attributes = cast("dict[str, Any]", zarr.open_group(path, mode="r", zarr_format=3).attrs.asdict())
    except Exception as error:  # zarr has many ways to say that this is no group
        raise StoreError(f"{path} is no store of lede: it can't be opened as a zarr v3 group ({error})") from error
    return StoreSettings.from_json(attributes, str(path))


def _manifest(folder: Path, sync: bool) -> dict[str, tuple[int, str]]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): (file.stat().st_size, _digest(file, sync=sync)) for file in files}


def _digest(file: Path, sync: bool = False) -> str:
    with file.open("rb") as stream:
        if sync:
            os.fsync(stream.fileno())
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync_folders(folder: Path) -> None:
    """Make the names in a folder, below it and its own durable."""
    for each in (*(f for f in folder.rglob("*") if f.is_dir()), folder, folder.parent):
        sync_folder(each)
