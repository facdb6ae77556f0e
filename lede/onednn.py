"""torch's oneDNN: products of few rows on the CPU, by weights as they are or packed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

PACKABLE = (torch.float32, torch.bfloat16)
"""Dtypes of weights that can be packed, where the processor has them."""
BATCH_HINT = 8
"""Rows that a packed weight is laid out for. From 4 up all layouts are alike; that for 1 is the plain one."""


def _operator(name: str) -> Any:
    """A private operator of torch; None where it is gone or built out."""
    packet = getattr(torch.ops.mkldnn, name, None)
    return getattr(packet, "default", None)


_PRODUCT = _operator("_linear_pointwise")
_REORDER = _operator("_reorder_linear_weight")


def onednn_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`rows` `(..., in)` times `weight` `(out, in)` transposed, plus `bias` `(out,)`: `(..., out)`; all of one dtype.

    Args:
        rows: On the CPU.
        weight: As torch's `Linear` holds it, or what `packed` made of it.
        bias: None for none.
    """
    out: torch.Tensor = _PRODUCT(rows, weight, bias, "none", [], "")
    return out


def is_packable(weight: torch.Tensor) -> bool:
    """Whether a weight is one that `packed` takes here: plain numbers on the CPU, of a dtype that works."""
    plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.layout == torch.strided
    return plain and weight.device.type == "cpu" and weight.numel() > 0 and packing_works(weight.dtype)


@torch.no_grad()
def packed(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight `(out, in)` in the blocks that oneDNN reads in order, opaque to all but `onednn_linear`."""
    out: torch.Tensor = _REORDER(weight.detach().contiguous(), BATCH_HINT)
    return out


@functools.cache
def onednn_works() -> bool:
    """Whether torch's oneDNN multiplies float32 matrices here, and right."""
    return _agrees(lambda weight: weight, torch.float32)


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether it does with packed weights of a dtype too; bfloat16 is not for every processor."""
    return dtype in PACKABLE and onednn_works() and _agrees(packed, dtype)


def _agrees(prepare: Any, dtype: torch.dtype) -> bool:
    """Whether products by prepared weights are those that torch computes otherwise."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and not getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((48, 65), (48,)))
    atol = 1e-4 if dtype == torch.float32 else 0.25  # of sums of 65 products, about 8 in size
    for n_rows in (1, 3, 17):
        rows = torch.randn(1, n_rows, 65, generator=generator).to(dtype)
        try:
            with torch.no_grad():
                found = onednn_linear(rows, prepare(weight), bias)
        except (RuntimeError, AttributeError, TypeError):  # private operators: gone, built out or changed
            return False
        if not torch.allclose(found, functional.linear(rows, weight, bias), atol=atol):
            return False
    return True
