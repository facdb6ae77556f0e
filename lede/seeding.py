"""One seed field, many independent streams: every purpose draws from its own, so no two ever share numbers."""

from __future__ import annotations

import enum

import numpy as np
import torch


class Purpose(enum.IntEnum):
    """What a random stream is for; the value is its spawn key and never changes."""

    TOKENS = 0
    POLICY = 1
    EXPLORATION = 2
    MATCHES = 3
    PROMPT_ORDER = 4
    TRAINING = 5
    SYNTHESIS = 6
    BRANCHES = 7
    TURNS = 8
    SPLIT = 9
    ACCEPTANCE = 10
    FORECAST = 11
    COPY_FORECAST = 12
    REFERENCE = 13
    SOURCES_REFERENCE = 14


def numpy_stream(seed: int, purpose: Purpose, *index: int) -> np.random.Generator:
    """The numpy generator of `(seed, purpose, index)`, e.g. one a prompt."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(purpose), *index)))


def torch_stream(seed: int, purpose: Purpose, *index: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The torch generator of `(seed, purpose, index)` on a device."""
    sequence = np.random.SeedSequence(seed, spawn_key=(int(purpose), *index))
    generator = torch.Generator(device=device)
    generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0]) >> 1)  # torch takes 63 bits
    return generator
