"""The rule by which greedy texts are compared in tests: equal, or apart at a float32 tie, which is printed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lede.exactness import compare
from lede.models import EarlyExitModel


def is_exact(model: EarlyExitModel, prompt: Sequence[int], found: Sequence[int], wanted: Sequence[int]) -> bool:
    """True when equal, False at a float32 tie; fails the test otherwise."""
    apart = compare(model, prompt, found, wanted)
    if apart is None:
        return True
    assert model.dtype == torch.float32, f"float64 text differs at token {apart.position}: {found}, wanted {wanted}"
    assert apart.tie, f"text differs at token {apart.position}, where the plain run's margin is {apart.margin:.1e}"
    print(f"numerical tie at token {apart.position}, margin {apart.margin:.1e} of the logits' scale")
    return False
