"""Policies for tests that decide differently from position to position, by luck or by what they see."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from lede.features import FeatureConfig
from lede.policies import LearnedPolicy, Policy, RandomPolicy, StaticPolicy, ThresholdPolicy

_SEEN = {"confidence": (4.617, 0.02), "entropy": (4.8455, 0.0007), "trace": (4.55, 0.03), "depth": (0.7, 0.22)}
"""Mean and deviation of what the tiny models show, whose distributions are all but flat."""
KINDS = ("plain", "static", "static deep", "threshold", "random", "random gaps", "random lookups", "learned")


def policy_of(kind: str, seed: int = 0) -> Policy | None:
    """A new policy of a kind; None for plain decoding."""
    if kind == "plain":
        return None
    if kind.startswith("static"):
        return StaticPolicy(exit_layer=5 if "deep" in kind else 1 + seed % 4, draft_length=2 + seed % 6)
    if kind == "threshold":
        return ThresholdPolicy(candidates=(1, 3, 5), measure="entropy", thresholds=4.8452 + 0.0003 * (seed % 4))
    if kind == "learned":
        return learned_policy(seed)
    lookups = 0.6 if "lookups" in kind else 0.0
    gaps = 0.5 if "gaps" in kind else 0.0
    return RandomPolicy(seed=seed, fixed_probability=0.4, gap_probability=gaps, lookup_probability=lookups)


def learned_policy(seed: int) -> LearnedPolicy:
    """A network with random weights: an arbitrary function of what the tiny models show."""
    rng = np.random.default_rng(seed)
    n_features = len(FeatureConfig().names)
    sizes = [n_features, 16, 2]
    layers = [(rng.normal(size=(b, a)), rng.normal(size=b)) for a, b in pairwise(sizes)]
    mean, std = np.array([_SEEN[name] for name in FeatureConfig().names]).T
    return LearnedPolicy.from_network(layers, candidates=(1, 2, 3, 5), mean=mean, std=std)
