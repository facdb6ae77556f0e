"""Decoder layers compiled one by one, for the few rows of decoding.

A layer is compiled once for one row and once for several, and all layers alike share the result, so any span can be run
and compiling takes seconds, not minutes. Keys and values go to the same preallocated buffers as in eager runs.

Blocks are padded to a few numbers of rows, each with kernels of its own. On a GPU each call replays a recorded CUDA
graph, for which addresses and shapes must stand still, so attention looks at a bucket of slots through a mask. What the
padding writes lies behind the block and is overwritten before anyone looks there.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from lede.blocks import MAX_ROWS, Block, Tables, standing_still
from lede.ends import Readout
from lede.kernel_inputs import Arguments
from lede.kernels import Kernels
from lede.open_slots import run_open
from lede.slot_pool import SlotPool

ROW_BUCKETS = (1, 2, 4, 6, 8, 12, MAX_ROWS)
"""Rows of a block, padding included."""
GPU_ROW_BUCKETS = (1, 8, MAX_ROWS)
"""The same on a GPU, which reads the weights in the same time for all of them; each takes seconds to compile."""
SLOT_BUCKET = 256
"""On a GPU attention looks at a multiple of so many slots."""
VARIANTS = 64
"""Variants of a layer that torch may keep for each number of rows: kinds of layers, with and without sublayers."""


class _FixedSlots:
    """The cache of one layer, addresses and shapes standing still: where to write is a tensor, what to see a bucket."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, extent: int) -> None:
        self.keys, self.values, self.slots, self.extent = keys, values, slots, extent
        self.extended = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `KVCache.update` does for aligned rows, but that a mask hides what is not to be seen."""
        self.keys.index_copy_(2, self.slots, key_states)
        self.values.index_copy_(2, self.slots, value_states)
        self.extended = True
        return self.keys[:, :, : self.extent], self.values[:, :, : self.extent]


def _run_fixed(
    layer: nn.Module,
    hidden: torch.Tensor,
    arguments: Arguments,
    cache_argument: str,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    extent: int,
) -> tuple[torch.Tensor, bool]:
    """As `run_open`, for a padded block."""
    slots = _FixedSlots(keys, values, places, extent)
    out = layer(hidden, **arguments, **{cache_argument: slots})
    return (out[0] if isinstance(out, tuple) else out), slots.extended


class CompiledLayers:
    """Runs layers of one model compiled.

    Args:
        tables: What the layers are given.
        cache_argument: What the layers call their cache.
        read: From states to logits.
        fixed: Whether shapes stand still, for CUDA graphs.
        kernels: Kernels that were compiled ahead of time; None for none. What they don't run is compiled now.
    """

    def __init__(
        self, tables: Tables, cache_argument: str, read: Readout, fixed: bool, kernels: Kernels | None = None
    ) -> None:
        self.fixed = fixed
        self.kernels = kernels
        self._tables = tables
        self._cache_argument = cache_argument
        self._twins: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
        self._graphs = fixed and torch.cuda.is_available()
        self._readout = read
        self.buckets = GPU_ROW_BUCKETS if fixed else ROW_BUCKETS
        self.making = (MAX_ROWS, SLOT_BUCKET, SlotPool()) if fixed else (MAX_ROWS, 1, None)
        """How caches are made: spare slots, the multiple that slots come in, and where buffers come from."""

    @functools.cached_property
    def _layer(self) -> dict[int, Any]:
        """Runs a layer, by rows; made when it is first needed, for the compiler is slow to import."""
        import torch._inductor.test_operators  # registers the operator by which inductor is told to store a value

        # torch tells layers apart by what they are made of; its default of 8 variants is for smaller programs
        torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
        mode = "reduce-overhead" if self._graphs else None
        run: Any = _run_fixed if self.fixed else run_open
        return {rows: torch.compile(_own(run), dynamic=True, mode=mode) for rows in self.buckets}

    @functools.cached_property
    def _head(self) -> dict[int, Any]:
        """The same for heads."""
        import torch._inductor.test_operators

        return {rows: torch.compile(_own(_read), dynamic=True) for rows in self.buckets}

    def renew(self) -> None:
        """Notice weights that were replaced; called at the start of a text."""
        if self.kernels is not None:
            self.kernels.renew()

    def takes(self, block: Block, n_tokens: int) -> bool:
        """Whether a block of so many tokens can be run: a short one behind a prompt, all rows aligned."""
        if block.place is not None or not block.start or n_tokens > MAX_ROWS:
            return False
        if torch.is_autocast_enabled(block.positions.device.type):
            return False
        return block.start + self._bucket(n_tokens) <= block.cache.n_slots

    def run(self, hidden: torch.Tensor, steps: Iterable[tuple[int, nn.Module]], block: Block) -> torch.Tensor:
        """States `(1, token, width)` after layers of states before them; each layer comes with its place."""
        cache, start, n_tokens = block.cache, block.start, hidden.shape[1]
        assert start is not None
        end = start + n_tokens
        if end > cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} tokens, {end} were needed")
        rows = self._bucket(n_tokens)
        if self.fixed or rows > n_tokens:
            block, hidden = self._padded(block, hidden, rows)
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()
        for i, layer in steps:
            arguments = self._tables.arguments(block, i, hidden)
            keys, values = cache.keys[i], cache.values[i]
            assert keys is not None, f"layer {i} has not seen the prompt"
            assert values is not None
            first, found = cache.first_slot(i, start), None
            if self.kernels is not None:
                group = self._tables.group(i)
                found = self.kernels.layer(layer, hidden, arguments, block, group, (keys, values), start, first)
            if found is None:
                # torch compiles anew for a 0 and a 1, which a window would pass in the midst of a text
                where: tuple[Any, ...] = (start, first + 2)
                if self.fixed:
                    where = (block.positions[0], block.extent)
                    for buffer in (keys, values):
                        if self._graphs and not hasattr(buffer, "_dynamo_static_input_type"):
                            torch._dynamo.mark_static_address(buffer)
                twin = self._twin(layer)
                found = self._layer[rows](twin, hidden, arguments, self._cache_argument, keys, values, *where)
            hidden, extended = found
            if extended:
                assert cache.lengths[i] == start, f"layer {i} holds {cache.lengths[i]}, not {start}"
                cache.lengths[i] = end
        if rows > n_tokens:
            hidden = hidden[:, :n_tokens]
        return hidden.clone() if self._graphs else hidden  # the next replay writes where this one did

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `(1, token, vocabulary)` of states `(1, token, width)`."""
        n_tokens = hidden.shape[1]
        rows = self._bucket(n_tokens)
        hidden = _pad(hidden, rows)
        logits: torch.Tensor | None = None if self.kernels is None else self.kernels.head(hidden)
        if logits is None:
            logits = self._head[rows](self._readout, hidden)
        return logits if rows == n_tokens else logits[:, :n_tokens]

    def _twin(self, layer: nn.Module) -> nn.Module:
        twin = self._twins.get(layer)
        if twin is None:
            twin = self._twins[layer] = _unnumbered(layer)
        return twin

    def _padded(self, block: Block, hidden: torch.Tensor, rows: int) -> tuple[Block, torch.Tensor]:
        """A block and its states with so many rows."""
        assert block.start is not None
        if block.padded is None or block.padded.positions.shape[1] != rows:
            end = block.start + rows
            positions = self._tables.padding_positions(block.start, end, block.positions.device)
            extent = min(-(-end // SLOT_BUCKET) * SLOT_BUCKET, block.cache.n_slots) if self.fixed else None
            block.padded = Block(positions, block.cache, block.start, None, extent=extent)
        hidden = _pad(hidden, rows)
        return block.padded, standing_still(hidden) if self.fixed else hidden

    def _bucket(self, n_tokens: int) -> int:
        """Rows that a block of so many tokens is padded to."""
        return next(rows for rows in self.buckets if rows >= n_tokens)


def _pad(hidden: torch.Tensor, rows: int) -> torch.Tensor:
    padding = rows - hidden.shape[1]
    return functional.pad(hidden, (0, 0, 0, padding)) if padding else hidden


def _read(readout: Readout, hidden: torch.Tensor) -> torch.Tensor:
    return readout(hidden)


def _own(function: Any) -> FunctionType:
    """The same function with code of its own: torch keeps what it compiled, and its limits, by code."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _unnumbered(module: nn.Module) -> nn.Module:
    """A copy in which every part is layer 0.

    The number only tells a cache where to write, and torch would compile each layer for its own.
    """
    parts = {name: part if part is None else _unnumbered(part) for name, part in module._modules.items()}
    numbered = isinstance(vars(module).get("layer_idx"), int)
    if not numbered and all(parts[name] is part for name, part in module._modules.items()):
        return module
    twin = copy.copy(module)
    twin._modules = parts
    if numbered:
        vars(twin)["layer_idx"] = 0
    return twin
