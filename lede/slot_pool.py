"""Buffers of caches that are gone, for the next ones: a recorded CUDA graph knows its buffers by their addresses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

Key = tuple[int, int, tuple[int, ...], torch.dtype, torch.device]
"""The layer, 0 for keys or 1 for values, and what the buffer looks like."""


class SlotPool:
    """Keeps at most one buffer of a kind; where several caches live at once, the others get new ones."""

    def __init__(self) -> None:
        self._free: dict[Key, list[torch.Tensor]] = defaultdict(list)

    def take(self, layer: int, part: int, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A buffer of a shape, with `like`'s dtype and device; what is in it are finite numbers of an earlier text.

        Args:
            layer: Whose it is.
            part: 0 for keys, 1 for values.
            shape: `(batch, kv_head, slot, head_width)`.
            like: What will be stored.
        """
        free = self._free[layer, part, shape, like.dtype, like.device]
        return free.pop() if free else like.new_zeros(shape)

    def give(self, keys: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor | None]) -> None:
        """Take back the buffers of a cache that nobody uses any more."""
        for part, buffers in enumerate((keys, values)):
            for layer, buffer in enumerate(buffers):
                if buffer is not None:
                    free = self._free[layer, part, tuple(buffer.shape), buffer.dtype, buffer.device]
                    if not free:
                        free.append(buffer)
