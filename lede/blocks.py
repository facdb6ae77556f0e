"""Blocks of tokens on their way through the layers: where they sit, and the tables that attention needs for that.

Rotary tables and masks are made once for all positions and sliced for a block, which costs next to nothing a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import nn

from lede.cache import KVCache, Place
from lede.families import UnsupportedModelError

MAX_ROWS = 17
"""Longest block of drafting and verification, for which tables and kernels are made before; longer ones are prompts."""
AHEAD = 512
"""Slots behind a block's first that such a mask covers."""
ALIGNED = 8
"""A GPU's attention takes masks that begin at a multiple of so many numbers: of 16 bytes, in half precision."""
STEP = 1024
"""Positions by which what is made before grows."""

_Device = torch.device | None


@dataclass
class Block:
    """Where a block of tokens sits: its positions, rotary tables and masks, shared by every span it goes through."""

    positions: torch.Tensor
    """Positions of the tokens, `(1 or row, token)`."""
    cache: KVCache
    """The cache that the layers read and extend."""
    start: int | None
    """Position of the first token when all rows are aligned; None for ragged rows."""
    place: Place | None
    """Which rows of the cache take part, and where their tokens go; None for all rows, aligned."""
    rotary: dict[tuple[str, _Device], Any] = field(default_factory=dict)
    """Rotary tables by layer type, and by device where the layers are spread."""
    masks: dict[tuple[int | None, _Device], torch.Tensor | None] = field(default_factory=dict)
    """Attention masks by sliding window, and by device where the layers are spread."""
    moved: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    """The positions by device, where the layers are spread."""
    extent: int | None = None
    """Slots that attention looks at through a mask, of an aligned block; None for those up to its end."""
    padded: Block | None = None
    """The same with more tokens, where shapes must stand still."""
    kernel_tables: dict[tuple[Any, ...], list[torch.Tensor]] = field(default_factory=dict)
    """Tables and masks as kernels compiled ahead take them, by group of layers."""


class Tables:
    """Positions, rotary tables and masks of blocks, for each layer of one model.

    Args:
        config: The model's, which says what attention runs; asked each time, for it can be switched.
        rotary: The rotary embedding of the stack, or None.
        rotary_types: What it is told of each layer; empty for nothing.
        windows: Sliding window of each layer, or None.
        places: Device of each layer, or None where they run where their input is.
        max_positions: Positions that the model has; the rotary embeddings of some are tables of that length.
    """

    def __init__(
        self,
        config: Any,
        rotary: nn.Module | None,
        rotary_types: Sequence[str],
        windows: Sequence[int | None],
        places: Sequence[torch.device] | None,
        max_positions: int,
    ) -> None:
        self._config = config
        self._rotary = rotary
        self._rotary_types = rotary_types
        self._windows = windows
        self._places = places
        self._max_positions = max_positions
        self._whole_rotary: dict[tuple[str, torch.dtype, torch.device], Any] = {}
        self._rotary_buffers: list[torch.Tensor] = []
        self._whole_masks: dict[tuple[int | None, torch.dtype, torch.device, str, int], torch.Tensor] = {}

    def arguments(self, block: Block, layer: int, hidden: torch.Tensor) -> dict[str, Any]:
        """What the forward of a layer is given beside states `(row, token, width)` and the cache."""
        arguments: dict[str, Any] = {
            "attention_mask": self._mask(block, layer, hidden),
            "position_ids": block.positions if self._places is None else self._positions(block, self._places[layer]),
            "use_cache": True,
        }
        if self._rotary is not None:
            arguments["position_embeddings"] = self._rotary_table(block, layer, hidden)
        return arguments

    def group(self, layer: int) -> tuple[int | None, str]:
        """Layers of one group are given the same arguments, where all are on one device."""
        return self._windows[layer], self._rotary_types[layer]

    def padding_positions(self, start: int, end: int, device: torch.device) -> torch.Tensor:
        """Positions `start`..`end` of a padded block, `(1, token)`; padding stays within those that the model has."""
        positions = torch.arange(start, end, device=device)[None]
        return positions.clamp_(max=self._max_positions - 1) if end > self._max_positions else positions

    def _positions(self, block: Block, device: torch.device) -> torch.Tensor:
        if device not in block.moved:
            block.moved[device] = block.positions.to(device)
        return block.moved[device]

    def _rotary_table(self, block: Block, layer: int, hidden: torch.Tensor) -> Any:
        kind, device = self._rotary_types[layer], None if self._places is None else self._places[layer]
        if (kind, device) in block.rotary:
            return block.rotary[kind, device]
        if device is not None:  # one table for all devices, as the model has it
            if (kind, None) not in block.rotary:
                at_home = hidden.new_empty(1, device=block.positions.device)
                block.rotary[kind, None] = self._new_rotary(block, kind, at_home)
            block.rotary[kind, device] = tuple(table.to(device) for table in block.rotary[kind, None])
        else:
            block.rotary[kind, None] = self._new_rotary(block, kind, hidden)
        return block.rotary[kind, device]

    def _new_rotary(self, block: Block, kind: str, like: torch.Tensor) -> Any:
        """The table of a block, a slice of the one for all positions where its shape is known."""
        assert self._rotary is not None
        extra = (kind,) if kind else ()
        n_tokens = block.positions.shape[1]
        if block.start is None or n_tokens > MAX_ROWS or block.start + n_tokens > self._max_positions:
            return self._rotary(like, block.positions, *extra)
        buffers = list(self._rotary.buffers())  # others when the model was cast or moved
        if len(buffers) != len(self._rotary_buffers) or not all(map(is_, buffers, self._rotary_buffers)):
            self._whole_rotary, self._rotary_buffers = {}, buffers
        key, end = (kind, like.dtype, block.positions.device), block.start + n_tokens
        whole = self._whole_rotary.get(key)
        if whole is None or (whole and whole[0].shape[1] < end):
            n_positions = -(-max(end, block.cache.capacity) // STEP) * STEP
            n_positions = max(end, min(n_positions, self._max_positions))
            with torch.inference_mode(False), torch.no_grad():  # kept beyond this text
                positions = torch.arange(n_positions, device=block.positions.device)[None]
                whole = self._rotary(torch.empty(1, dtype=like.dtype, device=like.device), positions, *extra)
            by_position = isinstance(whole, tuple) and all(t.dim() == 3 and t.shape[1] == n_positions for t in whole)
            self._whole_rotary[key] = whole = whole if by_position else ()
        if not whole:
            return self._rotary(like, block.positions, *extra)
        tables = tuple(table[:, block.start : end] for table in whole)
        return tables if block.extent is None else tuple(map(standing_still, tables))

    def _mask(self, block: Block, layer: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """What is added to attention scores, `(row or 1, 1, query, slot)`; None where attention needs no mask."""
        window, place = self._windows[layer], None if self._places is None else self._places[layer]
        if (window, place) in block.masks:
            return block.masks[window, place]
        device, n_queries = hidden.device if place is None else place, hidden.shape[1]
        mask: torch.Tensor | None = None
        if block.start is None:
            assert block.place is not None
            slots = torch.arange(block.cache.first_slot(layer, block.place.lowest), block.place.extent, device=device)
            seen = _causal(block.positions[:, :, None].to(device), slots, window)[:, None]
            mask = self._added(seen, hidden.dtype)
        elif block.extent is not None:
            mask = standing_still(
                self._sliced(
                    window, hidden.dtype, device, attention_of(self._config), n_queries, block.start, 0, block.extent
                )
            )
        elif n_queries > 1:
            attention = attention_of(self._config)
            # sdpa draws the plain causal triangle itself, and faster, when nothing came before
            triangle = block.start == 0 and (window is None or window >= n_queries)
            if not (triangle and attention == "sdpa"):
                first, end = block.cache.first_slot(layer, block.start), block.start + n_queries
                if n_queries <= MAX_ROWS:
                    mask = self._sliced(window, hidden.dtype, device, attention, n_queries, block.start, first, end)
                else:
                    slots = torch.arange(first, end, device=device)
                    seen = _causal(block.positions[0][:, None].to(device), slots, window)[None, None]
                    mask = self._added(seen, hidden.dtype)
        block.masks[window, place] = mask
        return mask

    def _sliced(
        self,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
        attention: str,
        n_queries: int,
        start: int,
        first: int,
        end: int,
    ) -> torch.Tensor:
        """The mask of queries at `start`.. over slots `first`..`end`: the same staircase wherever the block starts."""
        # whatever the block starts at, its slice of one of these begins where a GPU's attention can load it
        offset = 0 if device.type == "cpu" else (start - first) % ALIGNED
        key = (window, dtype, device, attention, offset)
        whole = self._whole_masks.get(key)
        before = 0 if whole is None else whole.shape[1] - AHEAD
        if whole is None or before < start:
            before = -(-max(start, 1) // STEP) * STEP
            with torch.inference_mode(False):  # kept beyond this text
                queries = torch.arange(before + offset, before + offset + MAX_ROWS, device=device)[:, None]
                seen = _causal(queries, torch.arange(before + AHEAD, device=device), window)
                whole = self._whole_masks[key] = self._added(seen, dtype)
        shift = before + offset - start
        return whole[:n_queries, shift + first : shift + end][None, None]

    def _added(self, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A mask of what is seen, as it is added to scores: what transformers' attentions make of it themselves."""
        hidden = torch.finfo(dtype).min if attention_of(self._config) == "eager" else float("-inf")
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, hidden)


def standing_still(tensor: torch.Tensor) -> torch.Tensor:
    """The same with strides that follow from the shape, and from the beginning of its memory.

    A CUDA graph is recorded for each combination of the sizes, strides and offsets that a compiled layer is given: a
    slice that moves on with the text would have it recorded anew for every token.
    """
    wanted = tuple(tensor.shape[i + 1 :].numel() for i in range(tensor.dim()))
    if tensor.storage_offset() == 0 and tensor.stride() == wanted:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def attention_of(config: Any) -> str:
    """The attention that transformers runs under a config, "sdpa" or "eager".

    Raises:
        UnsupportedModelError: It is another one.
    """
    name = str(getattr(config, "_attn_implementation", None) or "eager")
    if name not in ("sdpa", "eager"):
        raise UnsupportedModelError(f"attention '{name}' is not supported; load with 'sdpa' or 'eager'")
    return name


def _causal(queries: torch.Tensor, slots: torch.Tensor, window: int | None) -> torch.Tensor:
    seen = slots <= queries
    return seen if window is None else seen & (slots > queries - window)
