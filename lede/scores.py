"""The scores that each token was chosen by, kept for the caller."""

from __future__ import annotations

import torch


class ScoreRecord:
    """What the whole model said at every new token, float32; one entry a token, `(1, vocabulary)` as in transformers.

    Args:
        scores: Whether to keep what tokens were chosen by: logits after processors, temperature, top-k and top-p.
        logits: Whether to keep raw logits.
    """

    def __init__(self, scores: bool, logits: bool) -> None:
        self.scores: list[torch.Tensor] | None = [] if scores else None
        self.logits: list[torch.Tensor] | None = [] if logits else None

    def add(self, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Keep the rows of tokens that were committed, `(token, vocabulary)` each; copies, so that blocks can go."""
        with torch.inference_mode(False):  # else the caller could not write into them
            if self.scores is not None:
                self.scores.extend(scores.float().clone().split(1))
            if self.logits is not None:
                self.logits.extend(logits.float().clone().split(1))

    def cut(self, n_tokens: int) -> None:
        """Forget what belongs to tokens after the first `n_tokens`, which did not stay."""
        for kept in (self.scores, self.logits):
            if kept is not None:
                del kept[n_tokens:]
