"""Layers without numbers, for another process to compile: a model's weights are not sent there."""

from __future__ import annotations

import copy

import torch
from torch import nn

from lede.kernel_source import NUMBER


def skeleton(module: nn.Module) -> nn.Module:
    """A copy with the same parts and settings, whose weights have no numbers."""
    twin = copy.copy(module)
    own = vars(twin)
    own.pop("forward", None)  # of the class, but bound to the module itself
    twin._modules = {name: part if part is None else skeleton(part) for name, part in module._modules.items()}
    twin._parameters = {
        name: tensor if tensor is None else nn.Parameter(numberless(tensor), requires_grad=False)
        for name, tensor in module._parameters.items()
    }
    twin._buffers = {name: tensor if tensor is None else numberless(tensor) for name, tensor in module._buffers.items()}
    own.pop("packed", None)
    if own.get("packed_number") is not None:
        own["packed_number"] = numberless(own["packed_number"])
    if isinstance(own.get(NUMBER), int):
        own[NUMBER] = 0
    return twin


def numberless(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that looks the same and has no numbers."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
