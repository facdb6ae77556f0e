"""Buffers of caches that are gone, for the next ones: a recorded CUDA graph knows its buffers by their addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SlotPool:
    """Keeps one buffer for the keys and one for the values of each layer: those of the last cache that went.

    Caches that live at once, or are of other sizes, get new ones.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, int], torch.Tensor] = {}

    def take(self, layer: int, part: int, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A buffer of zeros of a shape, with `like`'s dtype and device.

        Args:
            layer: Whose it is.
            part: 0 for keys, 1 for values.
            shape: `(batch, kv_head, slot, head_width)`.
            like: What will be stored.
        """
        kept = self._free.get((layer, part))
        if kept is None or kept.shape != shape or kept.dtype != like.dtype or kept.device != like.device:
            return like.new_zeros(shape)
        del self._free[layer, part]
        return kept.zero_()

    def give(self, keys: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor | None]) -> None:
        """Take back the buffers of a cache that nobody uses any more."""
        for part, buffers in enumerate((keys, values)):
            for layer, buffer in enumerate(buffers):
                if buffer is not None:
                    self._free[layer, part] = buffer
