"""Where a model's modules run: on the device of their weights, or where accelerate's hooks take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lede.families import UnsupportedModelError


def numbers_on(device: torch.device, rows: Sequence[Any]) -> torch.Tensor:
    """Whole numbers `(...)` of nested lists, int64, on a device; a GPU is not waited for, as a plain copy would.

    A single number, such as the newest token, is written there by a kernel; others go through page-locked memory.
    """
    if device.type != "cuda":
        return torch.tensor(rows, dtype=torch.long, device=device)
    host = torch.tensor(rows, dtype=torch.long)
    if host.numel() == 1:
        return torch.full(host.shape, int(host), dtype=torch.long, device=device)
    return sent(host, device)


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on a device; a GPU is not waited for, which takes page-locked memory."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def home_of(module: nn.Module) -> torch.device:
    """The device that a module runs on, its weights being there or brought there."""
    hook = getattr(module, "_hf_hook", None)
    return _execution_device(hook) or next(module.parameters()).device


def places_of(layers: Sequence[nn.Module]) -> list[torch.device] | None:
    """The device of each layer; None where no hook moves anything, and layers run where their input is.

    Raises:
        UnsupportedModelError: A layer has no weights and no hook that brings them.
    """
    for i, layer in enumerate(layers):
        absent = any(parameter.device.type == "meta" for parameter in layer.parameters())
        if absent and not any(hasattr(module, "_hf_hook") for module in layer.modules()):
            raise UnsupportedModelError(
                f"layer {i + 1} has no weights (device 'meta') and no accelerate hook that brings them; load the model "
                "with device_map, or onto one device"
            )
    if not any(hasattr(layer, "_hf_hook") for layer in layers):
        return None
    return [home_of(layer) for layer in layers]


def _execution_device(hook: Any) -> torch.device | None:
    for one in getattr(hook, "hooks", (hook,)):  # several may be chained
        device = getattr(one, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return None
