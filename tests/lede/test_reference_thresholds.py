"""The threshold reference: rounds in tables against rounds that are stepped through, and the policy made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lede.acceptance import AcceptanceModel
from lede.cost_model import CostModel
from lede.features import FeatureConfig
from lede.generation import generate
from lede.policies.static import StaticPolicy
from lede.policies.survival import SurvivalPolicy
from lede.reference_thresholds import (
    fit_forecasts,
    reference_thresholds,
    search_blind,
    search_fixed,
    search_thresholds,
)
from lede.round_outcomes import RoundOutcomes
from lede.simulation import simulate
from lede.trace_table import TraceTable
from lede.wall_clock_data import best_static
from tests.matched_texts import VOCAB_SIZE, random_texts, with_branches
from tests.planted_costs import AGAIN, BLOCKS, PLANTED
from tests.tiny_models import N_LAYERS, plain_generate, prompt, tiny_model

COSTS = CostModel(N_LAYERS, (None, 5) * (N_LAYERS // 2), PLANTED, AGAIN, BLOCKS)
CANDIDATES = (1, 3, 4)
BUDGET, CAP = 24, 5


def a_table(branches: bool = False, n: int = 25, seed: int = 1) -> TraceTable:
    texts = random_texts(n, BUDGET, N_LAYERS, seed)
    if branches:
        texts = [with_branches(text, seed, CAP - 1) for text in texts]
    table = TraceTable.from_traces(texts, BUDGET, VOCAB_SIZE)
    assert (table.branches is not None) == branches
    return table


def a_policy(table: TraceTable, **settings: Any) -> tuple[AcceptanceModel, SurvivalPolicy]:
    model = fit_forecasts(table, COSTS, CANDIDATES, max_draft=CAP)
    flat = AcceptanceModel(model.features, model.weights * 0.3, model.blind)  # less sure of itself, so survival matters
    return flat, SurvivalPolicy.from_model(flat, candidates=CANDIDATES, max_draft=CAP, **settings)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize(("thresholds", "survival"), [((0.5, 0.6, 0.4), 0.3), ((0.7, 2.0, 0.55), 0.5), ((0.0,), 0.0)])
def test_rounds_in_tables_are_the_rounds(branches: bool, thresholds: tuple[float, ...], survival: float) -> None:
    table = a_table(branches)
    model, policy = a_policy(table, thresholds=thresholds, survival=survival)
    wanted = simulate(policy, table, COSTS)
    outcomes = RoundOutcomes(table, COSTS, CANDIDATES, model, CAP)
    found = outcomes.play(outcomes.drafts(survival), CANDIDATES, policy.limits.tolist())
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.seconds, wanted.seconds, rtol=1e-10)
    assert len(set(wanted.log.n_drafted.tolist())) > 2


@pytest.mark.parametrize("branches", [False, True])
def test_blind_rounds_in_tables_are_the_rounds(branches: bool) -> None:
    table = a_table(branches)
    model, policy = a_policy(table, survival=0.3, blind=3)
    wanted = simulate(policy, table, COSTS)
    outcomes = RoundOutcomes(table, COSTS, CANDIDATES, model, CAP)
    found = outcomes.play_blind(outcomes.drafts(0.3, blind=True), 3)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.seconds, wanted.seconds, rtol=1e-10)


def test_long_drafts_in_tables_are_the_rounds() -> None:
    """However long a draft may be, only an end of sequence ends it without a bonus."""
    texts = random_texts(4, 140, N_LAYERS, 1)
    table = TraceTable.from_traces(texts, 140, VOCAB_SIZE)
    table = replace(table, match=np.ones_like(table.match))
    model = AcceptanceModel(FeatureConfig(names=("surprisal",)), np.zeros((2, 3, 3)), np.zeros(3))
    policy = SurvivalPolicy.from_model(model, candidates=CANDIDATES, max_draft=120, survival=0.0, blind=3)
    wanted = simulate(policy, table, COSTS)
    outcomes = RoundOutcomes(table, COSTS, CANDIDATES, model, 120)
    found = outcomes.play_blind(outcomes.drafts(0.0, blind=True), 3)
    assert wanted.log.n_drafted.max() > 99
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.seconds, wanted.seconds, rtol=1e-10)


def test_candidates_may_be_some_of_the_layers() -> None:
    table = a_table()
    model, _ = a_policy(table)
    part = AcceptanceModel(model.features, model.weights[:, [0, 2]], model.blind[[0, 2]])
    policy = SurvivalPolicy.from_model(part, candidates=(1, 4), max_draft=CAP, thresholds=(0.6, 0.5), survival=0.3)
    outcomes = RoundOutcomes(table, COSTS, CANDIDATES, model, CAP)
    found = outcomes.play(outcomes.drafts(0.3), (1, 4), (0.6, 0.5))
    assert found.rate == pytest.approx(simulate(policy, table, COSTS).rate, rel=1e-10)


@pytest.mark.parametrize("blind", [None, 3])
def test_one_lane_decides_like_many(blind: int | None) -> None:
    """The policy that decodes, asked state by state, does what it does in the simulation of all lanes."""
    texts = [text for text in random_texts(25, BUDGET, N_LAYERS, 1) if text.n_decided]
    table = TraceTable.from_traces(texts, BUDGET, VOCAB_SIZE)
    _, policy = a_policy(table, thresholds=(0.5, 0.6, 0.4), survival=0.35, blind=blind)
    many = simulate(policy, table, COSTS)
    for place, text in enumerate(texts):
        alone = simulate(policy, TraceTable.from_traces([text], BUDGET, VOCAB_SIZE), COSTS)
        assert alone.seconds[0] == pytest.approx(many.seconds[place], rel=1e-10)


def test_the_search_finds_the_best_of_a_grid() -> None:
    table = a_table()
    model, _ = a_policy(table)
    outcomes = RoundOutcomes(table, COSTS, CANDIDATES, model, CAP)
    survivals, thresholds = (0.1, 0.4, 0.7), (0.0, 0.5, 0.7, 2.0)
    found = search_thresholds(outcomes, (3,), survivals, thresholds)
    grid = {(s, t): outcomes.play(outcomes.drafts(s), (3,), (t,)).rate for s in survivals for t in thresholds}
    assert found.rate >= max(grid.values()) * 0.999
    again = outcomes.play(outcomes.drafts(found.survival), (3,), found.thresholds)
    assert again.rate == found.rate
    blind = search_blind(outcomes, 3, survivals)
    assert blind.rate == max(outcomes.play_blind(outcomes.drafts(s, blind=True), 3).rate for s in survivals)


def test_the_reference_is_searched_and_saved(tmp_path: Path) -> None:
    table = a_table()
    policy = reference_thresholds(table, COSTS, CANDIDATES, max_draft=CAP)
    rate = simulate(policy, table, COSTS).rate
    assert rate > simulate(a_policy(table, thresholds=(0.99,), survival=0.9)[1], table, COSTS).rate
    policy.save_pretrained(str(tmp_path / "policy"))
    loaded = SurvivalPolicy.from_pretrained(str(tmp_path / "policy"))
    assert loaded.config == policy.config
    assert simulate(loaded, table, COSTS).rate == rate


def test_where_decisions_are_dear_a_fixed_length_is_found() -> None:
    """The best of the static settings then; where they are cheap, thresholds as before."""
    table, lengths = a_table(), (1, 2, 3, 4)
    dear = replace(COSTS, costs=replace(COSTS.costs, observe=1.0))
    found = reference_thresholds(table, dear, CANDIDATES, max_draft=CAP, fixed_lengths=lengths)
    static = best_static(table, dear, CAP, CANDIDATES, lengths)
    assert (found.config.blind, found.config.fixed_length) == (static.config.exit_layer, static.config.draft_length)
    played, wanted = (simulate(policy, table, dear) for policy in (found, static))
    assert played.rate == pytest.approx(wanted.rate)
    assert simulate(reference_thresholds(table, dear, CANDIDATES, max_draft=CAP), table, dear).rate < wanted.rate / 2
    cheap = reference_thresholds(table, COSTS, CANDIDATES, max_draft=CAP)
    assert reference_thresholds(table, COSTS, CANDIDATES, max_draft=CAP, fixed_lengths=lengths).config == cheap.config
    for blind, length in ((None, 2), (3, CAP + 1), (3, 0)):
        with pytest.raises(ValueError, match=r"a fixed length must be within 1\.\.max_draft"):
            replace(found.config, blind=blind, fixed_length=length)


def test_static_drafts_are_rated_under_the_luck_of_the_search() -> None:
    """Rates of sampled texts compare under the same draws of acceptance alone."""
    greedy = a_table(n=6)
    table, lengths, chosen = replace(greedy, match=(0.4 + 0.5 * greedy.match).astype(np.float32)), (2, 3), set()
    for seed in range(6):
        rates = {
            n: simulate(StaticPolicy(exit_layer=3, draft_length=n, max_draft=n), table, COSTS, seed=seed).rate
            for n in lengths
        }
        found = search_fixed(table, COSTS, 3, lengths, seed)
        assert (found.fixed_length, found.rate) == max(rates.items(), key=lambda pair: pair[1])
        static = best_static(table, COSTS, CAP, (3,), lengths, seed)
        assert static.config.draft_length == found.fixed_length
        chosen.add(found.fixed_length)
    assert len(chosen) == 2


@pytest.mark.parametrize(
    ("thresholds", "survival", "blind"), [((0.4,), 0.2, None), ((0.6, 0.3, 0.1), 0.1, None), ((0.5,), 0.3, 3)]
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_text_is_the_plain_models(
    family: str, thresholds: tuple[float, ...], survival: float, blind: int | None
) -> None:
    _, policy = a_policy(a_table(), thresholds=thresholds, survival=survival, blind=blind)
    model = tiny_model(family)
    for seed, length in ((0, 5), (1, 17)):
        ids = prompt(seed, length)
        found = generate(model, input_ids=ids, policy=policy, max_new_tokens=48)
        assert found.sequences[0, length:].tolist() == plain_generate(model, ids, 48)
        assert sum(each.drafted for each in found.rounds) > 5


def test_what_does_not_fit_is_refused() -> None:
    model, policy = a_policy(a_table())
    by_trace = AcceptanceModel(FeatureConfig(("trace",)), np.zeros((2, 1, 2)), np.zeros(1))
    with pytest.raises(ValueError, match="trace depend on decisions before"):
        RoundOutcomes(a_table(), COSTS, (3,), by_trace)
    with pytest.raises(ValueError, match="3 candidates, but they are \\[1, 3\\]"):
        SurvivalPolicy.from_model(model, candidates=(1, 3))
    with pytest.raises(ValueError, match="2 thresholds for 3 candidates"):
        SurvivalPolicy.from_model(model, candidates=CANDIDATES, thresholds=(0.1, 0.2))
    with pytest.raises(ValueError, match="layer 2, which is none of"):
        SurvivalPolicy.from_model(model, candidates=CANDIDATES, blind=2)
    with pytest.raises(ValueError, match="has no forecasts"):
        _ = SurvivalPolicy(candidates=CANDIDATES).model
    with pytest.raises(ValueError, match="are blind and weights, got"):
        policy.load_tensors({"weights": model.weights})
