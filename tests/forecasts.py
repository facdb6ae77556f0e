"""Forecasts with made-up coefficients, for observations that have every feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lede.acceptance import AcceptanceModel
from lede.acceptance import inputs as acceptance_inputs
from lede.copy_forecast import GROUPS, CopyForecast
from lede.copy_forecast import inputs as copy_inputs
from lede.features import FEATURES, FeatureConfig, Forecast
from lede.forecast import N_WEIGHTS
from lede.lookup import LookupConfig
from lede.observation_parts import before_round, of_copies, of_layers
from lede.plan_values import fit_values
from lede.policies.base import Lookup
from lede.policies.source_value import SOURCE_FEATURES, SourceValuePolicy
from lede.policies.survival import SURVIVAL_FEATURES, SurvivalPolicy


def made_up(layers: Sequence[int], seed: int = 0) -> Forecast:
    """A forecast that has nothing to do with any model; each layer and place has coefficients of its own."""
    draws = np.random.default_rng(seed).normal(scale=0.3, size=(2, len(layers), N_WEIGHTS)).tolist()
    first, later = (tuple(tuple(row) for row in rows) for rows in draws)
    return Forecast(tuple(layers), first, later)


def every_feature(layers: Sequence[int], **settings: Any) -> FeatureConfig:
    """An observation of all features there are, at these layers."""
    return FeatureConfig(tuple(FEATURES), forecast=made_up(layers), **settings)


def made_up_survival(seed: int, candidates: Sequence[int], max_draft: int = 12) -> SurvivalPolicy:
    """A policy that knows nothing, whose drafts end where its product of made-up forecasts does."""
    rng, features = np.random.default_rng(seed), FeatureConfig(SURVIVAL_FEATURES)
    n_inputs = acceptance_inputs(np.zeros((1, len(features.names)), dtype=np.float32), features).shape[1]
    model = AcceptanceModel(
        features, rng.normal(scale=0.3, size=(2, len(candidates), n_inputs)), rng.normal(size=len(candidates))
    )
    return SurvivalPolicy.from_model(
        model, candidates=tuple(candidates), max_draft=max_draft, thresholds=(0.45,), survival=0.02
    )


def made_up_sources(
    seed: int, candidates: Sequence[int], lookups: Sequence[Lookup], max_draft: int = 5
) -> SourceValuePolicy:
    """A policy over both sources that knows nothing, and decides now one thing and now another."""
    rng, features = np.random.default_rng(seed), FeatureConfig(SOURCE_FEATURES)
    layers, before, copies = of_layers(features), before_round(features), of_copies(features)
    n_inputs = acceptance_inputs(np.zeros((1, len(layers.names)), dtype=np.float32), layers).shape[1]
    acceptance = AcceptanceModel(
        layers, rng.normal(scale=0.3, size=(2, len(candidates), n_inputs)), rng.normal(size=len(candidates))
    )
    width = copy_inputs(np.zeros((1, len(copies.names)), dtype=np.float32), copies).shape[1]
    copying = CopyForecast(copies, rng.normal(scale=0.3, size=(len(GROUPS), width)))
    seen = rng.random((200, len(before.names))).astype(np.float32) * 4
    plans = 1 + len(candidates) + len(lookups)
    values = fit_values(before, copying, seen, rng.normal(size=(len(seen), plans)), ridge=0.1)
    return SourceValuePolicy.from_models(
        acceptance, values, features=features, candidates=tuple(candidates), max_draft=max_draft,
        lookup=LookupConfig(), lookups=tuple(lookups), thresholds=(0.45,), survival=0.2,
    )  # fmt: skip
