"""Weights packed for products of few rows: a second copy in memory, in the order in which the kernel reads it.

oneDNN multiplies two to some thirty rows by packed weights in little more time than one row, in float32 twice as fast
as by plain ones, in bfloat16 by a third faster. The copy costs as much memory as the weights it is of, so it is made on
request alone (`EarlyExitModel.pack_weights`).

The weights themselves stay the truth. At the start of each text every copy is compared with its weight: whether it is
the same object, at the same address, of the same version, with the same numbers at some places, which tells of changes
that pass by torch's count of versions, as those through `.data` do. What differs is packed anew; what can't be packed
any more, cast to another dtype or moved to a device, is computed as if it had never been.
"""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from lede.fast_linear import FAST_CLASSES
from lede.onednn import PACKABLE, is_packable, onednn_linear, packed, packing_works

if TYPE_CHECKING:
    from lede.models import EarlyExitModel

SAMPLE = 64
"""Numbers of each weight that are compared."""

_NUMBERS = itertools.count()
_PACKED: WeakValueDictionary[int, PackedWeight] = WeakValueDictionary()
"""All packed weights by their number, for compiled layers, which can be given tensors alone."""

_LIBRARY = torch.library.Library("lede", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor rows, Tensor number, Tensor weight, Tensor? bias) -> Tensor")


class PackedWeight:
    """The packed copy of one weight.

    Args:
        weight: `(out, in)`, or transposed as GPT-2's linear layer holds it.
        transposed: Whether it is.
    """

    def __init__(self, weight: torch.Tensor, transposed: bool) -> None:
        number = next(_NUMBERS)
        self.number = torch.tensor(number)
        """What compiled layers know it by."""
        self.copy: torch.Tensor | None = None
        """None where the weight can't be packed now."""
        self._transposed = transposed
        self._weight: torch.Tensor | None = None
        self._state: tuple[Any, ...] = ()
        self._sample = torch.empty(0)
        _PACKED[number] = self
        self.renew(weight)

    def renew(self, weight: torch.Tensor) -> bool:
        """Pack the weight anew if it is another one or has changed; returns whether it was."""
        if not is_packable(weight):
            changed = self._weight is not None
            self.copy = self._weight = None
            return changed
        state = (weight.data_ptr(), weight.shape, weight.stride(), -1 if weight.is_inference() else weight._version)
        sample = torch.take(weight.detach(), _places(weight.numel())).view(torch.uint8)  # bits: a NaN equals itself
        if self._weight is weight and self._state == state and torch.equal(self._sample, sample):
            return False
        self._weight, self._state, self._sample = weight, state, sample
        self.copy = packed(weight.t() if self._transposed else weight)
        return True


class PackedWeights:
    """The packed weights of a model's linear layers.

    Args:
        roots: Modules of one's own, not of the live model, within which fast linear layers are given packed weights.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        started = time.perf_counter()
        modules = dict.fromkeys(m for root in roots for m in root.modules() if isinstance(m, FAST_CLASSES))
        self._parts = [(module, PackedWeight(module.weight, isinstance(module, Conv1D))) for module in modules]
        for module, weight in self._parts:
            vars(module).update(packed=weight, packed_number=weight.number)
        self.seconds = time.perf_counter() - started
        """Seconds that packing took."""

    @property
    def n_packed(self) -> int:
        """Weights that are packed now."""
        return sum(weight.copy is not None for _, weight in self._parts)

    @property
    def n_bytes(self) -> int:
        """Bytes of the copies; a layout's padding is not counted."""
        copies = (weight.copy for _, weight in self._parts)
        return sum(copy.numel() * copy.element_size() for copy in copies if copy is not None)

    def renew(self) -> int:
        """Pack anew what changed; returns how many weights did."""
        return sum(weight.renew(module.weight) for module, weight in self._parts)

    def drop(self) -> None:
        """Let the layers read plain weights again."""
        for module, _ in self._parts:
            vars(module).update(packed=None, packed_number=None)


def pack_weights(model: EarlyExitModel) -> bool:
    """Pack the weights of a model's linear layers and head; compiled layers are compiled again.

    Where it can't be done the model runs as before, and a warning says why.

    Returns:
        Whether weights are packed.
    """
    if model.packed is not None:
        model.packed.drop()
        model.packed = None
    reason, found = "", None
    if model.device.type != "cpu":
        reason = f"the model is on {model.device}, and packing is for the CPU"
    elif model.dtype not in PACKABLE:
        reason = f"they are {_name(model.dtype)}, and packing is for {' and '.join(map(_name, PACKABLE))}"
    elif not packing_works(model.dtype):
        reason = f"this machine's torch has no oneDNN that multiplies by packed {_name(model.dtype)} weights"
    else:
        found = PackedWeights((*(layer for _, layer in model.steps), model.readout.head))
        if not found.n_packed:
            reason = "the model has no linear layer of torch's or transformers' own"
    if reason or found is None:
        warnings.warn(f"the weights could not be packed and are read as they are: {reason}", stacklevel=3)
        return False
    model.packed = found
    if model.compiled is not None:
        model.compile()
    return True


def _product(rows: torch.Tensor, number: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    entry = _PACKED.get(int(number))
    if entry is None or entry.copy is None:  # not packed any more
        return functional.linear(rows, weight, bias)
    return onednn_linear(rows, entry.copy, bias)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape_only(
    rows: torch.Tensor, number: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))


_LIBRARY.impl("packed_linear", _product, "CPU")
torch.library.register_fake("lede::packed_linear", _shape_only, lib=_LIBRARY)


@functools.cache
def _places(n_numbers: int) -> torch.Tensor:
    """Where a weight of so many numbers is looked at: all over it."""
    return torch.linspace(0, n_numbers - 1, min(SAMPLE, n_numbers), dtype=torch.float64).long()
