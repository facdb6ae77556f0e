"""Linear layers for the few rows of decoding on the CPU.

torch multiplies float32 matrices on the CPU by MKL, which at one to sixteen rows reaches half of the memory's speed, or
less where it does not know the processor. oneDNN, which torch ships as well, reaches more at two rows and up, and a
reduction that inductor compiles reaches all of it. The kernels differ from MKL's in rounding only; eager float64 is
computed as before.

The live model is never touched: `accelerated` makes a shallow copy of a module, with the same weights and a module
table of its own, in which such layers stand for the linear ones.
"""

from __future__ import annotations

import copy
import functools
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from lede.snapshot import own_forward

Module = TypeVar("Module", bound=nn.Module)

ROWS_UNROLLED = 8
"""Most rows that a compiled layer multiplies one by one, in one loop: it has registers for no more."""
UNROLLED = 4608
"""Most numbers in such rows: more don't stay in the processor's nearest cache, and a matrix product does better."""

_LIBRARY = torch.library.Library("lede", "FRAGMENT")
_LIBRARY.define("linear(Tensor rows, Tensor weight, Tensor? bias) -> Tensor")


def _by_onednn(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out


def _shape_only(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))


_LIBRARY.impl("linear", _by_onednn, "CPU")
torch.library.register_fake("lede::linear", _shape_only, lib=_LIBRARY)


@functools.cache
def onednn_works() -> bool:
    """Whether torch's oneDNN multiplies float32 matrices here, and right."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(3, 64, generator=generator), torch.randn(48, 64, generator=generator)
    try:
        found = _by_onednn(rows, weight, None)
    except (RuntimeError, AttributeError):  # a private operator: gone, or built out
        return False
    return torch.allclose(found, functional.linear(rows, weight), atol=1e-4)


def fast_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`rows` `(..., in)` times `weight` `(out, in)` transposed, plus `bias` `(out,)`: `(..., out)`.

    Args:
        rows: What is multiplied; not differentiated through.
        weight: As torch's `Linear` holds it.
        bias: None for none.
    """
    if weight.device.type != "cpu" or torch.is_grad_enabled() or rows.dtype != weight.dtype:
        return functional.linear(rows, weight, bias)
    width = weight.shape[1]
    if torch.compiler.is_compiling() and weight.is_contiguous():
        flat = rows.reshape(-1, width)
        if flat.shape[0] == 1 or (flat.shape[0] <= ROWS_UNROLLED and flat.shape[0] * width <= UNROLLED):
            # inductor makes one loop of them all, which reads the weights once, in order; it would compute what comes
            # before anew for every output, a norm for example, unless told to store it
            flat = torch.ops._inductor_test.realize(flat)
            out = torch.stack([(weight * flat[i]).sum(-1) for i in range(flat.shape[0])])
            out = out.reshape(*rows.shape[:-1], weight.shape[0])
            return out if bias is None else out + bias
    if weight.dtype == torch.float32 and type(weight) in (torch.Tensor, nn.Parameter) and not _autocast():
        product: torch.Tensor = torch.ops.lede.linear(rows, weight, bias)
        return product
    return functional.linear(rows, weight, bias)


def _autocast() -> bool:
    """Whether torch is to choose dtypes, which it does in its own operators alone."""
    return not torch.compiler.is_compiling() and torch.is_autocast_enabled("cpu")


class FastLinear(nn.Linear):
    """A `Linear` by the fastest kernel that torch has here."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(..., out)` of `(..., in)`."""
        return fast_linear(input, self.weight, self.bias)


class FastConv1D(Conv1D):
    """GPT-2's linear layer, which holds its weight transposed, likewise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., out)` of `(..., in)`."""
        return fast_linear(x, self.weight.t(), self.bias)


_FAST: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FastLinear, Conv1D: FastConv1D}


def accelerated(module: Module) -> Module:
    """A copy of a module with fast linear layers, or itself where there is nothing to gain.

    Weights are shared, also when they are later replaced or cast. Parts whose class is not of torch or transformers,
    and hooked ones, stay as they are: an adapter or a hook does what its owner made it do.
    """
    if not onednn_works() or _foreign(module):
        return module
    if type(module) in _FAST:
        if type(module.weight) is not nn.Parameter:  # a tensor of its own kind, quantised for example
            return module
        twin = _copy(module)
        object.__setattr__(twin, "__class__", _FAST[type(module)])
        return twin
    parts = {name: part if part is None else accelerated(part) for name, part in module._modules.items()}
    if all(parts[name] is part for name, part in module._modules.items()):
        return module
    twin = _copy(module)
    twin._modules = parts
    return twin


def _foreign(module: nn.Module) -> bool:
    """Whether somebody made a module do something of their own."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "_hf_hook" in vars(module)
    replaced = own_forward(module) is not None
    return bool(replaced or hooked or type(module).__module__.split(".")[0] not in ("torch", "transformers"))


def _copy(module: Module) -> Module:
    twin = copy.copy(module)
    vars(twin).pop("forward", None)  # bound to the module itself
    return twin
