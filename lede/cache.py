"""The key/value cache: one preallocated buffer a layer, where the slot of a token is its position.

transformers' attention modules call `update` and nothing else, so this class works with every version of
theirs, whatever their own caches look like. Because slot equals position, a rewind only lowers a number, rows of
unequal length need no padding bookkeeping, and a sliding window is a slice of the same buffer: nothing that a
rejected draft wrote can be seen again, since a query only ever looks at slots up to its own position.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lede.slot_pool import SlotPool


@dataclass(frozen=True)
class Place:
    """Where the next tokens of some rows go."""

    rows: slice | torch.Tensor
    """The rows; as a slice where they are neighbours, so that attention looks at a view and not at a copy."""
    index: torch.Tensor
    """The rows, `(row, 1)`."""
    slots: slice | torch.Tensor
    """Positions of the tokens, `(1 or row, token)`; a slice where neighbours have the same."""
    lowest: int
    """The lowest position, or one below it."""
    extent: int
    """Number of leading slots that attention gets to see; at least the largest position plus one."""


def neighbours(rows: Sequence[int]) -> slice | None:
    """Rows as a slice; None when they are not in order without a gap."""
    first = rows[0]
    return slice(first, first + len(rows)) if list(rows) == list(range(first, first + len(rows))) else None


class KVCache:
    """Keys and values of all layers for a batch of rows.

    Buffers have shape `(batch, kv_head, capacity, head_width)` and are allocated at a layer's first update, on that
    layer's device and in its dtype. `place` says where the next updates go; `rewind` forgets.

    Args:
        n_layers: Number of decoder layers.
        capacity: Slots a row, in tokens; the longest prompt plus budget.
        batch_size: Rows.
        windows: Sliding window of each layer in tokens, or None for full attention; empty means all full.
        spare: Slots behind the capacity at least, for the padding of blocks; nothing there is ever seen.
        step: The number of slots is a multiple of this.
        pool: Where buffers come from and go to; None for new ones.
    """

    def __init__(
        self,
        n_layers: int,
        capacity: int,
        batch_size: int = 1,
        windows: Sequence[int | None] | None = None,
        spare: int = 0,
        step: int = 1,
        pool: SlotPool | None = None,
    ) -> None:
        if capacity < 1 or batch_size < 1:
            raise ValueError(f"cache needs capacity and batch_size of at least 1, got {capacity} and {batch_size}")
        self.n_layers = n_layers
        self.capacity = capacity
        self.n_slots = -(-(capacity + spare) // step) * step
        self._making = (spare, step, pool)
        self.batch_size = batch_size
        self.windows: list[int | None] = list(windows) if windows else [None] * n_layers
        self.lengths = [0] * n_layers  # valid slots of each layer, aligned rows only
        self.keys: list[torch.Tensor | None] = [None] * n_layers
        self.values: list[torch.Tensor | None] = [None] * n_layers
        self._start = 0
        self._place: Place | None = None
        if pool is not None:
            weakref.finalize(self, pool.give, self.keys, self.values)

    def place(self, start: int) -> None:
        """Send the next updates of every layer to slots `start, start + 1, ...` of all rows."""
        self._start, self._place = start, None

    def place_ragged(self, slots: torch.Tensor, rows: torch.Tensor, extent: int) -> None:
        """Send the next updates to per-row slots.

        Args:
            slots: Positions of the tokens, `(row, token)`.
            rows: Which rows of the batch take part, `(row,)`.
            extent: Number of leading slots that attention gets to see; at least the largest slot plus one.
        """
        self.place_rows(Place(neighbours(rows.tolist()) or rows, rows[:, None], slots, 0, extent))

    def place_rows(self, place: Place) -> None:
        """Send the next updates where `place` says. How long each row is, is then for the caller to know."""
        self._place = place

    def move_row(self, source: int, target: int, length: int) -> None:
        """Give the first `length` slots of one row to another."""
        for buffers in (self.keys, self.values):
            for buffer in buffers:
                if buffer is not None:
                    buffer[target, :, :length] = buffer[source, :, :length]

    def rewind(self, length: int, first_layer: int = 0) -> None:
        """Forget every slot from `length` on, in the layers after the first `first_layer`."""
        if length < 0:
            raise ValueError(f"cannot rewind to {length} tokens")
        self.lengths = [n if i < first_layer else min(n, length) for i, n in enumerate(self.lengths)]

    def clone(self, capacity: int) -> KVCache:
        """A cache of another capacity with the same content; only slots in use are copied.

        Raises:
            ValueError: The content doesn't fit, or its rows are not aligned.
        """
        used = max(self.lengths, default=0)
        if capacity < used:
            raise ValueError(f"the cache holds {used} tokens, a clone of capacity {capacity} can't")
        if self._place is not None:
            raise ValueError("a cache whose rows sit at positions of their own can't be cloned")
        other = KVCache(self.n_layers, capacity, self.batch_size, self.windows, *self._making)
        other.lengths = list(self.lengths)
        for part, (mine, others) in enumerate(((self.keys, other.keys), (self.values, other.values))):
            for i, (buffer, length) in enumerate(zip(mine, self.lengths, strict=True)):
                if buffer is not None:
                    copy = others[i] = other._new(i, part, buffer)
                    copy[:, :, :length] = buffer[:, :, :length]
        return other

    @contextmanager
    def borrowed(self, first: int) -> Iterator[None]:
        """Rewound to `first` tokens inside the context, for passes that leave no trace: afterwards all is as before."""
        lengths = self.lengths
        saved = [
            [None if b is None else b[:, :, first:n].clone() for b, n in zip(buffers, lengths, strict=True)]
            for buffers in (self.keys, self.values)
        ]
        self.rewind(first)
        try:
            yield
        finally:
            for buffers, contents in zip((self.keys, self.values), saved, strict=True):
                for buffer, content, n in zip(buffers, contents, lengths, strict=True):
                    if buffer is not None and content is not None:
                        buffer[:, :, first:n] = content
            self.lengths = lengths

    def first_slot(self, layer: int, start: int) -> int:
        """First slot that a query at position `start` may look at in this layer."""
        window = self.windows[layer]
        return 0 if window is None else max(0, start - window + 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values `(row, kv_head, token, head_width)`; return what attention may look at.

        The signature is the one that transformers' attention calls; further arguments of theirs are not needed.
        """
        keys, values = self._buffers(layer_idx, key_states, value_states)
        if self._place is not None:
            return self._update_rows(self._place, keys, values, key_states, value_states, layer_idx)
        start, end = self._start, self._start + key_states.shape[2]
        assert self.lengths[layer_idx] == start, f"layer {layer_idx} holds {self.lengths[layer_idx]}, not {start}"
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {end} were needed")
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.lengths[layer_idx] = end
        first = self.first_slot(layer_idx, start)
        return keys[:, :, first:end], values[:, :, first:end]

    def _update_rows(
        self,
        place: Place,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, slots = place.rows, place.slots
        if isinstance(slots, slice):
            keys[rows, :, slots] = key_states
            values[rows, :, slots] = value_states
        else:
            index, slots = place.index.to(keys.device), slots.to(keys.device)
            keys[index, :, slots] = key_states.transpose(1, 2)
            values[index, :, slots] = value_states.transpose(1, 2)
        seen = slice(self.first_slot(layer, place.lowest), place.extent)
        if isinstance(rows, slice):
            return keys[rows, :, seen], values[rows, :, seen]
        rows = rows.to(keys.device)
        return keys[:, :, seen].index_select(0, rows), values[:, :, seen].index_select(0, rows)

    def _buffers(
        self, layer: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            keys = self.keys[layer] = self._new(layer, 0, key_states)
            values = self.values[layer] = self._new(layer, 1, value_states)
        return keys, values

    def _new(self, layer: int, part: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer for keys (0) or values (1) like these, `(row, kv_head, token, head_width)`."""
        shape, pool = (self.batch_size, like.shape[1], self.n_slots, like.shape[3]), self._making[2]
        # zeros, not empty: masked slots are multiplied by a weight of 0, and 0 * NaN is NaN
        return like.new_zeros(shape) if pool is None else pool.take(layer, part, shape, like)
