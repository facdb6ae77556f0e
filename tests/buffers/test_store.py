"""Records come back from a store value by value, in order of the prompts."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from lede.buffers import PromptRollout, PromptTrace, StoreWriter, TraceStore, TransitionStore, open_store, same_record
from tests.buffers.samples import CANDIDATES, N_LAYERS, make_rollout, make_trace, settings, with_branches


def write(path: Path, kind: str, records: list[PromptTrace] | list[PromptRollout], shard_prompts: int = 3) -> None:
    with StoreWriter.open(path, settings(kind), shard_prompts=shard_prompts) as writer:
        for record in records:
            writer.add(record)


def test_traces_round_trip(tmp_path: Path) -> None:
    traces = [with_branches(make_trace(i, sampled=i % 2 == 0), i % 4) for i in range(8)]
    write(tmp_path / "t.zarr", "traces", traces)
    store = open_store(tmp_path / "t.zarr", verify=True)
    assert isinstance(store, TraceStore)
    assert store.settings == settings("traces")
    back = list(store)
    assert [trace.prompt_index for trace in back] == list(range(8))
    for old, new in zip(traces, back, strict=True):
        for field in fields(old):
            was, now = getattr(old, field.name), getattr(new, field.name)
            np.testing.assert_array_equal(now, was, err_msg=field.name)
            assert np.asarray(now).dtype == np.asarray(was).dtype, field.name
        assert same_record(old, new)
    assert store.n_rows == sum(trace.token_ids.size - 1 for trace in traces)


def test_rollouts_round_trip(tmp_path: Path) -> None:
    rollouts = [make_rollout(i, eos=i % 2 == 0) for i in range(5)]
    write(tmp_path / "r.zarr", "transitions", rollouts, shard_prompts=2)
    store = open_store(tmp_path / "r.zarr", verify=True)
    assert isinstance(store, TransitionStore)
    assert store.n_shards == 3
    for old, new in zip(rollouts, store.prompts, strict=True):
        for field in fields(old):
            was, now = getattr(old, field.name), getattr(new, field.name)
            np.testing.assert_array_equal(now, was, err_msg=field.name)
            assert np.asarray(now).dtype == np.asarray(was).dtype, field.name


def test_content_does_not_depend_on_the_order_of_writing(tmp_path: Path) -> None:
    rollouts = [make_rollout(i) for i in range(7)]
    write(tmp_path / "a.zarr", "transitions", rollouts)
    write(tmp_path / "b.zarr", "transitions", [rollouts[i] for i in (6, 1, 4, 0, 3, 5, 2)], shard_prompts=2)
    a, b = open_store(tmp_path / "a.zarr"), open_store(tmp_path / "b.zarr")
    assert a.prompt_indices == b.prompt_indices == tuple(range(7))
    columns = b.arrays()
    for name, column in a.arrays().items():
        np.testing.assert_array_equal(columns[name], column, err_msg=name)


def test_columns_of_zeros_survive(tmp_path: Path) -> None:
    rollout = make_rollout(0, (3, 3))  # never an exit
    zeros = np.zeros(6, dtype=np.float32)
    write(
        tmp_path / "z.zarr", "transitions", [replace(rollout, rewards=zeros, observations=np.zeros((6, 4), np.float32))]
    )
    assert list((tmp_path / "z.zarr" / "shards").glob("*/actions/c.*")), "a chunk of zeros must be on disk"
    arrays = open_store(tmp_path / "z.zarr", verify=True).arrays()
    assert arrays["actions"].tolist() == [0] * 6
    assert arrays["rewards"].tolist() == [0] * 6
    assert arrays["exit_layer"].tolist() == [0] * 6


@pytest.mark.parametrize("kind", ["traces", "transitions"])
def test_prompts_without_a_decision(tmp_path: Path, kind: str) -> None:
    records = [make_trace(0, n_tokens=1, eos=True)] if kind == "traces" else [make_rollout(0, ())]
    write(tmp_path / "e.zarr", kind, records)
    store = open_store(tmp_path / "e.zarr", verify=True)
    assert (len(store), store.n_rows) == (1, 0)
    assert same_record(store.prompts[0], records[0])


def test_empty_store(tmp_path: Path) -> None:
    write(tmp_path / "e.zarr", "traces", [])
    store = open_store(tmp_path / "e.zarr")
    assert (len(store), store.n_rows, list(store)) == (0, 0, [])
    assert store.arrays()["match"].shape == (0, N_LAYERS)


def test_columns_are_whole_and_name_their_prompts(tmp_path: Path) -> None:
    traces = [make_trace(i) for i in (5, 2)]
    write(tmp_path / "t.zarr", "traces", traces)
    arrays = open_store(tmp_path / "t.zarr").arrays()
    counts = [traces[1].n_rows, traces[0].n_rows]
    assert arrays["prompt_index"].tolist() == [2] * counts[0] + [5] * counts[1]
    assert arrays["token_index"].tolist() == [*range(1, counts[0] + 1), *range(1, counts[1] + 1)]
    np.testing.assert_array_equal(arrays["confidence"], np.concatenate([traces[1].confidence, traces[0].confidence]))


def test_a_prompt_committed_twice_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "d.zarr"
    first, second = StoreWriter.open(path, settings()), StoreWriter.open(path, settings())
    for writer, indices in ((first, (0, 1)), (second, (1, 2))):
        for i in indices:
            writer.add(make_trace(i))
        writer.close()
    store = open_store(path)
    assert (store.prompt_indices, store.duplicates) == ((0, 1, 2), 1)
    assert store.n_rows == sum(make_trace(i).n_rows for i in range(3))
    assert all(same_record(trace, make_trace(trace.prompt_index)) for trace in store)


def test_select_gives_a_store_in_memory(tmp_path: Path) -> None:
    write(tmp_path / "r.zarr", "transitions", [make_rollout(i) for i in range(5)])
    store = open_store(tmp_path / "r.zarr")
    part = store.select([3, 1])
    assert part.prompt_indices == (1, 3)
    assert type(part) is TransitionStore
    assert part.n_rows == 12
    with pytest.raises(ValueError, match=r"no prompts \[9\]"):
        store.select([9])


def test_memory_store_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="kind 'transitions'"):
        TransitionStore(settings("traces"))
    with pytest.raises(ValueError, match=r"prompts \[1\] are there more than once"):
        TraceStore(settings(), [make_trace(1), make_trace(0), make_trace(1)])


def test_records_check_their_shapes() -> None:
    rollout, trace = make_rollout(3), make_trace(4)
    with pytest.raises(ValueError, match=r"prompt 3: `rewards` has shape \(2,\), expected \(6,\)"):
        replace(rollout, rewards=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="last decision must end its token"):
        replace(rollout, token_end=np.zeros(6, np.bool_))
    with pytest.raises(ValueError, match="prompt 4: `match` has shape"):
        replace(trace, match=trace.match[:, 1:])
    with pytest.raises(ValueError, match="at least one id"):
        replace(trace, prompt_ids=np.zeros(0, np.int64))


def test_settings_check_their_values() -> None:
    with pytest.raises(ValueError, match="kind of a store"):
        settings("pictures")
    with pytest.raises(ValueError, match=r"branch_share must be within 0\.\.1 .* got 1\.5 and 11"):
        settings(branch_share=1.5)
    with pytest.raises(ValueError, match=r"within 1\.\.5"):
        settings(candidates=(*CANDIDATES, N_LAYERS))
