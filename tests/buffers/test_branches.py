"""Branches in a store: a ragged table of their own, absent from stores of the first version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lede.buffers import PromptTrace, StoreError, StoreWriter, TraceStore, info, open_store, same_record
from tests.buffers.rewriting import forget, old_record, old_root
from tests.buffers.samples import N_LAYERS, make_rollout, make_trace, settings, with_branches


def test_traces_without_branches_have_empty_arrays() -> None:
    trace = make_trace(0, n_tokens=5)
    assert (trace.n_branches, trace.branch_depth) == (0, 11)
    assert trace.branch_row.shape == trace.branch_layer.shape == trace.branch_length.shape == (0,)
    assert trace.branch_entropy.shape == (0, 11)
    assert trace.branch_token.shape == (0, 11, N_LAYERS)
    assert trace.branch_token.dtype == np.int32
    full = with_branches(trace, 3)
    assert (full.n_branches, full.branch_depth) == (3, 11)
    assert not same_record(trace, full)
    assert not same_record(full, replace(full, branch_token=full.branch_token + 1))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("branch_layer", np.ones(2), r"prompt 4: `branch_layer` has shape \(2,\), expected \(3,\)"),
        ("branch_top1", np.zeros((3, 10)), r"`branch_top1` has shape \(3, 10\), expected \(3, 11\)"),
        ("branch_token", np.zeros((3, 11, 5)), r"`branch_token` has shape \(3, 11, 5\), expected \(3, 11, 6\)"),
        ("branch_token", np.zeros((3, 11)), r"`branch_token` has shape \(3, 11\), expected \(branch, depth, layer\)"),
        ("branch_row", [0, 1, 7], r"`branch_row` must be within 0\.\.6, got 0 to 7"),
        ("branch_row", [-1, 1, 2], r"`branch_row` must be within 0\.\.6, got -1 to 2"),
        ("branch_layer", [1, 2, 6], r"`branch_layer` must be within 1\.\.5, got 1 to 6"),
        ("branch_length", [0, 1, 2], r"`branch_length` must be within 1\.\.11, got 0 to 2"),
        ("branch_length", [1, 1, 12], r"`branch_length` must be within 1\.\.11, got 1 to 12"),
    ],
)
def test_branches_are_checked(name: str, value: object, message: str) -> None:
    trace = with_branches(make_trace(4, n_tokens=8), 3)
    with pytest.raises(ValueError, match=message):
        replace(trace, **{name: value})  # type: ignore[arg-type]


def test_a_store_has_one_depth(tmp_path: Path) -> None:
    traces = [with_branches(make_trace(i, n_tokens=6), n, depth=4) for i, n in enumerate((2, 0, 5))]
    short = settings(branch_share=1.0, branch_depth=4)
    with StoreWriter.open(tmp_path / "t.zarr", short) as writer:
        for trace in traces:
            writer.add(trace)
        with pytest.raises(ValueError, match=r"prompt 9: `branch_confidence` has rows of shape \(11,\).* \(4,\)"):
            writer.add(with_branches(make_trace(9, n_tokens=6), 1))
    store = open_store(tmp_path / "t.zarr", verify=True)
    back: list[PromptTrace] = list(store)  # type: ignore[arg-type]
    assert [trace.branch_token.shape for trace in back] == [(2, 4, 6), (0, 4, 6), (5, 4, 6)]
    assert all(same_record(a, b) for a, b in zip(traces, back, strict=True))
    part = store.select([2])
    assert isinstance(part, TraceStore)
    assert same_record(part.prompts[0], traces[2])


def first_version(path: Path, shard: Path) -> None:
    """Turn a store without branches into what version 1 wrote: no such settings, no such arrays."""
    forget(path, shard, "branch_*")
    old_record(path / "commits" / f"{shard.name}.json")
    old_root(path, 1, "branch_")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store of traces as version 1 wrote it, prompts 0 to 3."""
    path = tmp_path / "old.zarr"
    with StoreWriter.open(path, settings()) as writer:
        for i in range(4):
            writer.add(make_trace(i))
    (shard,) = (path / "shards").iterdir()
    first_version(path, shard)
    assert not list(path.glob("shards/*/branch_*"))
    return path


def test_stores_of_the_first_version_are_read_as_without_branches(old: Path) -> None:
    store = open_store(old, verify=True)
    assert (store.settings.schema_version, store.settings.branch_share) == (1, 0)
    assert [record.prompt_index for record in store] == [0, 1, 2, 3]
    assert all(same_record(record, make_trace(record.prompt_index)) for record in store)
    assert info(old).branches == 0


def test_stores_of_the_first_version_are_gone_on_with(old: Path) -> None:
    with pytest.raises(ValueError, match=r"branch_share: 0\.0 / 0\.1\. Use"):
        StoreWriter.open(old, settings(branch_share=0.1))
    with StoreWriter.open(old, settings()) as writer:
        assert writer.done == {0, 1, 2, 3}
        writer.add(make_trace(4))
    store = open_store(old, verify=True)
    assert len(store) == 5
    assert all(same_record(record, make_trace(record.prompt_index)) for record in store)


def test_rollouts_of_the_first_version_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "r.zarr"
    with StoreWriter.open(path, settings("transitions")) as writer:
        writer.add(make_rollout(0))
    (shard,) = (path / "shards").iterdir()
    assert not list(shard.glob("branch_*")), "rollouts have no branches"
    first_version(path, shard)
    assert same_record(open_store(path).prompts[0], make_rollout(0))


def test_lost_branches_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    with StoreWriter.open(path, settings(branch_share=1.0)) as writer:
        writer.add(with_branches(make_trace(0, n_tokens=6), 4))
    (shard,) = (path / "shards").iterdir()
    (shard / "branch_token" / "zarr.json").rename(tmp_path / "zarr.json")
    with pytest.raises(StoreError, match=r"lost its file branch_token/zarr\.json"):
        open_store(path)
    (tmp_path / "zarr.json").rename(shard / "branch_token" / "zarr.json")
    forget(path, shard, "branch_*")  # as if they had never been: but this version has them
    with pytest.raises(StoreError, match="array 'branch_count' can't be read"):
        list(open_store(path))
