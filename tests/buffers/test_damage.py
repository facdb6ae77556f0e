"""A damaged store is named, never silently read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lede.buffers import StoreError, StoreWriter, open_store
from tests.buffers.samples import make_rollout, settings


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with two shards of two prompts."""
    path = tmp_path / "r.zarr"
    with StoreWriter.open(path, settings("transitions"), shard_prompts=2) as writer:
        for i in range(4):
            writer.add(make_rollout(i))
    assert len(list(open_store(path, verify=True))) == 4
    return path


def one_file(path: Path, pattern: str) -> Path:
    """The first file of a store that matches."""
    return sorted(path.glob(pattern))[0]


@pytest.mark.parametrize("array", ["rewards", "actions", "prompt_index", "observations"])
def test_a_deleted_chunk_is_named(path: Path, array: str) -> None:
    chunk = one_file(path, f"shards/*/{array}/c.*")
    chunk.unlink()
    with pytest.raises(StoreError, match=f"shard {chunk.parts[-3]} has lost its file {array}/c"):
        open_store(path)


def test_a_chunk_deleted_after_opening_is_named(path: Path) -> None:
    store = open_store(path)
    one_file(path, "shards/*/token_end/c.*").unlink()
    with pytest.raises(StoreError, match="token_end/c"):
        list(store)


def test_a_truncated_chunk_is_named(path: Path) -> None:
    chunk = one_file(path, "shards/*/match/c.*")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"file match/c.* has \d+ bytes"):
        open_store(path)


def test_an_altered_chunk_is_found_by_its_checksum(path: Path) -> None:
    chunk = one_file(path, "shards/*/rewards/c.*")
    damaged = bytearray(chunk.read_bytes())
    damaged[-1] ^= 1  # the checksum that zstd keeps at the end of a frame
    chunk.write_bytes(bytes(damaged))
    with pytest.raises(StoreError, match=r"rewards/c.* was altered"):
        open_store(path, verify=True)
    with pytest.raises(StoreError, match="array 'rewards' can't be read"):
        list(open_store(path))


def test_altered_metadata_is_found(path: Path) -> None:
    file = one_file(path, "shards/*/rewards/zarr.json")
    file.write_text(file.read_text().replace("12", "11"))
    store = open_store(path)
    with pytest.raises(StoreError, match="array 'rewards' has 11 rows, expected 12"):
        list(store)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rows": 13}, "12 rows, 13 were committed"), ({"prompts": [0, 3]}, "holds other prompts")],
)
def test_a_commit_record_that_lies_is_found(path: Path, change: dict[str, object], message: str) -> None:
    for record in (path / "commits").glob("*.json"):
        record.write_text(json.dumps({**json.loads(record.read_text()), **change}))
    with pytest.raises(StoreError, match=message):
        list(open_store(path))


def test_a_damaged_commit_record_is_named(path: Path) -> None:
    record = one_file(path, "commits/*.json")
    record.write_text(record.read_text()[:-5])
    with pytest.raises(StoreError, match=f"commit record {record.name} is damaged"):
        open_store(path)


def test_a_newer_schema_is_refused(path: Path) -> None:
    root = path / "zarr.json"
    root.write_text(root.read_text().replace('"schema_version": 2', '"schema_version": 3'))
    with pytest.raises(StoreError, match="schema version 3, this lede reads 1 and 2: use a newer one"):
        open_store(path)


def test_damaged_attributes_are_named(path: Path) -> None:
    root = path / "zarr.json"
    root.write_text(root.read_text().replace('"n_layers"', '"n_liars"'))
    with pytest.raises(StoreError, match=r"damaged attributes: .*n_layers"):
        open_store(path)
