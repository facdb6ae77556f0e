"""The best static lookup, which learned ones are held against, and what the search for a learned one tries."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from lede.cost_model import CostModel
from lede.lookup import LookupConfig
from lede.policies import LookupPolicy
from lede.reference_lookups import SHORTEST, SUFFIXES, best_static_lookup, search_lookup
from lede.simulation import simulate
from lede.trace_table import TraceTable
from tests.copied_texts import VOCABULARY, copied_text
from tests.planted_costs import PLANTED

N_LAYERS, BUDGET, LENGTHS = 6, 40, (1, 3)


def costs(layer_token: float) -> CostModel:
    return CostModel(N_LAYERS, (None,) * N_LAYERS, replace(PLANTED, layer_token=layer_token))


@pytest.fixture(scope="module")
def table() -> TraceTable:
    return TraceTable.from_traces([copied_text(i, BUDGET, N_LAYERS, 3) for i in range(8)], BUDGET, VOCABULARY)


def rate(table: TraceTable, model: CostModel, longest: int, shortest: int, continuation: str, length: int) -> float:
    settings: dict[str, Any] = {"max_suffix": longest, "min_suffix": shortest, "continuation": continuation}
    return simulate(LookupPolicy(draft_length=length, **settings), table, model).rate


@pytest.mark.parametrize("layer_token", [1e-5, 4e-4])
def test_the_best_static_lookup_is_that_of_the_simulator(table: TraceTable, layer_token: float) -> None:
    model = costs(layer_token)
    grid = list(itertools.product(SUFFIXES, SHORTEST, ("recent", "frequent"), LENGTHS))
    rates = [rate(table, model, *setting) for setting in grid]
    found = best_static_lookup(table, model, lengths=LENGTHS)
    assert simulate(found, table, model).rate == pytest.approx(max(rates), rel=1e-9)
    assert max(rates) > 1.01 * min(rates)


def test_it_searches_for_no_single_tokens_where_they_mislead(table: TraceTable) -> None:
    model = costs(1e-3)
    found = best_static_lookup(table, model, lengths=LENGTHS)
    short = max(rate(table, model, 3, 1, kind, length) for kind in ("recent", "frequent") for length in LENGTHS)
    assert found.config.min_suffix == 2
    assert simulate(found, table, model).rate > 1.02 * short


def test_a_given_search_is_kept(table: TraceTable) -> None:
    found = best_static_lookup(table, costs(1e-4), LookupConfig(2, 1, "frequent"), LENGTHS)
    assert found.lookup == LookupConfig(2, 1, "frequent")


def test_who_decides_searches_for_single_tokens_too(table: TraceTable) -> None:
    found = search_lookup(table, costs(1e-3), continuation="recent", lengths=LENGTHS)
    assert (found.min_suffix, found.continuation) == (1, "recent")
    assert found.max_suffix in SUFFIXES
