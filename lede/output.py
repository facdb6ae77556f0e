"""What `generate` returns, and what it tells while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from lede.statistics import DecodingStats, Round
from lede.stopping import FinishReason


class Streamer(Protocol):
    """What transformers calls a streamer."""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt's ids first, then the ids of each round, `(token,)`."""

    def end(self) -> None:
        """The text is complete."""


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns."""

    text: str | None
    """The new tokens decoded, special tokens left out; None without a tokenizer."""
    sequences: torch.Tensor
    """Prompt and new tokens, `(1, prompt + new)`, as transformers returns them."""
    stats: DecodingStats
    """Counts and times."""
    rounds: tuple[Round, ...]
    """Every round after the prefill."""
    finish_reason: FinishReason
    """What ended it: an end-of-sequence id, a stop string or stopping criterion, the budget, or `max_time`."""
    scores: tuple[torch.Tensor, ...] | None = None
    """With `output_scores`: what each new token was chosen by, after processors and warping, `(1, vocabulary)` each."""
    logits: tuple[torch.Tensor, ...] | None = None
    """With `output_logits`: the whole model's raw logits at each new token, float32, `(1, vocabulary)` each."""
