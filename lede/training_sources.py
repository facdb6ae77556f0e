"""Where the drafts of a policy in training may come from, and what it looks at for that."""

from __future__ import annotations

from typing import Literal

from lede.features import CALIBRATED_FEATURES, LOOKUP_FEATURES

Sources = Literal["exit", "lookup", "exit,lookup"]
"""Layers of the model, the text, or both."""

COPYING_FEATURES = ("trace", *LOOKUP_FEATURES)
"""What a policy observes that drafts by lookup alone: nothing that needs a head read."""


def features_for(sources: Sources) -> tuple[str, ...]:
    """Features of the wall-clock objective unless others are given."""
    if sources == "lookup":
        return COPYING_FEATURES
    return CALIBRATED_FEATURES if sources == "exit" else (*CALIBRATED_FEATURES, *LOOKUP_FEATURES)
