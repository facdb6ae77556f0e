"""Where the drafts of a policy in training may come from, and what it looks at for that."""

from __future__ import annotations

from typing import Literal

from lede.features import CALIBRATED_FEATURES, LOOKUP_FEATURES, MEMORY_FEATURES

Sources = Literal["exit", "lookup", "exit,lookup"]
"""Layers of the model, the text, or both."""


def features_for(sources: Sources, memory: bool = False) -> tuple[str, ...]:
    """Features of the wall-clock objective unless others are given.

    Args:
        sources: Where drafts may come from.
        memory: Whether other texts are remembered.
    """
    copying = MEMORY_FEATURES if memory else LOOKUP_FEATURES
    if sources == "lookup":  # nothing that needs a head read
        return ("trace", *copying)
    return CALIBRATED_FEATURES if sources == "exit" else (*CALIBRATED_FEATURES, *copying)
