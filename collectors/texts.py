"""Finished texts, and what the teacher learned of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lede.collectors.head_table import Columns


@dataclass(frozen=True)
class Text:
    """A prompt and what the whole model wrote behind it."""

    prompt_index: int
    """Names the prompt's random streams."""
    prompt_ids: list[int]
    """Token ids of the prompt."""
    token_ids: list[int]
    """New tokens, the end-of-sequence token included."""
    ended_by_eos: bool
    """Whether that ended the text; otherwise the budget did."""


@dataclass(frozen=True)
class TaughtText:
    """A text that was read at every layer."""

    text: Text
    """The text."""
    anchor: float
    """-log probability of the whole model's likeliest token at the last prompt position, in nats."""
    columns: Columns
    """`(position, layer)` each: the positions of its decisions and, where the budget ended it, of its last token."""
    states: torch.Tensor | None = None
    """States at those positions, `(position, layer, width)`, where they were kept."""

    @property
    def n_decided(self) -> int:
        """Tokens that were decided about."""
        return len(self.text.token_ids) - 1

    def agreed(self) -> TaughtText:
        """With the matches of a greedy text: 1 where a layer's likeliest token is the one that was written."""
        match = np.zeros_like(self.columns["match"])
        written = np.asarray(self.text.token_ids[1:])
        match[: self.n_decided] = self.columns["token"][: self.n_decided] == written[:, None]
        match[:, -1] = 1.0  # the text is the last layer's, whatever rounding says where the columns were read
        return TaughtText(self.text, self.anchor, {**self.columns, "match": match}, self.states)
