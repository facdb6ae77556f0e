"""Running layers by kernels that were compiled ahead of time.

A call costs what the kernel costs: torch's compiler is not in this process, and nothing is checked from call to call.
What would have to be checked is looked at when a layer is first seen, and again at the start of each text. A kernel
that is loaded when decoding has begun, as for a layer with a gap, is tried at its first call: what eager layers say
counts then, and if it says otherwise it isn't used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lede.blocks import Block, attention_of
from lede.closeness import distance, reading_distance
from lede.kernel import Kernel, can_load, load_kernel
from lede.kernel_inputs import ALIKE, MASK, Arguments, Slots, tensors_in, told_inputs
from lede.kernel_source import Head, KernelSource, UnknownPartError
from lede.kernel_store import has_kernels, kernel_key, maker, makers_of, package_of, source_digest
from lede.logit_reading import LogitReading
from lede.open_slots import run_open

if TYPE_CHECKING:
    from lede.models import EarlyExitModel


@dataclass
class _Fitted:
    """A layer or head as kernels run it."""

    source: KernelSource | None
    """Where its weights are; None where it is of no use."""
    weights: list[torch.Tensor] = field(default_factory=list)
    """They, as they were at the start of the text."""
    kernels: dict[tuple[Any, ...], Kernel | None] = field(default_factory=dict)
    """Its kernels by what may change within a text: rows, mask, kind of slots; None where there is none."""


class Kernels:
    """The kernels that fit a model.

    Args:
        model: The model, on the CPU.
    """

    def __init__(self, model: EarlyExitModel) -> None:
        self.are_tried = False
        """Whether the kernels so far were tried, all together; ones that are loaded later are tried one by one."""
        self._config, self._dtype = model.config, model.dtype
        self._cache_argument = model.cache_argument
        self._made_for = (model.attention, torch.get_num_threads())
        self._fitted: WeakKeyDictionary[nn.Module, _Fitted] = WeakKeyDictionary()
        self._configs: dict[int, str] = {}
        self._loaded: dict[str, Kernel | None] = {}
        self._missed: set[str] = set()
        self._length = torch.empty(1, dtype=torch.uint8)
        self._head = Head(model.readout)
        self._reading = LogitReading()

    @property
    def n_loaded(self) -> int:
        """Kernels in memory."""
        return sum(kernel is not None and kernel.runner is not None for kernel in self._loaded.values())

    def misfits(self) -> str:
        """Why kernels that were compiled ahead for this model could not be used, in words; empty if there are none."""
        makers = makers_of(self._missed) if self._missed else []
        if not makers:
            return ""
        here = "another processor, or another version of lede" if maker() in makers else f"this is {maker()}"
        return f"they were made by {' and by '.join(makers)}; {here}"

    def renew(self) -> None:
        """Take the weights as they are now; called at the start of a text."""
        made_for = (attention_of(self._config), torch.get_num_threads())
        if made_for != self._made_for:
            self._made_for = made_for
            self._fitted = WeakKeyDictionary()
        self._configs.clear()
        for module, fitted in list(self._fitted.items()):
            if fitted.source is None:
                continue
            weights = fitted.source.tensors() if fitted.source.holds(self._configs) else None
            if weights is not None and fitted.source.fits(weights):
                fitted.weights = weights
            else:
                del self._fitted[module]
                for kernel in filter(None, fitted.kernels.values()):
                    kernel.is_tried = False  # if it is still found for what the layer is now

    def layer(
        self,
        layer: nn.Module,
        hidden: torch.Tensor,
        arguments: Arguments,
        block: Block,
        group: tuple[Any, ...],
        slots: Slots,
        start: int,
        first: int,
    ) -> tuple[torch.Tensor, bool] | None:
        """States `(1, token, width)` after a layer, and whether it extended the cache; None where there is no kernel.

        Args:
            layer: It.
            hidden: States before it, `(1, token, width)`.
            arguments: What it is given beside them.
            block: Where the tokens sit.
            group: Layers of one group are given the same arguments.
            slots: Its keys and values.
            start: Where the block's go.
            first: The first slot that is seen.
        """
        fitted = self._fitted.get(layer) or self._fit(layer)
        if fitted.source is None or hidden.dtype is not self._dtype or hidden.shape[0] != 1:
            return None
        # a prompt that was run under autocast leaves slots of another dtype, which the code would read past their end
        which = (hidden.shape[1], arguments[MASK] is not None, slots[0].dtype, slots[1].dtype, slots[0].shape[0])
        if which not in fitted.kernels:
            fitted.kernels[which] = self._load(fitted.source, hidden, arguments, slots)
        kernel = fitted.kernels[which]
        if kernel is None or kernel.runner is None or torch.is_grad_enabled():
            return None
        tables = block.kernel_tables.get(group)
        if tables is None:
            tables = block.kernel_tables[group] = [tensor.contiguous() for tensor in tensors_in(arguments)]
        places = (self._length.expand(start + ALIKE), self._length.expand(first + ALIKE))
        if kernel.is_tried:
            return kernel([hidden.contiguous(), *places, *slots, *tables, *fitted.weights]), kernel.note.extends
        copies = tuple(each.clone() for each in slots)
        states, extends = run_open(layer, hidden, arguments, self._cache_argument, *slots, start, first + 2)

        def apart() -> float:
            found = kernel([hidden.contiguous(), *places, *copies, *tables, *fitted.weights])
            if extends is not kernel.note.extends:
                return math.inf
            return max(map(distance, (found, *copies), (states, *slots)))

        if not states.isnan().any():  # or there is nothing to compare with
            kernel.try_out(apart, self._dtype)
        return states, extends

    def head(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits `(1, token, vocabulary)` of states `(1, token, width)`; None where there is no kernel."""
        fitted = self._fitted.get(self._head) or self._fit(self._head)
        if fitted.source is None or hidden.dtype is not self._dtype or hidden.shape[0] != 1:
            return None
        if torch.is_autocast_enabled("cpu"):  # layers are not run here then, see `CompiledLayers.takes`
            return None
        which = (hidden.shape[1],)
        if which not in fitted.kernels:
            fitted.kernels[which] = self._load(fitted.source, hidden, None, None)
        kernel = fitted.kernels[which]
        if kernel is None or kernel.runner is None or torch.is_grad_enabled():
            return None
        if kernel.is_tried:
            return kernel([hidden.contiguous(), *fitted.weights])
        logits: torch.Tensor = self._head(hidden)
        if not logits.isnan().any():
            inputs = [hidden.contiguous(), *fitted.weights]
            kernel.try_out(lambda: distance(kernel(inputs), logits), self._dtype)
        return logits

    def reading(self, logits: torch.Tensor) -> list[float] | None:
        """`LogitReading` of logits `(vocabulary,)`; None where there is no kernel."""
        row = reading_row(logits)
        fitted = self._fitted.get(self._reading) or self._fit(self._reading)
        which = (row.shape[0], row.dtype is torch.float64)
        if which not in fitted.kernels:
            assert fitted.source is not None
            fitted.kernels[which] = self._load(fitted.source, row, None, None)
        kernel = fitted.kernels[which]
        if kernel is None or kernel.runner is None or torch.is_grad_enabled():
            return None
        if kernel.is_tried:
            numbers: list[float] = kernel([row.contiguous()]).tolist()
            return numbers
        wanted: torch.Tensor = self._reading(row)
        if not wanted.isnan().any():
            kernel.try_out(lambda: reading_distance(kernel([row.contiguous()]), wanted), row.dtype)
        return wanted.tolist()

    def _fit(self, module: nn.Module) -> _Fitted:
        try:
            source = KernelSource(module, self._configs)
            fitted = _Fitted(source, source.tensors()) if source.is_plain else _Fitted(None)
        except UnknownPartError:
            fitted = _Fitted(None)
        self._fitted[module] = fitted
        return fitted

    def _load(
        self, source: KernelSource, hidden: torch.Tensor, arguments: Arguments | None, slots: Slots | None
    ) -> Kernel | None:
        key = kernel_name(source, hidden, arguments, slots)
        if key not in self._loaded:
            self._loaded[key] = load_kernel(key, is_tried=not self.are_tried)
            if not package_of(key).exists():  # or it is damaged, and nobody else's
                self._missed.add(source_digest(source.text, told_inputs(hidden, arguments, slots)))
        return self._loaded[key]


def kernel_name(source: KernelSource, hidden: torch.Tensor, arguments: Arguments | None, slots: Slots | None) -> str:
    """The name of the kernel for a layer (or head: no arguments, no slots) and such inputs."""
    return kernel_key(source.text, told_inputs(hidden, arguments, slots))


def reading_row(logits: torch.Tensor) -> torch.Tensor:
    """Logits as they are read: at least float32."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def reading_of(model: EarlyExitModel) -> Callable[[torch.Tensor], list[float] | None] | None:
    """What reads rows of logits by a kernel; None where the model has none."""
    kernels = None if model.compiled is None else model.compiled.kernels
    return None if kernels is None else kernels.reading


def kernels_of(model: EarlyExitModel) -> Kernels | None:
    """The kernels for a model; None where there can be none: not on the CPU, without torch's loader or a folder."""
    if model.device.type != "cpu" or model.places is not None or not can_load() or not has_kernels():
        return None
    return Kernels(model)
