"""Commit records: what makes a shard part of a store.

A record is one JSON file that holds a checksum of itself and of every file of its shard, so that no byte of either can
change unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from lede.buffers.records import StoreError
from lede.buffers.storage import Place, Storage, storage_for

FOLDER = "commits"
_ENDING = ".json"
_KEYS = {"name", "rows", "prompts", "files", "sha256"}
_OLD_KEYS = {"rows", "prompts", "files"}  # of schema versions 1 and 2, which had no checksum


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

    @property
    def folder(self) -> str:
        """The shard's folder within the store."""
        return f"shards/{self.name}"

    @property
    def record(self) -> str:
        """The record's file within the store."""
        return f"{FOLDER}/{self.name}{_ENDING}"

    @property
    def size(self) -> int:
        """Bytes of the shard's files."""
        return sum(size for size, _ in self.files.values())

    def to_bytes(self) -> bytes:
        """The record as it is written."""
        return sealed({"name": self.name, "rows": self.rows, "prompts": self.prompts, "files": self.files})

    @classmethod
    def from_bytes(cls, name: str, content: bytes) -> Commit:
        """A record as it was read.

        Raises:
            ValueError: It is damaged.
        """
        record = json.loads(content)
        if not isinstance(record, dict) or set(record) not in (_KEYS, _OLD_KEYS):
            raise ValueError(f"a record has the entries {', '.join(sorted(_KEYS))}")
        files = {str(file): (int(size), str(digest)) for file, (size, digest) in record["files"].items()}
        commit = cls(name, int(record["rows"]), tuple(int(index) for index in record["prompts"]), files)
        if set(record) == _KEYS and commit.to_bytes() != content:
            raise ValueError("its checksum differs, it was altered")
        return commit


def read_commits(place: Place) -> list[Commit]:
    """Commit records of a store, by name; what is committed later doesn't show.

    Raises:
        StoreError: A record is damaged, or can't be read.
    """
    storage = storage_for(place)
    try:
        found = storage.read(f"{FOLDER}/{name}" for name in record_files(storage))
    except OSError as error:
        raise StoreError(f"{storage.url}: the commit records can't be read: {error}") from error
    commits = []
    for file, content in found.items():
        name = file.removeprefix(f"{FOLDER}/")
        try:
            commits.append(Commit.from_bytes(name.removesuffix(_ENDING), content))
        except (TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"{storage.url}: commit record {name} is damaged: {error}") from error
    return commits


def record_files(storage: Storage) -> list[str]:
    """Names of the commit records' files, ascending; those being written are left out.

    Raises:
        OSError: The place refuses.
    """
    return [name for name in storage.names(FOLDER) if name.endswith(_ENDING) and not name.startswith(".")]


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def sealed(entries: dict[str, Any]) -> bytes:
    """Entries as JSON with `sha256` of themselves as the last; the same entries give the same bytes."""
    return json.dumps({**entries, "sha256": digest(json.dumps(entries).encode())}).encode()
