"""Stores of transitions with every case that files of others are weak at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lede.buffers import PromptRollout, StoreWriter, TransitionStore, open_store
from tests.buffers.samples import make_rollout, settings

FINGERPRINT = {"architecture": {"n_layers": 6}, "tokenizer": None, "logits": [0.5, -1.25], "dtype": "float32"}


def rollouts() -> list[PromptRollout]:
    """Ended by EOS, cut by the budget, without any decision (either way), one decision, NaN-free odd floats."""
    odd = make_rollout(5, (3,))
    odd = replace(odd, rewards=np.array([-0.01, np.float32(1e-38), 1 / 3], dtype=np.float32))
    return [
        make_rollout(0, (1, 3, 2), eos=True),
        make_rollout(1, (2, 1), eos=False),
        make_rollout(2, (), eos=True),
        make_rollout(3, (), eos=False),
        make_rollout(4, (1,), eos=False),
        odd,
    ]


def store(path: Path, **changes: Any) -> TransitionStore:
    """A store with these rollouts in several shards."""
    made = settings("transitions", fingerprint=FINGERPRINT, explore="uniform", seed=3, **changes)
    with StoreWriter.open(path, made, shard_prompts=2) as writer:
        for rollout in rollouts():
            writer.add(rollout)
    opened = open_store(path)
    assert isinstance(opened, TransitionStore)
    return opened
