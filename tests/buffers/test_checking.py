"""`lede buffer check`: one wrong byte or value anywhere has a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lede.buffers import StoreError, StoreSettings, StoreWriter, check_store, open_store
from lede.buffers.columns import Columns, stack
from lede.buffers.commits import Commit, digest
from lede.buffers.shards import read_settings, write_shard
from lede.cli import main
from tests.buffers.samples import make_rollout, make_trace, settings, with_branches


def rollouts(path: Path, shard_prompts: int = 2) -> StoreSettings:
    made = settings("transitions", explore="uniform")
    with StoreWriter.open(path, made, shard_prompts=shard_prompts) as writer:
        for i, sizes in enumerate([(1, 3, 2), (2,), (), (3, 3)]):
            writer.add(make_rollout(i, sizes, eos=i % 2 == 0))
    return made


def traces(path: Path, shard_prompts: int = 2) -> StoreSettings:
    made = settings("traces", branch_share=0.5)
    with StoreWriter.open(path, made, shard_prompts=shard_prompts) as writer:
        for i in range(3):
            writer.add(with_branches(make_trace(i, n_tokens=4 + i), 3 * (i != 1)))
    return made


def flipped(content: bytes, place: int, bit: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


@pytest.mark.parametrize("make", [rollouts, traces])
def test_a_whole_store_has_no_damage(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "s.zarr")
    report = check_store(tmp_path / "s.zarr")
    store = open_store(tmp_path / "s.zarr")
    assert (report.damage, report.exit_code) == ((), 0)
    assert (report.shards, report.rows) == (store.n_shards, store.n_rows)
    shards = (file for file in (tmp_path / "s.zarr" / "shards").rglob("*") if file.is_file())
    assert report.bytes == sum(file.stat().st_size for file in shards)


def test_a_store_without_shards_has_no_damage(tmp_path: Path) -> None:
    StoreWriter.open(tmp_path / "s.zarr", settings()).close()
    assert check_store(tmp_path / "s.zarr").exit_code == 0


@pytest.mark.parametrize("make", [rollouts, traces])
def test_one_flipped_byte_in_any_file_is_named_by_shard_and_array(tmp_path: Path, make: Any) -> None:
    """A7.3: a byte of every file that a store has, one at a time."""
    path = tmp_path / "s.zarr"
    make(path, shard_prompts=4)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    assert len(files) > 30
    rng = np.random.default_rng(0)
    for file in files:
        content = file.read_bytes()
        file.write_bytes(flipped(content, int(rng.integers(len(content))), int(rng.integers(8))))
        (damage,) = check_store(path).damage
        name = file.relative_to(path).as_posix()
        assert damage.file == name
        parts = name.split("/")
        if parts[0] == "shards":
            assert damage.shard == parts[1]
            assert damage.array == (parts[2] if len(parts) == 4 else None)
        else:
            assert damage.shard == (None if name == "zarr.json" else file.stem)
        file.write_bytes(content)
    assert check_store(path).exit_code == 0


def test_every_byte_of_the_settings_and_of_a_commit_record_counts(tmp_path: Path) -> None:
    path = tmp_path / "s.zarr"
    rollouts(path)
    record = sorted((path / "commits").iterdir())[0]
    content = record.read_bytes()
    for place in range(len(content)):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            Commit.from_bytes(record.stem, flipped(content, place, place % 8))
    root = path / "zarr.json"
    content = root.read_bytes()
    for place in range(len(content)):
        root.write_bytes(flipped(content, place, place % 8))
        with pytest.raises(StoreError):
            read_settings(path)
        if place % 10 == 0:
            assert [(each.shard, each.file) for each in check_store(path).damage] == [(None, "zarr.json")]


@pytest.mark.parametrize("cut", [1, 10_000])
def test_a_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    """A7.3"""
    path = tmp_path / "s.zarr"
    rollouts(path)
    chunk = sorted(path.glob("shards/*/rewards/c.*"))[1]
    size = chunk.stat().st_size
    chunk.write_bytes(chunk.read_bytes()[:-cut])
    (damage,) = check_store(path).damage
    assert (damage.shard, damage.array) == (chunk.parts[-3], "rewards")
    assert damage.message == f"the file has {max(size - cut, 0)} bytes, {size} were committed"


def test_a_lost_chunk_and_a_lost_shard_are_named(tmp_path: Path) -> None:
    """A7.4: what zarr would read as zeros."""
    path = tmp_path / "s.zarr"
    rollouts(path)
    sorted(path.glob("shards/*/actions/c.*"))[0].unlink()
    (damage,) = check_store(path).damage
    assert (damage.array, damage.message) == ("actions", "the file is lost")
    (path / "shards").rename(path / "elsewhere")
    report = check_store(path)
    assert len(report.damaged_shards) == 2
    assert {each.message for each in report.damage} == {"the file is lost"}
    assert report.rows == 0


def test_all_damage_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "s.zarr"
    rollouts(path)
    for name in ("rewards", "match"):
        for chunk in path.glob(f"shards/*/{name}/c.*"):
            chunk.write_bytes(flipped(chunk.read_bytes(), 3, 3))
    assert sorted((each.array, each.message) for each in check_store(path).damage) == sorted(
        [(name, "the file was altered, its checksum differs") for name in ("rewards", "match")] * 2
    )


def test_what_readers_pass_over_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "s.zarr"
    writers = [StoreWriter.open(path, settings()) for _ in range(2)]
    for writer in writers:
        writer.add(make_trace(0))
        writer.close()
    (path / "shards" / "half").mkdir()
    report = check_store(path)
    assert (report.exit_code, report.duplicates, report.leftovers) == (0, 1, 1)


def _set(name: str, row: int, value: Any) -> Any:
    def change(columns: Columns) -> None:
        columns[name] = columns[name].copy()
        columns[name][row] = value

    change.__name__ = f"{name}[{row}]={value}"
    return change


def _shorten(name: str) -> Any:
    def change(columns: Columns) -> None:
        columns[name] = columns[name][:-1]

    change.__name__ = f"{name} short"
    return change


TRANSITION_FAULTS = [
    (_set("observations", 2, np.nan), "observations", r"first row 2 \(prompt 0\): .*nan.*; wanted: finite numbers"),
    (_set("observations", 6, (0, 0, 60, 0.5)), "observations", r"first row 6 \(prompt 1\).*within their bounds"),
    (_set("final_observation", 1, np.inf), "final_observation", r"row 1 \(prompt 1\).*finite"),
    (_set("rewards", 7, -np.inf), "rewards", r"row 7 \(prompt 1\).*finite"),
    (_set("actions", 0, 2), "actions", "wanted: 0 .continue. or 1 .exit."),
    (_set("layer", 0, 3), "layer", r"candidates out of \[1, 2, 4\]"),
    (_set("exit_layer", 0, 0), "exit_layer", "the layer at an exit, else 0"),
    (_set("match", 0, -1), "match", "0 or 1 at an exit, else -1"),
    (_set("token_index", 1, 1), "token_index", "from 1, one more after each token's end"),
    (_set("token_end", 7, False), "token_end", r"row 7 \(prompt 1\).*ends its token"),
    (_set("token_end", 4, True), "row_count", "decisions about every new token but the first"),
    (_set("prompt_ids", 3, 50), "prompt_ids", r"row 3 \(prompt 1\): 50; wanted: ids within 0..49"),
    (_set("token_ids", 0, -1), "token_ids", "within 0..49"),
    (_set("prompt_index", 1, 0), "prompt_index", "holds a prompt twice"),
    (_set("prompt_length", 0, 0), "prompt_length", "a length of 0, at least 1 is wanted"),
    (_shorten("token_ids"), "token_ids", "has 5 rows, the lengths of its prompts add up to 6"),
]

TRACE_FAULTS = [
    (_set("confidence", 1, np.nan), "confidence", r"row 1 \(prompt 0\).*finite"),
    (_set("anchor", 1, np.inf), "anchor", r"row 1 \(prompt 1\).*finite"),
    (_set("entropy", 3, 4.2), "entropy", r"row 3 \(prompt 1\).*ln of the vocabulary, 3.913"),
    (_set("top1", 0, 0.5), "top1", "0 or less"),
    (_set("top2", 0, 0), "top2", "no more than top1"),
    (_set("token", 0, 50), "token", "within 0..49"),
    (_set("closing_token", 0, -1), "closing_token", "within 0..49"),
    (_set("match", 0, 0.5), "match", "0 or 1, the text is greedy"),
    (_set("row_count", 0, 4), "confidence", "the lengths of its prompts add up to 8"),
    (_set("branch_row", 2, 3), "branch_row", r"row 2 \(prompt 0\): 3; wanted: rows of the branch's prompt"),
    (_set("branch_layer", 0, 6), "branch_layer", "layers within 1..5"),
    (_set("branch_length", 0, 12), "branch_length", "lengths within 1..11"),
    (_set("branch_token", 3, 50), "branch_token", r"row 3 \(prompt 1\).*-1, or ids within 0..49"),
    (_set("branch_entropy", 3, -1), "branch_entropy", r"row 3 \(prompt 1\)"),
]


@pytest.mark.parametrize(
    ("kind", "change", "array", "message"),
    [("transitions", *fault) for fault in TRANSITION_FAULTS] + [("traces", *fault) for fault in TRACE_FAULTS],
)
def test_values_that_can_not_be_are_named(tmp_path: Path, kind: str, change: Any, array: str, message: str) -> None:
    """Written and committed like that, so that every checksum is right."""
    made = settings(kind)
    path = tmp_path / "s.zarr"
    StoreWriter.open(path, made).close()
    if kind == "transitions":
        columns = stack([make_rollout(0, (1, 3, 2)), make_rollout(1, (2,))], made)
    else:
        columns = stack([with_branches(make_trace(0, 4), 3), with_branches(make_trace(1, 5), 2)], made)
    write_shard(path, "whole", columns)
    assert check_store(path).damage == ()
    (path / "commits" / "whole.json").unlink()
    change(columns)
    write_shard(path, "odd", columns)
    report = check_store(path)
    found = {each.array: each for each in report.damage}
    assert {each.shard for each in report.damage} == {"odd"}
    assert array in found
    assert_matches(message, found[array].message)


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


def test_a_text_over_its_budget_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.zarr"
    made = settings("transitions", max_new_tokens=3)
    StoreWriter.open(path, made).close()
    write_shard(path, "odd", stack([make_rollout(0, (1, 1, 1))], made))
    (damage,) = check_store(path).damage
    assert (damage.array, "at most 3 new tokens" in damage.message) == ("token_length", True)


def test_a_newer_schema_and_what_is_no_store_are_refused_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "s.zarr"
    rollouts(path)
    root = json.loads((path / "zarr.json").read_text())
    attributes = {**root["attributes"], "schema_version": 99}
    del attributes["sha256"]
    sealed = digest(json.dumps(attributes).encode())
    (path / "zarr.json").write_text(json.dumps({**root, "attributes": {**attributes, "sha256": sealed}}))
    with pytest.raises(StoreError, match="schema version 99, this lede reads"):
        check_store(path)
    with pytest.raises(StoreError, match="there is no store at"):
        check_store(tmp_path / "nothing.zarr")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="is no store of lede"):
        check_store(tmp_path / "folder")


def test_a_store_in_memory_by_url() -> None:
    path: Any = "memory://check/s.zarr"
    rollouts(path)
    assert check_store(path).exit_code == 0


def test_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.zarr"
    rollouts(path)
    assert main(["buffer", "check", str(path)]) == 0
    assert "2 of 2 shards are whole" in capsys.readouterr().out
    chunk = sorted(path.glob("shards/*/rewards/c.*"))[0]
    chunk.write_bytes(flipped(chunk.read_bytes(), 5, 0))
    assert main(["buffer", "check", str(path)]) == 1
    told = capsys.readouterr().out
    assert f"shard {chunk.parts[-3]}, array 'rewards': the file was altered" in told
    assert "1 of 2 shards are whole" in told
    assert main(["buffer", "check", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["damage"][0]["array"] == "rewards"
    assert main(["buffer", "check", str(tmp_path / "nothing.zarr")]) == 2
