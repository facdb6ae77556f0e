"""The reference over both sources: rounds in tables against rounds stepped through, values, and what is found."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lede.acceptance import AcceptanceModel
from lede.copy_forecast import GROUPS, CopyForecast, inputs
from lede.cost_model import CostModel
from lede.features import FeatureConfig
from lede.lookup import LookupConfig
from lede.lookup_table import lookups_of
from lede.observation_parts import before_round, of_copies, of_layers
from lede.plan_values import PlanValues, fit_values
from lede.policies import SourceValuePolicy
from lede.policies.base import Lookup
from lede.policies.source_value import SOURCE_FEATURES
from lede.reference_lookups import reference_lookups
from lede.reference_sources import SourceSearch, reference_sources
from lede.reference_sources_cells import SourceCells
from lede.reference_sources_table import PlannedRounds, SourceOutcomes
from lede.reference_thresholds import reference_thresholds
from lede.simulation import simulate
from lede.trace_table import TraceTable
from tests.copied_texts import VOCABULARY, copied_text
from tests.forecasts import made_up_sources
from tests.planted_costs import AGAIN, BLOCKS, PLANTED

N_LAYERS, BUDGET, CAP = 6, 40, 5
CANDIDATES, LOOKUPS = (1, 3), (Lookup(2), Lookup(8), Lookup(8, prune_at=3))
COSTS = CostModel(N_LAYERS, (None,) * N_LAYERS, replace(PLANTED, layer_token=1e-4), AGAIN, BLOCKS)
SEARCH = LookupConfig()
FEATURES = FeatureConfig(SOURCE_FEATURES)


def a_table(n: int, seed: int = 0, sure: float = 0.0) -> TraceTable:
    """Texts with passages to copy; a share `sure` of the texts besides has layers that are right everywhere."""
    texts = [copied_text(i, BUDGET, N_LAYERS, seed) for i in range(n)]
    for i in range(round(sure * n)):
        text = texts[i]
        right = np.ones_like(text.match)
        said = np.broadcast_to(text.token_ids[1:, None], right.shape).astype(np.int32)
        sharp = np.full_like(text.top1, -0.01)
        texts[i] = replace(text, match=right, token=said, top1=sharp, top2=sharp - 6)
    return TraceTable.from_traces(texts, BUDGET, VOCABULARY)


@pytest.fixture(scope="module")
def table() -> TraceTable:
    return a_table(12)


def outcomes_of(table: TraceTable, policy: SourceValuePolicy) -> SourceOutcomes:
    copies = lookups_of(table, SEARCH, 8)
    return SourceOutcomes(table, COSTS, CANDIDATES, policy.acceptance, copies, LOOKUPS, FEATURES, CAP)


@pytest.mark.parametrize("plan", range(2 + len(CANDIDATES) + len(LOOKUPS)))
def test_rounds_in_tables_are_the_rounds(table: TraceTable, plan: int) -> None:
    """Whoever takes one plan everywhere, and passes where the text has nothing to copy."""
    policy = always(plan)
    outcomes = outcomes_of(table, policy)
    planned = outcomes.planned(policy.limits.tolist(), policy.config.survival)
    copies = plan >= 2 + len(CANDIDATES)
    choice = np.full(len(outcomes.forced), plan)
    if copies:
        choice[lookups_of(table, SEARCH, 8).start < 0] = 0
    wanted = simulate(policy, table, COSTS)
    left = outcomes.to_go(planned, choice)
    assert outcomes.total(left) == pytest.approx(wanted.seconds.sum(), rel=1e-10)
    np.testing.assert_allclose(left[outcomes.first_rows], wanted.seconds, rtol=1e-10)
    drafts = set(np.unique(wanted.log.source).tolist())
    assert drafts == ({0} if plan == 0 else {0, 2} if copies else {0, 1})


def always(plan: int) -> SourceValuePolicy:
    """Takes a plan everywhere, by constants."""
    policy = made_up_sources(3, CANDIDATES, LOOKUPS, CAP)
    tensors = policy.tensors()
    values = np.zeros_like(tensors["values"])
    values[:, -1] = -1.0
    if plan:
        values[plan - 1, -1] = 1.0
    policy.load_tensors({**tensors, "values": values})
    return policy


def test_what_plans_save_by_hand(table: TraceTable) -> None:
    """Two rows of a text: a plan that commits one token more saves the pass that is spared, less what it costs."""
    policy = always(0)
    outcomes = outcomes_of(table, policy)
    n = len(outcomes.forced)
    tokens, seconds = np.ones((n, 2), dtype=np.int64), np.full((n, 2), 3.0)
    tokens[0, 1], seconds[0, 1] = 2, 4.0
    planned = PlannedRounds(tokens, seconds)
    left = outcomes.to_go(planned, np.zeros(n, dtype=np.int64))
    assert left[0] == 3 * table.n_decided[0]
    saved = outcomes.saved(planned, left)
    assert saved[0].tolist() == [0, 2]  # a round of 4 for two rounds of 3
    assert not saved[1:].any()
    last = int(table.n_decided[0]) - 1
    tokens[last, 1] = 5  # nothing is behind the end of the text
    assert outcomes.saved(planned, left)[last].tolist() == [0, 0]


def test_taking_what_saves_most_ends_at_the_best_of_all_choices(table: TraceTable) -> None:
    outcomes = outcomes_of(table, made_up_sources(0, CANDIDATES, LOOKUPS, CAP))
    planned = outcomes.planned((0.4, 0.4), 0.2)
    choice, totals = np.zeros(len(outcomes.forced), dtype=np.int64), []
    for _ in range(BUDGET):
        left = outcomes.to_go(planned, choice)
        totals.append(outcomes.total(left))
        choice = outcomes.saved(planned, left).argmax(axis=1)
    assert all(after <= before + 1e-12 for before, after in pairwise(totals))
    best = np.zeros(len(choice))
    for prompt in range(table.n_prompts):
        first, end = int(table.first_row[prompt]), int(table.first_row[prompt] + table.n_decided[prompt])
        for row in range(end - 1, first - 1, -1):
            after = row + planned.tokens[row]
            best[row] = min(planned.seconds[row] + np.where(after < end, best[np.minimum(after, end - 1)], 0))
    assert totals[-1] == pytest.approx(outcomes.total(best), rel=1e-12)
    assert totals[-1] < 0.8 * totals[0]


def test_values_are_those_of_a_line() -> None:
    before, copies = before_round(FEATURES), of_copies(FEATURES)
    width = inputs(np.zeros((1, len(copies.names)), dtype=np.float32), copies).shape[1]
    forecast = CopyForecast(copies, np.zeros((len(GROUPS), width)))
    rng = np.random.default_rng(0)
    seen = rng.random((400, len(before.names))).astype(np.float32)
    seen[:100, before.names.index("match_length")] = 0
    trace, hits = (seen[:, before.names.index(name)].astype(float) for name in ("trace", "lookup_hits"))
    saved = np.stack([1 - trace, trace - 0.5, 3 * hits], axis=1)
    values = fit_values(before, forecast, seen, saved, ridge=1e-6)
    found = values(seen, n_lookups=1)
    assert not found[:, 0].any()
    np.testing.assert_allclose(found[:, 1:3], saved[:, :2], atol=1e-4)
    assert np.isneginf(found[:100, 3]).all()  # nothing to copy
    np.testing.assert_allclose(found[100:, 3], saved[100:, 2], atol=1e-4)
    raised = values.raised([0, 2, 0])(seen, n_lookups=1)
    np.testing.assert_allclose(raised[:, 2], found[:, 2] + 2, atol=1e-9)
    np.testing.assert_array_equal(raised[:, 1], found[:, 1])


@pytest.fixture(scope="module")
def found() -> tuple[TraceTable, SourceSearch, SourceValuePolicy]:
    table = a_table(30, sure=0.5)
    search = SourceSearch(table, COSTS, CANDIDATES, SEARCH, LOOKUPS, max_draft=CAP)
    return table, search, [search.improve() for _ in range(2)][-1]


def test_it_beats_each_source_alone(found: tuple[TraceTable, SourceSearch, SourceValuePolicy]) -> None:
    _, _, policy = found
    test = a_table(30, seed=1, sure=0.5)
    both = simulate(policy, test, COSTS)
    layers = simulate(reference_thresholds(test, COSTS, CANDIDATES, max_draft=CAP), test, COSTS)
    text = simulate(reference_lookups(test, COSTS, SEARCH, (2, 8)), test, COSTS)
    assert both.speedup > 1.05 * max(layers.speedup, text.speedup)
    shares = both.source_shares()
    assert min(shares["exit"][0], shares["lookup"][0]) > 0.1


def test_tables_agree_with_regressions(found: tuple[TraceTable, SourceSearch, SourceValuePolicy]) -> None:
    _, search, policy = found
    test = a_table(30, seed=1, sure=0.5)
    cells = SourceCells(search, (4, 2, 2, 1)).simulate(test)
    assert cells.rate > 0.95 * simulate(policy, test, COSTS).rate
    assert cells.rate < 1.05 * simulate(policy, test, COSTS).rate


def test_the_table_of_what_was_seen_knows_the_policys_rate(
    found: tuple[TraceTable, SourceSearch, SourceValuePolicy],
) -> None:
    table, search, policy = found
    planned = search.outcomes.planned(policy.limits.tolist(), policy.config.survival)
    seconds = search.outcomes.total(search.outcomes.to_go(planned, search.choices()))
    assert seconds == pytest.approx(simulate(policy, table, COSTS).seconds.sum(), rel=0.02)


def test_it_is_saved_and_loaded(found: tuple[TraceTable, SourceSearch, SourceValuePolicy], tmp_path: Path) -> None:
    table, _, policy = found
    policy.save_pretrained(str(tmp_path / "policy"))
    again = SourceValuePolicy.from_pretrained(str(tmp_path / "policy"))
    assert again.config == policy.config
    assert simulate(again, table, COSTS).seconds.tolist() == simulate(policy, table, COSTS).seconds.tolist()


def test_the_fastest_of_the_rounds_is_kept() -> None:
    table = a_table(10)
    settings: dict[str, Any] = {"lookups": LOOKUPS, "max_draft": CAP, "features": FEATURES}
    kept = reference_sources(table, COSTS, CANDIDATES, SEARCH, **settings)
    search = SourceSearch(table, COSTS, CANDIDATES, SEARCH, **settings)
    rates = [simulate(search.improve(), table, COSTS).rate for _ in range(3)]
    assert simulate(kept, table, COSTS).rate == max(rates)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("surprisal", "trace"), "add match_length"),
        (("trace", "match_length"), "add surprisal"),
        (("surprisal", "match_length", "agreement", "certainty"), "leave out agreement, certainty"),
    ],
)
def test_features_that_do_not_serve_are_refused(table: TraceTable, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference_sources(table, COSTS, CANDIDATES, SEARCH, LOOKUPS, FeatureConfig(names))


def test_models_that_do_not_fit_are_refused() -> None:
    policy = made_up_sources(0, CANDIDATES, LOOKUPS, CAP)
    tensors = policy.tensors()
    with pytest.raises(ValueError, match="has no models"):
        _ = SourceValuePolicy().acceptance
    with pytest.raises(ValueError, match=r"blind, copies, values, weights, got \['weights'\]"):
        policy.load_tensors({"weights": tensors["weights"]})
    with pytest.raises(ValueError, match=r"6 plans beside the plain pass \(a scan, 2 layers, 3 lookups\)"):
        policy.load_tensors({**tensors, "values": tensors["values"][1:]})
    other = AcceptanceModel(of_layers(FEATURES), tensors["weights"], tensors["blind"])
    values = PlanValues(before_round(FEATURES), policy.copies, tensors["values"])
    with pytest.raises(ValueError, match="2 candidates, but they are"):
        SourceValuePolicy.from_models(other, values, candidates=(1, 2, 3), lookups=LOOKUPS)
    with pytest.raises(ValueError, match="lookups must be distinct"):
        SourceValuePolicy(lookups=(Lookup(2), Lookup(2)))
