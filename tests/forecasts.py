"""Forecasts with made-up coefficients, for observations that have every feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lede.features import FEATURES, FeatureConfig, Forecast
from lede.forecast import N_WEIGHTS


def made_up(layers: Sequence[int], seed: int = 0) -> Forecast:
    """A forecast that has nothing to do with any model; each layer and place has coefficients of its own."""
    draws = np.random.default_rng(seed).normal(scale=0.3, size=(2, len(layers), N_WEIGHTS)).tolist()
    first, later = (tuple(tuple(row) for row in rows) for rows in draws)
    return Forecast(tuple(layers), first, later)


def every_feature(layers: Sequence[int], **settings: Any) -> FeatureConfig:
    """An observation of all features there are, at these layers."""
    return FeatureConfig(tuple(FEATURES), forecast=made_up(layers), **settings)
