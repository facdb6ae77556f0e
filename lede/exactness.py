"""Where two greedy texts part, and whether the plain run was sure of its token there.

Verifying a block and decoding one token use different kernels, so a near-tie may fall either way in float32 and below;
the text differs from there on. A divergence at a margin above the dtype's noise is a failure of lede.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lede.models import EarlyExitModel

NOISE = {torch.float64: 0.0, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Top-2 margin of the plain run, as a share of its largest logit, below which a token may fall either way."""


@dataclass(frozen=True)
class Divergence:
    """The first difference of two texts."""

    position: int
    """Index of the first new token that differs."""
    margin: float
    """How far the less likely of the two tokens is below the plain run's best there, as a share of its largest logit.

    That is the top-2 margin, unless one of the texts holds a token that is neither of the two.
    """
    tie: bool
    """Whether the margin is within the noise of the model's dtype. Never where the logits there are no numbers: such a
    difference counts as an error, with a margin of 1."""


def compare(
    model: EarlyExitModel, prompt: Sequence[int], found: Sequence[int], wanted: Sequence[int]
) -> Divergence | None:
    """Compare new tokens with those of plain decoding; None when they are equal.

    Args:
        model: The model, asked for its margin at the first difference.
        prompt: Token ids before them.
        found: New tokens of some decoding.
        wanted: New tokens of plain greedy decoding.
    """
    if list(found) == list(wanted):
        return None
    shorter = min(len(found), len(wanted))
    position = next((i for i in range(shorter) if found[i] != wanted[i]), shorter)
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *wanted[:position]]], device=model.device)
        logits = model.hf_model(ids).logits[0, -1].cpu().double()
    apart = [text[position] for text in (found, wanted) if position < len(text)]
    largest = _largest(logits)
    gap = float(logits.max() - logits[apart].min())
    if not math.isfinite(gap) or not largest:
        return Divergence(position, 1.0, False)
    margin = gap / largest
    # one text being a prefix of the other is no matter of rounding
    return Divergence(position, margin, position < shorter and margin < NOISE.get(model.dtype, 0.0))


def _largest(logits: torch.Tensor) -> float:
    """The largest finite logit, whatever its sign; 0 where there is none."""
    finite = logits[logits.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
