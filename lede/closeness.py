"""Whether what compiled code computes is what eager layers do, but for rounding."""

from __future__ import annotations

import math

import torch

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.15}
"""How far compiled and eager states of a layer may lie apart, as a share of the largest, and still be rounding.

Most models take their norms in float32, whatever their dtype."""


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far numbers lie apart at most, as a share of the largest; infinite where only one of them is finite."""
    found, wanted = found.float(), wanted.float()
    differs = found != wanted  # equal infinities lie nowhere apart
    if not differs.any():
        return 0.0
    apart = float((found - wanted)[differs].abs().max() / wanted[wanted.isfinite()].abs().amax())
    return apart if math.isfinite(apart) else math.inf  # or max() would pass over it


def reading_distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The same of the numbers of `LogitReading`, `(4,)`; infinite where they name different tokens."""
    return distance(found[:3], wanted[:3]) if bool(found[3] == wanted[3]) else math.inf
