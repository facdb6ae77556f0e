"""Primitives of large vocabularies, whose largest entries are found block by block."""

from __future__ import annotations

import pytest
import torch

from lede.features import MAX_CONFIDENCE, MAX_SURPRISAL
from lede.primitives import BLOCK, primitives

SIZES = [2 * 2 * BLOCK, 16 * BLOCK, 16 * BLOCK + 1, 20 * BLOCK + 77]


def by_the_book(logits: torch.Tensor, top_k: int) -> dict[str, torch.Tensor]:
    """The definitions, in float64."""
    log_p = torch.log_softmax(logits.double(), dim=-1)
    top = log_p.sort(dim=-1, descending=True).values
    return {
        "confidence": (-top[..., :top_k].mean(-1)).clamp_max(MAX_CONFIDENCE),
        "entropy": torch.special.entr(log_p.exp()).sum(-1),
        "top1": top[..., 0],
        "top2": top[..., 1].clamp_min(-MAX_SURPRISAL),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [1, 5, 9])
@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_the_definitions(size: int, top_k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size + top_k)
    logits = torch.randn(3, 7, size, generator=generator).mul(torch.tensor([0.1, 2.0, 20.0])[:, None, None]).to(dtype)
    logits[1, :3, 5] = -torch.inf
    logits[2, 0, size // 2 :] = -torch.inf
    read = primitives(logits, top_k)
    for name, wanted in by_the_book(logits, top_k).items():
        found = getattr(read, name)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5, msg=name)
    best = logits.amax(-1, keepdim=True)
    first = torch.where(logits == best, torch.arange(size), size).amin(-1)  # by no argmax
    assert torch.equal(read.token, first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_in_memory_of_the_callers_the_bits_are_the_same(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 5, SIZES[-1], generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, :3, 5] = -torch.inf
    kept = logits.clone()
    wanted = primitives(logits, 5)
    assert torch.equal(logits, kept), "without room for them the logits are left alone"
    powers = torch.full(logits.shape, torch.nan, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    found = primitives(logits, 5, powers)
    for name, value in vars(wanted).items():
        assert torch.equal(getattr(found, name), value), name
    assert not powers.isnan().any(), "the room was used"


@pytest.mark.parametrize("places", [(3, 900), (BLOCK * 10, BLOCK * 10 + 1), (1999, 2047 + 30), (2047 + 30, 2047 + 31)])
def test_the_lowest_of_equals(places: tuple[int, int]) -> None:
    logits = torch.zeros(BLOCK * 16 + 40)
    logits[list(places)] = 5.0
    read = primitives(logits, 5)
    assert read.token.item() == places[0]
    assert read.top1.item() == read.top2.item()


def test_several_of_the_largest_stand_in_one_block() -> None:
    logits = torch.zeros(BLOCK * 32)
    logits[700:705] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0])
    torch.testing.assert_close(primitives(logits, 5).confidence.double(), by_the_book(logits, 5)["confidence"])
