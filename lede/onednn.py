"""torch's oneDNN: products of few float32 rows on the CPU, by weights as they are or packed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BATCH_HINT = 8
"""Rows that a packed weight is laid out for. From 4 up all layouts are alike; that for 1 is the plain one."""


def _operator(name: str) -> Any:
    """A private operator of torch; None where it is gone or built out."""
    packet = getattr(torch.ops.mkldnn, name, None)
    return getattr(packet, "default", None)


_PRODUCT = _operator("_linear_pointwise")
_REORDER = _operator("_reorder_linear_weight")


def onednn_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`rows` `(..., in)` times `weight` `(out, in)` transposed, plus `bias` `(out,)`: `(..., out)`; all float32.

    Args:
        rows: On the CPU.
        weight: As torch's `Linear` holds it, or what `packed` made of it.
        bias: None for none.
    """
    out: torch.Tensor = _PRODUCT(rows, weight, bias, "none", [], "")
    return out


def is_packable(weight: torch.Tensor) -> bool:
    """Whether a weight is one that `packed` takes: plain float32 numbers on the CPU."""
    plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.layout == torch.strided
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0


@torch.no_grad()
def packed(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight `(out, in)` in the blocks that oneDNN reads in order, opaque to all but `onednn_linear`."""
    out: torch.Tensor = _REORDER(weight.detach().contiguous(), BATCH_HINT)
    return out


@functools.cache
def onednn_works() -> bool:
    """Whether torch's oneDNN multiplies float32 matrices here, and right."""
    return _agrees(lambda weight: weight)


@functools.cache
def packing_works() -> bool:
    """Whether it does with packed weights too."""
    return onednn_works() and _agrees(packed)


def _agrees(prepare: Any) -> bool:
    """Whether products by prepared weights are those that torch computes otherwise."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(48, 65, generator=generator), torch.randn(48, generator=generator)
    for n_rows in (1, 3, 17):
        rows = torch.randn(1, n_rows, 65, generator=generator)
        try:
            with torch.no_grad():
                found = onednn_linear(rows, prepare(weight), bias)
        except (RuntimeError, AttributeError, TypeError):  # private operators: gone, built out or changed
            return False
        if not torch.allclose(found, functional.linear(rows, weight, bias), atol=1e-4):
            return False
    return True
