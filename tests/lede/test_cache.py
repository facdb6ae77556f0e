"""The cache: slot equals position, and a rewind is exact."""

from __future__ import annotations

import pytest
import torch

from lede.cache import KVCache
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, prompt, tiny_model


def states(n_tokens: int, value: float) -> torch.Tensor:
    return torch.full((1, 2, n_tokens, 4), value)


def test_update_returns_everything_up_to_the_block() -> None:
    cache = KVCache(1, capacity=10)
    cache.place(0)
    cache.update(states(3, 1.0), states(3, -1.0), 0)
    cache.place(3)
    keys, values = cache.update(states(2, 2.0), states(2, -2.0), 0)
    assert keys[0, 0, :, 0].tolist() == [1, 1, 1, 2, 2]
    assert values[0, 1, :, 3].tolist() == [-1, -1, -1, -2, -2]
    assert cache.lengths == [5]


def test_window_hides_what_no_query_of_the_block_may_see() -> None:
    cache = KVCache(1, capacity=10, windows=[3])
    cache.place(0)
    cache.update(torch.arange(6.0).expand(1, 1, 1, 6).transpose(2, 3), states(6, 0.0)[:, :1], 0)
    cache.place(6)
    keys, _ = cache.update(torch.full((1, 1, 2, 1), 9.0), torch.zeros(1, 1, 2, 4), 0)
    assert keys.flatten().tolist() == [4, 5, 9, 9]  # the query at 6 looks back to 4, the one at 7 to 5


def test_an_update_past_the_capacity_is_refused() -> None:
    cache = KVCache(1, capacity=4)
    cache.place(0)
    with pytest.raises(ValueError, match="holds 4 tokens, 5 were needed"):
        cache.update(states(5, 0.0), states(5, 0.0), 0)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        KVCache(1, capacity=0)
    with pytest.raises(ValueError, match="rewind to -1"):
        KVCache(1, capacity=1).rewind(-1)


def test_layers_from_a_given_one_are_rewound_alone() -> None:
    cache = KVCache(3, capacity=10)
    cache.place(0)
    for layer in range(3):
        cache.update(states(5, 1.0), states(5, 1.0), layer)
    cache.rewind(2, first_layer=1)
    assert cache.lengths == [5, 2, 2]
    cache.rewind(4)
    assert cache.lengths == [4, 2, 2]


def test_a_borrowed_cache_comes_back_as_it_was() -> None:
    """Slots, lengths and layers that nobody has run; also when the borrower fails."""
    cache = KVCache(2, capacity=10)
    cache.place(0)
    cache.update(torch.arange(40.0).reshape(1, 2, 5, 4), torch.arange(40.0, 80.0).reshape(1, 2, 5, 4), 0)
    before = [buffer.clone() for buffer in (cache.keys[0], cache.values[0]) if buffer is not None]

    def borrow_and_fail() -> None:
        with cache.borrowed(3):
            assert cache.lengths == [3, 0]
            cache.place(3)
            keys, _ = cache.update(states(2, 7.0), states(2, 7.0), 0)
            assert keys[0, 0, 3:].unique().tolist() == [7.0]
            raise InterruptedError

    with pytest.raises(InterruptedError):
        borrow_and_fail()
    assert cache.lengths == [5, 0]
    after = [buffer for buffer in (cache.keys[0], cache.values[0]) if buffer is not None]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert cache.keys[1] is None


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("forget", [0, 1, 7, 16])
def test_after_a_rewind_the_next_logits_are_those_of_a_fresh_prefill(family: str, forget: int) -> None:
    """None, one, some and all of 16 tokens."""
    model = tiny_model(family)
    ids, more = prompt(0, 16), prompt(1, 5)
    kept = len(ids) - forget

    def feed(cache: KVCache, tokens: list[int], start: int) -> torch.Tensor:
        block = model.block(cache, start, len(tokens))
        hidden = model.run_layers(model.embed(torch.tensor([tokens]), block), 0, N_LAYERS, block)
        return model.head(hidden)[0, -1]

    with torch.inference_mode():
        cache = model.new_cache(32)
        feed(cache, ids, 0)
        cache.rewind(kept)
        assert cache.lengths == [kept] * N_LAYERS
        found = feed(cache, more, kept)
        fresh = feed(model.new_cache(32), [*ids[:kept], *more], 0)
    torch.testing.assert_close(found, fresh, rtol=0, atol=1e-12)
