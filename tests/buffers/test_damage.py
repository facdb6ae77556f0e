"""A damaged store is named, never silently read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import zarr

from lede.buffers import StoreError, StoreWriter, open_store, same_record
from lede.buffers.commits import Commit, digest, read_commits
from tests.buffers.rewriting import change_record, old_record, old_root
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
    damaged[-1] ^= 1
    chunk.write_bytes(bytes(damaged))
    with pytest.raises(StoreError, match=r"rewards/c.* was altered"):
        open_store(path, verify=True)
    store = open_store(path)
    with pytest.raises(StoreError, match=rf"shard {chunk.parts[-3]}: file rewards/c.* was altered"):
        list(store)


def test_altered_metadata_is_found(path: Path) -> None:
    file = one_file(path, "shards/*/rewards/zarr.json")
    file.write_text(file.read_text().replace("12", "11"))
    store = open_store(path)
    with pytest.raises(StoreError, match=r"file rewards/zarr\.json was altered"):
        list(store)
    with pytest.raises(StoreError, match=r"file rewards/zarr\.json was altered"):
        open_store(path, verify=True)


def test_an_array_of_another_length_is_named(path: Path) -> None:
    file = one_file(path, "shards/*/rewards/zarr.json")
    file.write_text(file.read_text().replace("12", "11", 1))
    record = one_file(path, "commits/*.json")
    files = json.loads(record.read_text())["files"]
    change_record(record, files={**files, "rewards/zarr.json": (file.stat().st_size, digest(file.read_bytes()))})
    with pytest.raises(StoreError, match="array 'rewards' has 11 rows, expected 12"):
        list(open_store(path, verify=True))


def test_an_array_without_a_chunk_is_never_filled_up_with_zeros(path: Path) -> None:
    """A7.4: zarr reads a missing chunk as zeros, and only newer versions have a setting against it."""
    chunk = one_file(path, "shards/*/rewards/c.*")
    chunk.unlink()
    record = path / "commits" / f"{chunk.parts[-3]}.json"
    files = json.loads(record.read_text())["files"]
    del files["rewards/c.0"]
    change_record(record, files=files)
    with pytest.raises(StoreError, match="array 'rewards' can't be read: 0 chunks of 1 are there"):
        list(open_store(path, verify=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rows": 13}, "12 rows, 13 were committed"), ({"prompts": [0, 3]}, "holds other prompts")],
)
def test_a_commit_record_that_lies_is_found(path: Path, change: dict[str, object], message: str) -> None:
    for record in (path / "commits").glob("*.json"):
        change_record(record, **change)
    with pytest.raises(StoreError, match=message):
        list(open_store(path))


def test_a_damaged_commit_record_is_named(path: Path) -> None:
    record = one_file(path, "commits/*.json")
    record.write_text(record.read_text()[:-5])
    with pytest.raises(StoreError, match=f"commit record {record.name} is damaged"):
        open_store(path)


def test_one_flipped_byte_in_any_file_of_a_shard_is_named(path: Path) -> None:
    """A7.3: which shard and which array, whatever was damaged, and also where only that shard is read."""
    shard = one_file(path, "shards/*")
    for file in sorted(file for file in shard.rglob("*") if file.is_file()):
        content = file.read_bytes()
        for at in (0, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(StoreError, match=f"shard {shard.name}: file {file.relative_to(shard)} was altered"):
                open_store(path, verify=True)
        if file.parent != shard:
            store = open_store(path)
            with pytest.raises(StoreError, match=f"shard {shard.name}: file {file.relative_to(shard)} was altered"):
                list(store)
        file.write_bytes(content)
    assert len(open_store(path, verify=True)) == 4


def test_one_flipped_bit_of_a_commit_record_is_found(path: Path) -> None:
    record = one_file(path, "commits/*.json")
    content = record.read_bytes()
    assert Commit.from_bytes(record.stem, content).to_bytes() == content
    for at in range(len(content)):
        with pytest.raises(ValueError):  # noqa: PT011  (of many kinds)
            Commit.from_bytes(record.stem, content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
    with pytest.raises(ValueError, match="its checksum differs"):
        Commit.from_bytes("another", content)


def test_one_flipped_bit_of_the_settings_is_found(path: Path) -> None:
    root = path / "zarr.json"
    content = root.read_bytes()
    for at in range(len(content)):
        root.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        with pytest.raises(StoreError, match=re.escape(str(path))):
            open_store(path)
    root.write_bytes(content)
    assert len(open_store(path)) == 4


def test_a_truncated_file_of_any_length_is_named(path: Path) -> None:
    """A7.3: early zarr v3 wrote files in place, and a killed job left parts of them."""
    chunk = one_file(path, "shards/*/observations/c.*")
    content = chunk.read_bytes()
    for length in range(len(content)):
        chunk.write_bytes(content[:length])
        with pytest.raises(StoreError, match=f"shard {chunk.parts[-3]}: file observations/c.* has {length} bytes"):
            open_store(path)


def test_stores_keep_no_consolidated_metadata(path: Path) -> None:
    """A7.10: on a live store that would be stale; and zarr itself reads what was written, as it was written."""
    for file in path.rglob("zarr.json"):
        assert not json.loads(file.read_text()).get("consolidated_metadata")
    assert zarr.open_group(path, mode="r").attrs["kind"] == "transitions"
    shard = zarr.open_group(one_file(path, "shards/*"), mode="r")
    (commit,) = (commit for commit in read_commits(path) if commit.name == one_file(path, "shards/*").name)
    expected = np.concatenate([make_rollout(index).rewards for index in commit.prompts])
    array = shard["rewards"]
    assert isinstance(array, zarr.Array)
    assert np.array_equal(np.asarray(array[...]), expected)


def test_a_newer_schema_is_refused(path: Path) -> None:
    root = path / "zarr.json"
    root.write_text(root.read_text().replace('"schema_version": 3', '"schema_version": 4'))
    with pytest.raises(StoreError, match="schema version 4, this lede reads 1 to 3: use a newer one"):
        open_store(path)


def test_damaged_attributes_are_named(path: Path) -> None:
    root = path / "zarr.json"
    root.write_text(root.read_text().replace('"n_layers"', '"n_liars"'))
    with pytest.raises(StoreError, match=r"damaged attributes: .*n_layers"):
        open_store(path)


def test_settings_changed_by_hand_are_named(path: Path) -> None:
    root = path / "zarr.json"
    root.write_text(root.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(StoreError, match=r"zarr\.json was altered, its checksum differs"):
        open_store(path)


def test_stores_of_the_second_version_have_no_checksum_of_themselves(path: Path) -> None:
    for record in (path / "commits").iterdir():
        old_record(record)
    old_root(path, 2)
    with StoreWriter.open(path, settings("transitions")) as writer:
        writer.add(make_rollout(4))
    store = open_store(path, verify=True)
    assert store.settings.schema_version == 2
    assert all(same_record(record, make_rollout(record.prompt_index)) for record in store)
    assert store.prompt_indices == (0, 1, 2, 3, 4)
    old_root(path, 3)
    with pytest.raises(StoreError, match=r"zarr\.json was altered"):
        open_store(path)
