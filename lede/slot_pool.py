"""Buffers of caches that are gone, for the next ones: a recorded CUDA graph knows its buffers by their addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

KEPT = 2
"""Caches whose buffers are kept: more addresses would be more recordings, and more memory."""


class SlotPool:
    """Keeps the buffers of each layer's keys and values of the last two caches that went: a prefill and its decoding.

    More caches that live at once, or that are of other sizes, get new ones.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, int], list[torch.Tensor]] = {}

    def take(self, layer: int, part: int, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A buffer of zeros of a shape, with `like`'s dtype and device.

        Args:
            layer: Whose it is.
            part: 0 for keys, 1 for values.
            shape: `(batch, kv_head, slot, head_width)`.
            like: What will be stored.
        """
        free = self._free.get((layer, part), [])
        for place in reversed(range(len(free))):  # what went last comes first: the same cache gets the same again
            kept = free[place]
            if kept.shape == shape and kept.dtype == like.dtype and kept.device == like.device:
                return free.pop(place).zero_()
        return like.new_zeros(shape)

    def give(self, keys: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor | None]) -> None:
        """Take back the buffers of a cache that nobody uses any more."""
        for part, buffers in enumerate((keys, values)):
            for layer, buffer in enumerate(buffers):
                if buffer is not None:
                    free = self._free.setdefault((layer, part), [])
                    free.append(buffer)
                    del free[:-KEPT]
