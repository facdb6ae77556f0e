"""Linear layers for the few rows of decoding on the CPU.

torch multiplies float32 matrices on the CPU by MKL, which at one to sixteen rows reaches half of the memory's speed, or
less where it does not know the processor. oneDNN, which torch ships as well, reaches more; so does MKL for two to four
rows, if the weights are multiplied by the rows and not the rows by the weights; and a reduction that inductor compiles
reaches all of it. oneDNN reaches all of it too by weights that are packed, see `lede.packed_weights`. The kernels
differ in rounding only; eager float64 is computed as before.

The live model is never touched: `accelerated` makes a shallow copy of a module, with the same weights and a module
table of its own, in which such layers stand for the linear ones.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from lede.onednn import PACKABLE, onednn_linear, onednn_works
from lede.snapshot import own_forward

if TYPE_CHECKING:
    from lede.packed_weights import PackedWeight

Module = TypeVar("Module", bound=nn.Module)

ROWS_UNROLLED = 8
"""Most rows that a compiled layer multiplies one by one, in one loop: it has registers for no more."""
ROWS_UNROLLED_PACKED = 2
"""The same where the weight is packed and has more than `SMALL` numbers."""
SMALL = 2**18
"""Numbers of a weight up to which calling a kernel for packed ones costs more than it saves."""
UNROLLED = 4608
"""Most numbers in such rows: more don't stay in the processor's nearest cache, and a matrix product does better."""
COLUMNS = (2, 4)
"""Numbers of columns that MKL multiplies by a float32 matrix at nearly the memory's speed."""
IN_COLUMNS = 4096
"""Most numbers in such columns; with more it is slow again."""

_LIBRARY = torch.library.Library("lede", "FRAGMENT")
_LIBRARY.define("linear(Tensor rows, Tensor weight, Tensor? bias) -> Tensor")


def _product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product by the fastest kernel for so many rows; all float32, on the CPU."""
    flat = rows.reshape(-1, weight.shape[1])
    n_rows = flat.shape[0]
    n_columns = next((n for n in COLUMNS if n >= n_rows > 1), 0)
    if 0 < n_columns * weight.shape[1] <= IN_COLUMNS and torch.backends.mkl.is_available():
        columns = functional.pad(flat, (0, 0, 0, n_columns - n_rows)).t()
        out = torch.mm(weight, columns) if bias is None else torch.addmm(bias[:, None], weight, columns)
        return out.t()[:n_rows].reshape(*rows.shape[:-1], weight.shape[0]).contiguous()
    return onednn_linear(rows, weight, bias)


def _shape_only(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))


_LIBRARY.impl("linear", _product, "CPU")
torch.library.register_fake("lede::linear", _shape_only, lib=_LIBRARY)


def fast_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    packed: PackedWeight | None = None,
    packed_number: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rows` `(..., in)` times `weight` `(out, in)` transposed, plus `bias` `(out,)`: `(..., out)`.

    Args:
        rows: What is multiplied; not differentiated through.
        weight: As torch's `Linear` holds it.
        bias: None for none.
        packed: The weight packed, for eager runs; None where it isn't.
        packed_number: Its number, for compiled ones.
    """
    if weight.device.type != "cpu" or torch.is_grad_enabled() or rows.dtype != weight.dtype:
        return functional.linear(rows, weight, bias)
    compiling = torch.compiler.is_compiling()
    if compiling and weight.is_contiguous():
        width = weight.shape[1]
        flat = rows.reshape(-1, width)
        packs = packed_number is not None and weight.dtype in PACKABLE and weight.numel() > SMALL
        unrolled = ROWS_UNROLLED_PACKED if packs else ROWS_UNROLLED
        if flat.shape[0] <= unrolled and (flat.shape[0] == 1 or flat.shape[0] * width <= UNROLLED):
            # inductor makes one loop of them all, which reads the weights once, in order; it would compute what comes
            # before anew for every output, a norm for example, unless told to store it
            flat = torch.ops._inductor_test.realize(flat)
            out = torch.stack([(weight * flat[i]).sum(-1) for i in range(flat.shape[0])])
            out = out.reshape(*rows.shape[:-1], weight.shape[0])
            return out if bias is None else out + bias
    product: torch.Tensor
    if weight.dtype not in PACKABLE or not _is_plain(weight) or _autocast():
        product = functional.linear(rows, weight, bias)
    elif compiling and packed_number is not None:
        product = torch.ops.lede.packed_linear(rows, packed_number, weight, bias)
    elif not compiling and packed is not None and packed.copy is not None:
        product = onednn_linear(rows, packed.copy, bias)
    elif weight.dtype != torch.float32:
        product = functional.linear(rows, weight, bias)
    elif compiling:
        product = torch.ops.lede.linear(rows, weight, bias)
    else:
        product = _product(rows, weight, bias)
    return product


def _is_plain(weight: torch.Tensor) -> bool:
    """Whether it is no tensor of its own kind, quantised for example; torch's export shows a stand-in."""
    return torch.compiler.is_exporting() or type(weight) in (torch.Tensor, nn.Parameter)


def _autocast() -> bool:
    """Whether torch is to choose dtypes, which it does in its own operators alone."""
    return not torch.compiler.is_compiling() and torch.is_autocast_enabled("cpu")


class FastLinear(nn.Linear):
    """A `Linear` by the fastest kernel that torch has here."""

    packed: PackedWeight | None = None
    packed_number: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(..., out)` of `(..., in)`."""
        return fast_linear(input, self.weight, self.bias, self.packed, self.packed_number)


class FastConv1D(Conv1D):
    """GPT-2's linear layer, which holds its weight transposed, likewise."""

    packed: PackedWeight | None = None
    packed_number: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., out)` of `(..., in)`."""
        return fast_linear(x, self.weight.t(), self.bias, self.packed, self.packed_number)


_FAST: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FastLinear, Conv1D: FastConv1D}
FAST_CLASSES = (FastLinear, FastConv1D)


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
