"""Questions about the text so far, for policies that search for what to skip while they decode.

Every answer runs over tokens that are verified and already in the cache, at their true positions, and leaves the cache
bit for bit as it was.

Source: ConfLayers (arXiv 2604.14612) for the confidence of sublayers, SWIFT (arXiv 2410.06916) for the matchness of a
draft. Departs from the papers: float32 throughout, and the context of the probed tokens is the whole text before them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from lede.cache import KVCache
from lede.devices import numbers_on
from lede.models import Block, EarlyExitModel
from lede.policies.base import SkipSublayers
from lede.statistics import Meter

Measure = Literal["head", "hidden"]
"""What a sublayer's output is taken for: hidden states for the LM head, or logits over the width itself."""


class TextProbe:
    """What a search may ask.

    Args:
        model: The model.
        cache: Of the text: all its tokens but the last, in all layers.
        ids: The text, which grows while it is decoded.
        n_prompt: How many of its tokens are the prompt.
        meter: Where head reads are booked.
    """

    def __init__(self, model: EarlyExitModel, cache: KVCache, ids: Sequence[int], n_prompt: int, meter: Meter) -> None:
        self.n_prompt = n_prompt
        self.n_layers = model.n_layers
        self._model = model
        self._cache = cache
        self._ids = ids
        self._meter = meter

    @property
    def n_new(self) -> int:
        """New tokens so far."""
        return len(self._ids) - self.n_prompt

    @property
    def n_cached(self) -> int:
        """Tokens in the cache, prompt included: all but the newest."""
        return len(self._ids) - 1

    @torch.inference_mode()
    def sublayer_confidence(
        self, n_tokens: int, measure: Measure, probe_tokens: int | None = None
    ) -> npt.NDArray[np.float32]:
        """How sure each sublayer's output is, `(layer, 2)`: attention, MLP; 1 is certain, 0 knows nothing.

        The whole model runs over the last tokens of the cache. With h what a sublayer adds to the hidden state (after
        the norm that some families have behind it) and p = softmax(head(norm(h))) over a vocabulary of V for "head", or
        p = softmax(h) over the width V for "hidden", the confidence is 1 - H(p) / ln V, mean over the tokens.

        Args:
            n_tokens: How many of the last cached tokens run.
            measure: "head" or "hidden".
            probe_tokens: At most so many of the last of them are read by the head, which costs 2L head reads each; None
                for all. "hidden" reads none and counts them all.

        Raises:
            ValueError: There are not so many tokens, or the measure is unknown.
            UnsupportedModelError: The model's layers can't be watched.
        """
        if measure not in ("head", "hidden"):
            raise ValueError(f"measure must be 'head' or 'hidden', got '{measure}'")
        if probe_tokens is not None and probe_tokens < 1:
            raise ValueError(f"probe_tokens must be at least 1, got {probe_tokens}")
        start = self.n_cached - n_tokens
        self._check(start, n_tokens)
        read_by_head = measure == "head"
        n_read = min(n_tokens, probe_tokens or n_tokens) if read_by_head else n_tokens
        found: dict[tuple[int, int], torch.Tensor] = {}

        def record(layer: int, sublayer: int, output: torch.Tensor) -> None:
            output = output[:, -n_read:]
            found[layer, sublayer] = _confidence(self._model.head(output) if read_by_head else output)

        with self._cache.borrowed(start):
            self._model.run_recording(*self._place(start, n_tokens), record)
        if read_by_head:
            self._meter.head_reads += 2 * self.n_layers * n_read
        values = torch.stack([found[i, k].to(self._model.device) for i in range(self.n_layers) for k in range(2)])
        return values.reshape(self.n_layers, 2).cpu().numpy()

    @torch.inference_mode()
    def matchness(self, plan: SkipSublayers, first: int, n_tokens: int) -> float:
        """Share of positions where a draft with gaps would have gone on as the text does.

        One pass drafts at all positions at once, each behind the text itself: the new tokens `first` to
        `first + n_tokens - 1` go in, and the likeliest tokens that come out are compared with their followers.

        Args:
            plan: What to leave out.
            first: Place of the first token among the new ones, from 0.
            n_tokens: Positions.

        Raises:
            ValueError: The text has no such tokens yet, or the plan doesn't fit the model.
            UnsupportedModelError: The model's layers can't be run in part.
        """
        plan.check(self.n_layers)
        if first < 0:
            raise ValueError(f"first counts the new tokens from 0, got {first}")
        start = self.n_prompt + first
        self._check(start, n_tokens)
        with self._cache.borrowed(start):
            hidden, block = self._place(start, n_tokens)
            hidden = self._model.run_layers(hidden, 0, plan.prefix, block)
            logits = self._model.head(self._model.run_skipping(hidden, plan, block))[0]
        self._meter.head_reads += n_tokens
        drafted: list[int] = logits.float().argmax(-1).tolist()
        followers = self._ids[start + 1 : start + 1 + n_tokens]
        return sum(a == b for a, b in zip(drafted, followers, strict=True)) / n_tokens

    def _check(self, start: int, n_tokens: int) -> None:
        """Raise ValueError unless the text has followers for so many tokens from `start` on."""
        if n_tokens < 1 or start < 0 or start + n_tokens > self.n_cached:
            raise ValueError(
                f"cannot probe {n_tokens} tokens from position {start} on; the text has {self.n_cached} that another "
                "one follows"
            )

    def _place(self, start: int, n_tokens: int) -> tuple[torch.Tensor, Block]:
        """Hidden states of the text before the first layer, and where they sit."""
        block = self._model.block(self._cache, start, n_tokens)
        ids = numbers_on(self._model.device, [self._ids[start : start + n_tokens]])
        return self._model.embed(ids, block), block


def _confidence(logits: torch.Tensor) -> torch.Tensor:
    """1 - H / ln(width), mean over tokens, of logits `(1, token, width)`; a scalar in float32."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    # masked entries may be -inf, where p log p is 0, not NaN
    entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)
    return 1 - entropy.mean() / math.log(logits.shape[-1])
