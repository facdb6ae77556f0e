"""Small records for the tests, drawn from a seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lede.buffers import BRANCH_DEPTH, PromptRollout, PromptTrace, StoreSettings

N_LAYERS = 6
CANDIDATES = (1, 2, 4)
VOCAB = 50


def settings(kind: str = "traces", **changes: Any) -> StoreSettings:
    """Settings of a store with 6 layers and candidates 1, 2, 4."""
    values = {"kind": kind, "model": "tiny", "n_layers": N_LAYERS, "vocab_size": VOCAB, "candidates": CANDIDATES}
    return StoreSettings(**{**values, **changes})


def make_trace(index: int, n_tokens: int | None = None, eos: bool | None = None, sampled: bool = False) -> PromptTrace:
    """A trace whose every value is different and plausible."""
    rng = np.random.default_rng(index)
    n = int(rng.integers(2, 12)) if n_tokens is None else n_tokens
    eos = bool(rng.random() < 0.5) if eos is None else eos
    table = (n - 1, N_LAYERS)
    top1 = -rng.exponential(size=table)
    match = rng.random(table) if sampled else rng.integers(0, 2, table).astype(float)
    match[:, -1] = 1
    return PromptTrace(
        prompt_index=index,
        prompt_ids=rng.integers(0, VOCAB, int(rng.integers(1, 6))),
        token_ids=rng.integers(0, VOCAB, n),
        ended_by_eos=eos,
        anchor=float(rng.exponential()),
        confidence=rng.exponential(size=table).astype(np.float32) * 4,
        entropy=rng.random(table).astype(np.float32) * 3,
        top1=top1.astype(np.float32),
        top2=(top1 - rng.exponential(size=table)).astype(np.float32),
        token=rng.integers(0, VOCAB, table).astype(np.int32),
        match=match.astype(np.float32),
        closing_confidence=(rng.exponential(size=N_LAYERS) * (not eos)).astype(np.float32),
        closing_entropy=(rng.random(N_LAYERS) * (not eos)).astype(np.float32),
    )


def with_branches(trace: PromptTrace, n: int, depth: int = BRANCH_DEPTH) -> PromptTrace:
    """The trace with n branches whose every value is different and plausible."""
    rng = np.random.default_rng(2000 + trace.prompt_index)
    length = rng.integers(1, depth + 1, n)
    layer = rng.choice(CANDIDATES, n)
    followed = np.arange(depth) < length[:, None]
    top1 = -rng.exponential(size=(n, depth))
    token = rng.integers(0, VOCAB, (n, depth, N_LAYERS))
    known = followed[:, :, None] & (np.arange(N_LAYERS) < layer[:, None, None])
    return replace(
        trace,
        branch_row=np.sort(rng.integers(0, trace.n_decided, n)).astype(np.int32),
        branch_layer=layer.astype(np.int16),
        branch_length=length.astype(np.int16),
        branch_confidence=(rng.exponential(size=(n, depth)) * 4 * followed).astype(np.float32),
        branch_entropy=(rng.random((n, depth)) * 3 * followed).astype(np.float32),
        branch_top1=(top1 * followed).astype(np.float32),
        branch_top2=((top1 - rng.exponential(size=(n, depth))) * followed).astype(np.float32),
        branch_token=np.where(known, token, -1).astype(np.int32),
    )


def make_rollout(index: int, token_sizes: tuple[int, ...] = (1, 3, 2), eos: bool = False) -> PromptRollout:
    """A rollout whose tokens take the given numbers of decisions; the last of each exits, full scans do not."""
    rng = np.random.default_rng(1000 + index)
    n = sum(token_sizes)
    steps = np.concatenate([np.arange(size) for size in token_sizes]) if token_sizes else np.zeros(0, dtype=int)
    token_end = np.zeros(n, dtype=bool)
    token_end[np.cumsum(token_sizes, dtype=int) - 1] = True
    actions = token_end & (steps < len(CANDIDATES) - 1)
    layer = np.asarray(CANDIDATES)[steps]
    return PromptRollout(
        prompt_index=index,
        prompt_ids=rng.integers(0, VOCAB, 3),
        token_ids=rng.integers(0, VOCAB, len(token_sizes) + 1),
        ended_by_eos=eos,
        observations=rng.random((n, 4)).astype(np.float32),
        actions=actions.astype(np.int8),
        rewards=rng.normal(size=n).astype(np.float32),
        layer=layer.astype(np.int16),
        exit_layer=np.where(actions, layer, 0).astype(np.int16),
        token_index=np.repeat(np.arange(1, len(token_sizes) + 1), token_sizes).astype(np.int32),
        token_end=token_end,
        match=np.where(actions, rng.integers(0, 2, n), -1).astype(np.int8),
        final_observation=rng.random(4).astype(np.float32),
    )
