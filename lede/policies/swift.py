"""The SWIFT policy: leave out sublayers of attention and of MLP, found by trial on the text itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lede.policies.layer_skipping import LayerSkippingConfig, LayerSkippingPolicy
from lede.policies.swift_search import SwiftSearch


@dataclass(frozen=True)
class SwiftConfig(LayerSkippingConfig):
    """Settings of a SWIFT policy; the defaults are those of the authors' script."""

    skip_ratio: float = 0.45
    """Share of the sublayers of layers 2..L-1 that a set leaves out."""
    context_window: int = 50
    """New tokens less one that a set is scored on, the first ones of the text. No set is tried in a text before it has
    two more than this: keep it well below the length of your texts."""
    opt_interval: int = 1
    """Rounds from one proposal to the next."""
    bayes_interval: int = 25
    """Proposals from one Bayesian one to the next, which need scikit-learn; 0 for random ones alone."""
    max_score: float = 0.93
    """Matchness above which the search ends."""
    tolerance: int = 300
    """Proposals in a row without an improvement; one more ends the search."""
    max_iterations: int = 1000
    """Proposals at most."""
    seed: int = 0
    """Seed of the proposals."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("context_window", "opt_interval", "max_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("bayes_interval", "tolerance", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 < self.skip_ratio <= 1:
            raise ValueError(f"skip_ratio must be above 0 and at most 1, got {self.skip_ratio}")
        if not 0 <= self.max_score <= 1:
            raise ValueError(f"max_score must be within 0..1, got {self.max_score}")


class SwiftPolicy(LayerSkippingPolicy):
    """Drafts without two sets of sublayers, and proposes others between rounds.

    A proposal is scored by its matchness: in one parallel draft over the first new tokens, the share of positions whose
    likeliest token is the next one of the text. Most are random, some Bayesian.

    Source: SWIFT (arXiv 2410.06916) and its code.
    Departs from the paper: drafts are chains, not trees. Misses are counted from the last improvement. The kernel of
    the Gaussian process (Matérn, 5/2) and how its bound is maximised are ours. Where drafts are sampled, the
    probability of the likeliest token ends a draft, not that of the token that was drawn: a stop that depends on the
    draw changes the law of the text.
    """

    kind: ClassVar[str] = "swift"
    config_class: ClassVar[type[SwiftConfig]] = SwiftConfig
    config: SwiftConfig

    def _new_search(self, n_layers: int) -> SwiftSearch:
        return SwiftSearch(self.config, n_layers)
