"""The search of candidates against every subset there is."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from lede.candidate_search import COARSE_SURVIVALS, COARSE_THRESHOLDS, search_candidates
from lede.cost_model import CostModel
from lede.reference_thresholds import search_thresholds
from lede.round_outcomes import RoundOutcomes
from lede.trace_table import TraceTable
from tests.matched_texts import VOCAB_SIZE, matched_text, random_texts
from tests.planted_costs import PLANTED
from tests.tiny_models import N_LAYERS

COSTS = CostModel(N_LAYERS, (None,) * N_LAYERS, PLANTED)


def test_a_layer_that_is_always_right_is_enough() -> None:
    match = np.zeros((23, N_LAYERS))
    match[:, 1:] = 1
    texts = [matched_text(match, index=i) for i in range(10)]
    found = search_candidates(TraceTable.from_traces(texts, 24, VOCAB_SIZE), COSTS)
    assert found.candidates == (2,)
    assert found.layers == (1, 2, 3, 4, 5)
    assert found.table().splitlines()[0].endswith(" 2")


def test_two_layers_where_each_has_its_own_texts() -> None:
    """Half of the texts are easy for the first layer, the others need the fourth."""
    texts = []
    for i in range(40):
        match = np.zeros((23, 12))
        match[:, (3 if i % 2 else 0) :] = 1
        texts.append(matched_text(match, index=i))
    costs = CostModel(12, (None,) * 12, PLANTED)
    found = search_candidates(TraceTable.from_traces(texts, 24, VOCAB_SIZE), costs)
    assert found.candidates == (1, 4)


@pytest.mark.parametrize("seed", range(3))
def test_no_subset_is_much_better(seed: int) -> None:
    shares = np.random.default_rng(seed).permuted([0.3, 0.6, 0.7, 0.8, 0.9])
    texts = random_texts(30, 24, N_LAYERS, seed, shares=[*np.sort(shares), 1.0])
    table = TraceTable.from_traces(texts, 24, VOCAB_SIZE)
    found = search_candidates(table, COSTS, least_gain=0.0, max_draft=6)
    outcomes = RoundOutcomes(table, COSTS, found.layers, found.model, 6)
    every = {
        subset: search_thresholds(outcomes, subset, COARSE_SURVIVALS, COARSE_THRESHOLDS).rate
        for n in range(1, 6)
        for subset in combinations(found.layers, n)
    }
    assert found.thresholds.rate >= 0.99 * max(every.values())
    assert found.rates[found.candidates] == pytest.approx(max(found.rates.values()), rel=0.005)


def test_few_layers_to_choose_from() -> None:
    table = TraceTable.from_traces(random_texts(10, 16, N_LAYERS, 0), 16, VOCAB_SIZE)
    assert set(search_candidates(table, COSTS, layers=(2, 4), most=1).rates) == {(2,), (4,)}
    with pytest.raises(ValueError, match="nothing to choose from"):
        search_candidates(table, COSTS, layers=())
