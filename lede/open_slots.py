"""A layer run on its own keys and values, sizes left open: so it is compiled, and so a kernel of it is tried."""

from __future__ import annotations

import torch
from torch import nn

from lede.kernel_inputs import Arguments


class OpenSlots:
    """The cache of one layer as its attention sees it while being compiled, sizes left open."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, start: int, first_plus_2: int) -> None:
        self.keys, self.values, self.start, self.first_plus_2 = keys, values, start, first_plus_2
        self.extended = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `KVCache.update` does for aligned rows."""
        end = self.start + key_states.shape[2]
        self.keys[:, :, self.start : end] = key_states
        self.values[:, :, self.start : end] = value_states
        self.extended = True
        first = self.first_plus_2 - 2
        return self.keys[:, :, first:end], self.values[:, :, first:end]


def run_open(
    layer: nn.Module,
    hidden: torch.Tensor,
    arguments: Arguments,
    cache_argument: str,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    first_plus_2: int,
) -> tuple[torch.Tensor, bool]:
    """States after a layer, and whether it extended the cache."""
    slots = OpenSlots(keys, values, start, first_plus_2)
    out = layer(hidden, **arguments, **{cache_argument: slots})
    return (out[0] if isinstance(out, tuple) else out), slots.extended
