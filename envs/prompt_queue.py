"""Which prompt comes next: passes over the prompts, one after the other."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

PromptOrder = Literal["shuffled", "sequential"]
"""A new random order in every pass over the prompts, or the order given."""


class PromptQueue:
    """Hands out numbers of prompts; in later passes they keep counting, so that every visit has streams of its own.

    Args:
        n_prompts: Prompts; number i is prompt i % n_prompts in pass i // n_prompts.
        order: Of the prompts in a pass.

    Raises:
        ValueError: There is no such order.
    """

    def __init__(self, n_prompts: int, order: PromptOrder) -> None:
        if order not in get_args(PromptOrder):
            raise ValueError(f"order must be one of {', '.join(get_args(PromptOrder))}, got '{order}'")
        self.n_prompts = n_prompts
        self.order = order
        self.start_over()

    def start_over(self) -> None:
        """Begin with the first pass again."""
        self._waiting = np.zeros(0, dtype=np.int64)
        self._passes = 0

    def take(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """The next `count` numbers; `rng` orders a pass when its first prompt is due."""
        taken = []
        while count:
            if not self._waiting.size:
                n = self.n_prompts
                order = rng.permutation(n) if self.order == "shuffled" else np.arange(n)
                self._waiting = self._passes * n + order
                self._passes += 1
            taken.append(self._waiting[:count])
            self._waiting = self._waiting[count:]
            count -= taken[-1].size
        return np.concatenate(taken, dtype=np.int64) if taken else np.zeros(0, dtype=np.int64)
