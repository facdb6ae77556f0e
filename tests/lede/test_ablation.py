"""The ablation: what a feature tells shows where it is seen and not where it is not."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from lede.ablation import FEATURE_SETS, ablate
from lede.cost_model import CostModel
from lede.features import FEATURES, MEMORY_FEATURES, FeatureConfig
from lede.reference_program import ProgramConfig
from lede.trace_table import TraceTable
from tests.matched_texts import VOCAB_SIZE, matched_text
from tests.planted_costs import PLANTED
from tests.tiny_models import N_LAYERS

COSTS = CostModel(N_LAYERS, (None,) * N_LAYERS, PLANTED)


def told_by_surprisal(seed: int) -> TraceTable:
    """Texts whose surprisal shows the matches, while the entropy says nothing."""
    texts = []
    for index in range(40):
        rng = np.random.default_rng((seed, index))
        match = np.repeat(rng.random((30, 1)) < 0.7, N_LAYERS, axis=1)
        match[:, -1] = True
        text = matched_text(match, index=index, seed=seed)
        text.entropy[:] = rng.random(text.entropy.shape)
        texts.append(text)
    return TraceTable.from_traces(texts, 31, VOCAB_SIZE)


def test_the_feature_that_tells_is_found() -> None:
    sets = {
        "blind": FeatureConfig(("entropy", "depth", "in_scan", "in_draft")),
        "telling": FeatureConfig(("entropy", "depth", "surprisal", "in_scan", "in_draft")),
    }
    small = ProgramConfig(rounds=2)
    trained: list[FeatureConfig] = []

    def train(features: FeatureConfig) -> float:
        trained.append(features)
        return 1.5

    blind, telling = ablate(told_by_surprisal(0), told_by_surprisal(1), COSTS, (1, 3), sets, 5, 0, train, small)
    assert trained == list(sets.values())
    assert (blind.name, telling.learned) == ("blind", 1.5)
    assert telling.features == sets["telling"].names
    assert blind.scan.n == telling.scan.n > 100  # the same visits
    assert blind.scan.share == telling.scan.share
    assert blind.scan.area_under_curve == pytest.approx(0.5, abs=0.1)
    assert (telling.scan.area_under_curve or 0) > 0.95
    assert (telling.draft.area_under_curve or 0) > (blind.draft.area_under_curve or 1) + 0.05
    assert telling.reference > 1.1 * blind.reference


def test_each_set_holds_those_before_it() -> None:
    sets = list(FEATURE_SETS.values())
    assert all(set(a.names) <= set(b.names) for a, b in pairwise(sets))
    assert set(sets[-1].names) == set(FEATURES) - set(MEMORY_FEATURES)  # what layers say
    assert sets[-1].draft_agreement
