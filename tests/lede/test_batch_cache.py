"""Rows of a cache at positions of their own: what is copied, where padding goes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lede.cache import KVCache
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, prompt, tiny_model

MODEL = "llama"


def seen_by(rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> tuple[KVCache, torch.Tensor]:
    """The cache, and the keys that attention looks at in the first layer."""
    model = tiny_model(MODEL)
    cache = model.new_cache(12, 4)
    block = model.rows_block(cache, rows, starts, lengths)
    cache.place_rows(block.place)  # type: ignore[arg-type]
    n_tokens = max(lengths)
    values = torch.tensor(rows, dtype=torch.float64)[:, None] * 10 + torch.arange(n_tokens) + 1
    states = values[:, None, :, None].expand(len(rows), 2, n_tokens, 8)
    keys, _ = cache.update(states, states, 0)
    return cache, keys


@pytest.mark.parametrize("starts", [(3, 3, 3, 3), (0, 5, 2, 3)], ids=["together", "apart"])
@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (1, 2), (3,)], ids=str)
def test_neighbours_are_looked_at_where_they_are(rows: tuple[int, ...], starts: tuple[int, ...]) -> None:
    cache, keys = seen_by(rows, starts[: len(rows)], [1] * len(rows))
    buffer = cache.keys[0]
    assert buffer is not None
    assert keys.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    for i, (row, start) in enumerate(zip(rows, starts, strict=False)):
        assert keys[i, 0, start, 0] == row * 10 + 1


@pytest.mark.parametrize("starts", [(3, 3), (1, 4)], ids=["together", "apart"])
def test_others_are_gathered(starts: tuple[int, int]) -> None:
    cache, keys = seen_by((0, 2), starts, (2, 2))
    buffer = cache.keys[0]
    assert buffer is not None
    assert torch.equal(keys, buffer[[0, 2], :, : max(starts) + 2])
    assert keys[1, 0, starts[1] : starts[1] + 2, 0].tolist() == [21, 22]
    assert not buffer[[1, 3]].any()


def test_padding_past_the_capacity_goes_to_the_last_slot() -> None:
    cache, keys = seen_by((0, 1), (2, 9), (4, 1))
    assert keys.shape[2] == 10
    assert keys[1, 0, 9, 0] == 11
    buffer = cache.keys[0]
    assert buffer is not None
    assert buffer[1, 0, 9:, 0].tolist() == [11, 12, buffer[1, 0, 11, 0]]
    assert buffer[1, 0, 11, 0] in (13, 14)
    with pytest.raises(ValueError, match="holds 12 tokens, 13 were needed"):
        seen_by((0, 1), (2, 9), (1, 4))


def test_a_row_moves_with_all_its_layers() -> None:
    cache = KVCache(3, capacity=6, batch_size=2)
    cache.place(0)
    states = torch.arange(2 * 2 * 4 * 3.0).reshape(2, 2, 4, 3)
    for layer in range(2):  # the third was never run
        cache.update(states, -states, layer)
    cache.move_row(1, 0, 3)
    for layer in range(2):
        keys, values = cache.keys[layer], cache.values[layer]
        assert keys is not None
        assert values is not None
        assert torch.equal(keys[0, :, :3], states[1, :, :3])
        assert torch.equal(values[0, :, :3], -states[1, :, :3])
        assert torch.equal(keys[0, :, 3:4], states[0, :, 3:4])


@pytest.mark.parametrize("rows", [(0, 1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_rows_at_any_positions_equal_single_runs(family: str, rows: tuple[int, ...]) -> None:
    """Prompts and later blocks of unequal length, across windows, on neighbours and others."""
    model = tiny_model(family)
    texts = [prompt(30 + row, (13, 4, 7)[row]) for row in rows]
    more = [prompt(40 + row, (2, 11, 5)[row]) for row in rows]
    with torch.inference_mode():
        cache = model.new_cache(26, 3)
        for starts, tokens in ([0] * len(rows), texts), ([len(text) for text in texts], more):
            lengths = [len(each) for each in tokens]
            block = model.rows_block(cache, rows, starts, lengths)
            padded = torch.tensor([[*each, *[1] * (max(lengths) - len(each))] for each in tokens])
            hidden = model.run_layers(model.embed(padded, block), 0, 2, block)
            logits = model.head(model.run_layers(hidden, 2, N_LAYERS, block))
        for i, (text, tail) in enumerate(zip(texts, more, strict=True)):
            wanted = model.hf_model(torch.tensor([[*text, *tail]])).logits[0, len(text) :]
            torch.testing.assert_close(logits[i, : len(tail)], wanted, rtol=0, atol=1e-12)
