"""What kernels are given beside weights, taken apart into tensors, and told by its shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

ALIKE = 2
"""What is added to numbers that code leaves open: torch makes code of its own for 0 and for 1."""
MASK = "attention_mask"
"""The argument whose last size, the slots that attention sees, is left open."""

Arguments = dict[str, Any]
Slots = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that a layer's arguments hold, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The same arguments with other tensors."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {name: with_tensors(part, tensors) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(with_tensors(part, tensors) for part in value)
    return value


def told_inputs(hidden: torch.Tensor, arguments: Arguments | None, slots: Slots | None) -> str:
    """What a kernel is given in words: states, a layer's other arguments, and its keys and values."""
    told = [f"states {_shape(hidden)}"]
    if arguments is not None and slots is not None:
        told += [f"{name} {_told(value, name == MASK)}" for name, value in arguments.items()]
        told += [f"slots {tuple(each.shape[:2])}, {each.shape[3]}, {each.dtype}" for each in slots]
    return "; ".join(told)


def _told(value: Any, is_mask: bool) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape[:3])}, open, {value.dtype}" if is_mask else _shape(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {_told(part, False)}' for name, part in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(_told(part, False) for part in value)})"
    return repr(value)


def _shape(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}, {tensor.dtype}"
