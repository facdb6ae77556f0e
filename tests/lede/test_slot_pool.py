"""Buffers that outlive their cache, so that recorded graphs find them where they were."""

from __future__ import annotations

import gc

import torch

from lede.cache import KVCache
from lede.slot_pool import KEPT, SlotPool


def filled(pool: SlotPool | None, capacity: int = 5, n_layers: int = 2) -> KVCache:
    cache = KVCache(n_layers, capacity, spare=3, step=16, pool=pool)
    cache.place(0)
    for layer in range(n_layers):
        states = torch.full((1, 2, 4, 3), float(layer + 1))
        cache.update(states, -states, layer)
    return cache


def addresses(cache: KVCache) -> list[int]:
    return [buffer.data_ptr() for buffer in (*cache.keys, *cache.values) if buffer is not None]


def test_the_next_cache_gets_the_buffers_of_the_last_one_layer_by_layer() -> None:
    pool = SlotPool()
    first = filled(pool)
    before = addresses(first)
    del first
    gc.collect()
    again = filled(pool, capacity=9)  # as many slots, for they come in steps
    assert addresses(again) == before
    keys, values = again.keys[1], again.values[1]
    assert keys is not None
    assert values is not None
    assert keys.shape == (1, 2, 16, 3)
    assert (keys[:, :, :4] == 2).all()
    assert (values[:, :, :4] == -2).all()
    assert not keys[:, :, 4:].any(), "nothing of the last text is left"


def test_a_prefill_and_its_decoding_get_what_they_had() -> None:
    pool, before = SlotPool(), []
    for _ in range(3):
        prefill = filled(pool)
        decoding = prefill.clone(9)
        before.append((addresses(prefill), addresses(decoding)))
        del decoding
        gc.collect()
        del prefill
        gc.collect()
    assert before[0] == before[1] == before[2]


def test_caches_that_live_at_once_share_nothing() -> None:
    pool = SlotPool()
    first, second = filled(pool), filled(pool)
    third = first.clone(7)
    taken = [*addresses(first), *addresses(second), *addresses(third)]
    assert len(set(taken)) == len(taken)
    content = third.keys[0]
    assert content is not None
    assert (content[:, :, :4] == 1).all()


def test_other_shapes_are_no_use() -> None:
    pool = SlotPool()
    first = filled(pool)
    del first
    gc.collect()
    longer = filled(pool, capacity=20)
    keys = longer.keys[0]
    assert keys is not None
    assert keys.shape[2] == 32
    del longer, keys
    gc.collect()
    kept = [buffer.shape[2] for buffers in pool._free.values() for buffer in buffers]
    assert sorted(kept) == [16] * 4 + [32] * 4, "keys and values of two layers of each cache"
    for capacity in (40, 60):
        filled(pool, capacity)
        gc.collect()
    assert all(len(buffers) == KEPT for buffers in pool._free.values()), "only the last caches' are kept"
    keys = filled(pool, capacity=20).keys[0]
    assert keys is not None
    assert not keys.any(dim=3).any(dim=1)[0, 4:].any(), "a new buffer holds zeros where nothing was stored"
