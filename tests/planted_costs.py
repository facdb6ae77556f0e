"""Known costs of every operation, and a clock that only they move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lede.cost_model import CostModel, Costs
from lede.models import EarlyExitModel
from lede.observer import Observer
from tests.tiny_models import N_LAYERS, tiny_model

PLANTED = Costs(
    span=3e-5, layer=6e-4, layer_block=2e-4, layer_token=3e-5, layer_context=2e-6, layer_pair=1e-7,
    head=4e-4, head_block=1e-4, head_token=2e-5,
    embed=5e-5, observe=6e-6, features=9e-5, features_entropy=1.5e-5, features_top_k=7e-6,
    policy=2e-5, choose=1e-5, accept=2e-5, accept_token=4e-6, index=3e-6, propose=2e-6,
)  # fmt: skip

AGAIN = ((1, 0.5), (2, 0.7), (5, 0.9))
"""Shallow layers that run again are cheaper."""
BLOCKS = ((1, 1.0), (2, 1.5), (3, 1.3), (8, 1.1))
"""Verified blocks come in steps."""


class Clock:
    """Stands still but for what operations are said to cost."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def charge(self, owner: Any, name: str, cost: Callable[..., float], patch: pytest.MonkeyPatch) -> None:
        """Let a function move the clock."""
        original = getattr(owner, name)

        def charged(*args: Any, **kwargs: Any) -> Any:
            self.now += cost(*args, **kwargs)
            return original(*args, **kwargs)

        patch.setattr(owner, name, charged)


def layers_cost(model: EarlyExitModel, hidden: torch.Tensor, first: int, last: int, block: Any) -> float:
    c, q, context = PLANTED, hidden.shape[1], block.start
    seconds = 0.0 if block.masks else c.span  # masks are made when a block meets its first layer
    for window in model.windows[first:last]:
        seen = context if window is None else min(context, window - 1)
        seconds += c.layer + (c.layer_block if q > 1 else 0) + (q - 1) * c.layer_token
        seconds += seen * (c.layer_context + (q - 1) * c.layer_pair)
    return seconds


def head_cost(model: EarlyExitModel, hidden: torch.Tensor) -> float:
    q = hidden.shape[1]
    return PLANTED.head + (PLANTED.head_block if q > 1 else 0) + (q - 1) * PLANTED.head_token


def reading_cost(observer: Observer, *_: Any) -> float:
    names, top_k = observer.features.names, observer.features.top_k
    more = (PLANTED.features_entropy if "entropy" in names else 0.0, PLANTED.features_top_k)
    return PLANTED.features + more[0] + (more[1] if "confidence" in names and top_k > 1 else 0.0)


def planted_model(family: str = "llama") -> CostModel:
    return CostModel(N_LAYERS, tuple(tiny_model(family).windows), PLANTED)
