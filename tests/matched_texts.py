"""Traces that say nothing but which layer is right where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lede.buffers.records import PromptTrace

VOCAB_SIZE = 32


def matched_text(
    match: npt.ArrayLike, ended_by_eos: bool = False, prompt_length: int = 3, index: int = 0, seed: int = 0
) -> PromptTrace:
    """A text whose layers match as given, `(token - 1, layer)`; entropies are lower where they do, with noise."""
    matched = np.asarray(match, dtype=np.float32)
    rng = np.random.default_rng((seed, index))
    entropy = (1.0 + (1 - matched) + rng.random(matched.shape) * 1.5).astype(np.float32)
    surprisal = (0.2 + rng.random(matched.shape) + (1 - matched)).astype(np.float32)
    n_layers = matched.shape[1]
    return PromptTrace(
        prompt_index=index,
        prompt_ids=np.arange(prompt_length) + index,
        token_ids=rng.integers(1, VOCAB_SIZE, len(matched) + 1),
        ended_by_eos=ended_by_eos,
        anchor=0.5,
        confidence=entropy * 2,
        entropy=entropy,
        top1=-surprisal,
        top2=-surprisal - 1,
        token=np.ones(matched.shape, dtype=np.int32),
        match=matched,
        closing_confidence=np.zeros(n_layers, dtype=np.float32),
        closing_entropy=np.zeros(n_layers, dtype=np.float32),
    )


def random_texts(
    n_prompts: int, max_new_tokens: int, n_layers: int, seed: int, shares: npt.ArrayLike | None = None
) -> list[PromptTrace]:
    """Texts of various lengths; deeper layers match more often, and the last always. Some are ended by EOS."""
    rng = np.random.default_rng(seed)
    rates = np.linspace(0.3, 0.9, n_layers) if shares is None else np.asarray(shares)
    texts = []
    for index in range(n_prompts):
        ends = bool(rng.random() < 0.5)
        n = int(rng.integers(1, max_new_tokens)) if ends else max_new_tokens - 1
        match = rng.random((n, n_layers)) < rates
        match[:, -1] = True
        texts.append(matched_text(match, ends, int(rng.integers(1, 9)), index, seed))
    return texts


def with_branches(text: PromptTrace, seed: int, depth: int) -> PromptTrace:
    """Some wrong drafts followed on, each for its own number of positions up to `depth`."""
    rng = np.random.default_rng((seed, text.prompt_index))
    row, column = (text.match[:, :-1] == 0).nonzero()
    kept = rng.random(row.size) < 0.3
    row, column, n = row[kept], column[kept], int(kept.sum())
    top1 = -rng.exponential(0.6, (n, depth)).astype(np.float32)
    return replace(
        text,
        branch_row=row.astype(np.int32),
        branch_layer=(column + 1).astype(np.int16),
        branch_length=rng.integers(1, depth + 1, n).astype(np.int16),
        branch_confidence=-2 * top1,
        branch_entropy=-top1,
        branch_top1=top1,
        branch_top2=top1 - 1,
        branch_token=np.zeros((n, depth, text.match.shape[1]), dtype=np.int32),
    )
