"""The closing state of a trace: what is seen after the last decision of a text that the budget ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lede.buffers import PromptTrace, StoreError, StoreWriter, open_store, replay, same_record
from lede.features import TEXT_FEATURES, FeatureConfig
from tests.buffers.rewriting import forget, old_record, old_root
from tests.buffers.samples import N_LAYERS, VOCAB, make_trace, settings

LIKELIEST = ("closing_top1", "closing_top2", "closing_token")


def closed(index: int) -> PromptTrace:
    """A trace of five tokens that the budget ended, with a closing state whose every value is different."""
    rng = np.random.default_rng(3000 + index)
    top1 = -rng.exponential(size=N_LAYERS).astype(np.float32)
    return replace(
        make_trace(index, n_tokens=5, eos=False),
        closing_top1=top1,
        closing_top2=top1 - rng.exponential(size=N_LAYERS).astype(np.float32),
        closing_token=rng.integers(1, VOCAB, N_LAYERS).astype(np.int32),
    )


def bare(trace: PromptTrace) -> PromptTrace:
    """The trace without what the closing state's likeliest tokens are."""
    return replace(trace, **{name: np.zeros(0) for name in LIKELIEST})  # type: ignore[arg-type]


def test_what_is_left_out_is_zeros() -> None:
    trace = bare(closed(0))
    for name, dtype in zip(LIKELIEST, (np.float32, np.float32, np.int32), strict=True):
        values = getattr(trace, name)
        assert (values.shape, values.dtype) == ((N_LAYERS,), dtype)
        assert not values.any()
        assert not same_record(closed(0), replace(closed(0), **{name: values}))


@pytest.mark.parametrize("name", LIKELIEST)
def test_every_layer_is_wanted(name: str) -> None:
    with pytest.raises(ValueError, match=rf"prompt 4: `{name}` has shape \(3,\), expected \(6,\)"):
        replace(closed(4), **{name: np.zeros(3)})  # type: ignore[arg-type]


@pytest.mark.parametrize("candidates", [(1, 2, 4), (3, 5)])
def test_the_final_observation_is_the_first_candidates(candidates: tuple[int, ...]) -> None:
    trace, first = closed(1), candidates[0] - 1
    used = settings("transitions", features=FeatureConfig(TEXT_FEATURES), candidates=candidates)
    seen = dict(zip(TEXT_FEATURES, replay(trace, [0, 0, 0, 0], used).final_observation.tolist(), strict=True))
    assert seen == pytest.approx(
        {
            "confidence": trace.closing_confidence[first],
            "entropy": trace.closing_entropy[first],
            "trace": -trace.top1[:, -1].mean(),
            "depth": candidates[0] / N_LAYERS,
            "surprisal": -trace.closing_top1[first],
            "margin": trace.closing_top1[first] - trace.closing_top2[first],
            "agreement": 0,
        },
        rel=1e-6,
    )


def test_a_store_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    with StoreWriter.open(path, settings()) as writer:
        for i in range(3):
            writer.add(closed(i))
    assert all(same_record(a, closed(a.prompt_index)) for a in open_store(path, verify=True))
    (shard,) = (path / "shards").iterdir()
    forget(path, shard, "closing_top2")  # no store of this version is without it
    with pytest.raises(StoreError, match="array 'closing_top2' can't be read"):
        list(open_store(path))


def test_stores_of_the_first_version_are_read_as_zeros_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "old.zarr"
    with StoreWriter.open(path, settings()) as writer:
        for i in range(3):
            writer.add(closed(i))
    (shard,) = (path / "shards").iterdir()
    forget(path, shard, "branch_*", "closing_to*")
    old_record(path / "commits" / f"{shard.name}.json")
    old_root(path, 1, "branch_")
    assert all(same_record(record, bare(closed(record.prompt_index))) for record in open_store(path, verify=True))
    with StoreWriter.open(path, settings()) as writer:
        writer.add(closed(3))
    records: list[PromptTrace] = list(open_store(path, verify=True))  # type: ignore[arg-type]
    assert [record.prompt_index for record in records] == [0, 1, 2, 3]
    assert same_record(records[0], bare(closed(0)))
    assert same_record(records[3], closed(3))
