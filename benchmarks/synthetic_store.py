"""Stores of transitions that no model was needed for: uniform decisions with the shape and the spread of real ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lede.buffers.records import PromptRollout
from lede.buffers.settings import StoreSettings
from lede.buffers.writer import StoreWriter
from lede.rewards import RewardConfig

CANDIDATES = (2, 3, 4, 5, 6, 8, 10, 12)
N_LAYERS = 16
N_TOKENS = 65
"""New tokens of a prompt; the first one is undecided."""
REWARD = RewardConfig()
SETTINGS = StoreSettings(
    kind="transitions",
    model="synthetic",
    n_layers=N_LAYERS,
    vocab_size=4096,
    candidates=CANDIDATES,
    explore="uniform",
    max_new_tokens=N_TOKENS,
)
SHARD_PROMPTS, SHARD_ROWS = 1 << 20, 65536


def rollouts(n_rows: int, seed: int = 0) -> Iterator[PromptRollout]:
    """Prompts until there are `n_rows` decisions; an exit is accepted the more often, the lower the entropy is."""
    prompt, rows = 0, 0
    while rows < n_rows:
        made = rollout(prompt, seed)
        yield made
        prompt, rows = prompt + 1, rows + made.n_rows


def rollout(prompt: int, seed: int = 0) -> PromptRollout:
    """One prompt."""
    rng = np.random.default_rng((seed, prompt))
    n_candidates, n_decided = len(CANDIDATES), N_TOKENS - 1
    last = rng.integers(0, n_candidates + 1, n_decided)  # index of the exit; beyond the last one for none
    inspected = np.minimum(last, n_candidates - 1)
    token, place = np.nonzero(np.arange(n_candidates) <= inspected[:, None])
    token_end = place == inspected[token]
    actions = token_end & (last[token] < n_candidates)
    layer = np.asarray(CANDIDATES)[place]
    depth = layer / N_LAYERS
    entropy = rng.exponential(2.0, n_decided)[token] * (1.2 - depth) + rng.exponential(0.1, token.size)
    accepted = rng.random(token.size) < np.exp(-entropy)
    confidence, trace = 2 + 10 / (1 + entropy), rng.exponential(0.5, token.size)
    observations = np.stack([confidence, np.minimum(entropy, 8), trace, depth], axis=1).astype(np.float32)
    rewards = np.where(actions, REWARD.exit(layer, N_LAYERS, accepted), REWARD.going_on(token_end))
    return PromptRollout(
        prompt_index=prompt,
        prompt_ids=rng.integers(0, SETTINGS.vocab_size, 32),
        token_ids=rng.integers(0, SETTINGS.vocab_size, N_TOKENS),
        ended_by_eos=bool(rng.random() < 0.5),
        observations=observations,
        actions=actions,
        rewards=rewards,
        layer=layer.astype(np.int16),
        exit_layer=np.where(actions, layer, 0).astype(np.int16),
        token_index=(token + 1).astype(np.int32),
        token_end=token_end,
        match=np.where(actions, accepted, -1),
        final_observation=observations[-1],
    )


def write_store(path: Path, n_rows: int, seed: int = 0) -> tuple[int, float]:
    """Write a store of at least `n_rows` decisions; how many it has, and the seconds without making them up."""
    rows, made_up, begin = 0, 0.0, time.perf_counter()
    with StoreWriter.open(path, SETTINGS, shard_prompts=SHARD_PROMPTS, shard_rows=SHARD_ROWS) as writer:
        before = time.perf_counter()
        for made in rollouts(n_rows, seed):
            made_up += time.perf_counter() - before
            writer.add(made)
            rows += made.n_rows
            before = time.perf_counter()
    return rows, time.perf_counter() - begin - made_up
