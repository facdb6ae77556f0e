"""Candidate layers: where a policy may look and exit."""

from __future__ import annotations

import math
from collections.abc import Sequence


def default_candidates(n_layers: int) -> tuple[int, ...]:
    """Candidate layers when none are given: multiples of ceil(L/8) up to L/2, at least one."""
    step = math.ceil(n_layers / 8)
    return tuple(range(step, n_layers // 2 + 1, step)) or (1,)


def parse_candidates(candidates: str | Sequence[int] | None, n_layers: int) -> tuple[int, ...]:
    """Candidate layers from "2,4,8", "all", a sequence, or None for the default.

    Raises:
        ValueError: They are not ascending layers within 1..L-1.
    """
    if n_layers < 2:
        raise ValueError(f"early exit needs a model with at least 2 layers, this one has {n_layers}")
    if candidates is None:
        return default_candidates(n_layers)
    if isinstance(candidates, str):
        if candidates == "all":
            return tuple(range(1, n_layers))
        try:
            candidates = [int(part) for part in candidates.split(",")]
        except ValueError:
            raise ValueError(f"candidates '{candidates}' must look like 2,4,8 or be 'all'") from None
    layers = tuple(int(layer) for layer in candidates)
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] > n_layers - 1:
        raise ValueError(f"candidates {list(layers)} must be ascending layers within 1..{n_layers - 1}")
    return layers
