"""Texts that tell by the length of the match whether what follows it may be copied."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lede.buffers.records import PromptTrace
from tests.matched_texts import matched_text

PASSAGE = 12
"""Tokens of a passage that the text copies from its prompt."""
VOCABULARY = 1024
_COMMON = 12  # tokens that come at any place, so that a match of one or two tokens tells nothing


def copied_text(index: int, n_tokens: int, n_layers: int, seed: int = 0) -> PromptTrace:
    """A prompt of passages and noise, and a text that repeats some of the passages among noise."""
    rng = np.random.default_rng((seed, index))
    passages = [rng.integers(2 * _COMMON, VOCABULARY, PASSAGE) for _ in range(6)]

    def noise() -> np.ndarray:
        return rng.integers(1, _COMMON, int(rng.integers(4, 12)))

    prompt = np.concatenate([part for passage in passages for part in (noise(), passage)])
    parts: list[np.ndarray] = []
    while sum(map(len, parts)) < n_tokens:
        parts += [noise(), passages[int(rng.integers(len(passages)))]]
    text = np.concatenate(parts)[:n_tokens]
    match = rng.random((n_tokens - 1, n_layers)) < 0.5
    match[:, -1] = True
    bare = matched_text(match, index=index, seed=seed)
    said = np.where(match, text[1:, None], 0).astype(np.int32)  # no text has token 0
    return replace(bare, prompt_ids=prompt, token_ids=text, token=said)
