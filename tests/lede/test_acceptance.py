"""Forecasts of acceptance: their fit, their two forms, and how they are measured."""

from __future__ import annotations

import numpy as np
import pytest

from lede.acceptance import (
    DRAFTING,
    SCANNING,
    AcceptanceModel,
    area_under_curve,
    calibration_error,
    fit_logistic,
    inputs,
    logistic,
)
from lede.cost_model import CostModel
from lede.cost_tables import CostTables
from lede.draft_rounds import DraftRounds, Stage
from lede.features import FeatureConfig
from lede.trace_table import TraceTable
from lede.visits import fit_acceptance, join_visits, watch_plans
from tests.forecasts import every_feature
from tests.matched_texts import VOCAB_SIZE, random_texts
from tests.planted_costs import PLANTED
from tests.tiny_models import N_LAYERS

EVERYTHING = every_feature((1, 3, 4))
COSTS = CostModel(N_LAYERS, (None,) * N_LAYERS, PLANTED)


def some_rounds(candidates: tuple[int, ...] = (1, 3, 4), cap: int = 4) -> DraftRounds:
    table = TraceTable.from_traces(random_texts(30, 24, N_LAYERS, seed=3), 24, VOCAB_SIZE)
    return DraftRounds(table, CostTables(COSTS, candidates, table.max_context, cap), EVERYTHING)


def test_planted_weights_are_found() -> None:
    rng = np.random.default_rng(0)
    matrix = np.c_[rng.normal(3, 2, 40_000), rng.random(40_000) * 9, np.ones(40_000)]
    weights = np.array([0.7, -0.4, 0.2])
    label = (rng.random(40_000) < logistic(matrix @ weights)).astype(float)
    np.testing.assert_allclose(fit_logistic(matrix, label), weights, atol=0.05)


def test_separable_labels_have_finite_weights() -> None:
    matrix = np.c_[np.arange(20.0), np.ones(20)]
    label = (matrix[:, 0] > 9.5).astype(float)
    weights = fit_logistic(matrix, label)
    assert np.isfinite(weights).all()
    assert ((matrix @ weights > 0) == (label > 0)).all()


@pytest.mark.parametrize("stage", [SCANNING, DRAFTING])
def test_both_forms_say_the_same(stage: int) -> None:
    rng = np.random.default_rng(1)
    low, high = EVERYTHING.bounds(N_LAYERS, VOCAB_SIZE)
    seen = (low + rng.random((200, low.size)) ** 3 * (high - low)).astype(np.float32)
    seen[:5] = low
    seen[5:10] = high
    n_inputs = inputs(seen, EVERYTHING).shape[1]
    model = AcceptanceModel(EVERYTHING, rng.normal(size=(2, 3, n_inputs)) / 10, np.zeros(3))
    where = rng.integers(0, 3, 200)
    wanted = model.log_odds(seen, np.full(200, stage == DRAFTING), where)
    found = [model.log_chance(row, stage, int(k)) for row, k in zip(seen, where, strict=True)]
    np.testing.assert_allclose(found, -np.logaddexp(0, -wanted), rtol=1e-9, atol=1e-12)


def test_visits_tell_what_verification_will() -> None:
    """What a round commits follows from the labels of its decisions to draft."""
    visits, recorded = watch_plans(some_rounds(), np.random.default_rng(5))
    moves = recorded.transitions
    action, k = moves.actions.astype(int), visits.candidate.copy()
    k[action >= 2] = action[action >= 2] - 2
    drafts = (action >= 2) | ((action == 1) & (visits.stage != Stage.PRE_SCAN))
    earned = drafts & visits.on_text & visits.match[np.arange(len(visits)), k]
    # a decision finds one more token accepted than the one before it in its round if that was a good draft
    inside = ~moves.token_end
    np.testing.assert_array_equal(visits.accepted[moves.next_row[inside]], (visits.accepted + earned)[inside])
    bonus = (recorded.tokens - visits.accepted - earned)[moves.token_end]
    assert set(bonus.tolist()) == {
        0.0,
        1.0,
        2.0,
    }  # an accepted end has none; the last room for a token is filled plainly
    assert (bonus == 1).mean() > 0.8


def test_forecasts_are_calibrated_where_they_were_fitted() -> None:
    rounds = some_rounds()
    visits = join_visits([watch_plans(rounds, np.random.default_rng(n))[0] for n in range(4)])
    model = fit_acceptance(visits, EVERYTHING)
    for stage in (SCANNING, DRAFTING):
        for k in range(3):
            rows = visits.of(stage, k)
            n = int(rows.sum())
            chance = model.probability(visits.observations[rows], np.full(n, stage == DRAFTING), np.full(n, k))
            assert calibration_error(chance, visits.here[rows]) < 0.02
            area = area_under_curve(chance, visits.here[rows])
            assert area is not None
            assert area > 0.97  # the texts show their matches in the surprisal


def test_area_under_curve_counts_pairs() -> None:
    rng = np.random.default_rng(2)
    score, label = rng.integers(0, 6, 80), rng.random(80) < 0.4
    pairs = score[label][:, None] - score[~label][None, :]
    wanted = (pairs > 0).mean() + (pairs == 0).mean() / 2
    assert area_under_curve(score, label) == pytest.approx(wanted)
    assert area_under_curve([0.1, 0.2], [True, True]) is None


def test_calibration_error_by_hand() -> None:
    # two bins: forecast 0.2 and happened 0.5, forecast 0.9 and happened 1
    assert calibration_error([0.2, 0.2, 0.9, 0.9], [0, 1, 1, 1], bins=2) == pytest.approx((2 * 0.3 + 2 * 0.1) / 4)


def test_weights_of_other_features_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weights \(2, 3, 3\), got \(2, 3, 7\)"):
        AcceptanceModel(FeatureConfig(("surprisal",)), np.zeros((2, 3, 7)), np.zeros(3))


def test_rounds_that_never_look_are_refused() -> None:
    visits, _ = watch_plans(some_rounds(), np.random.default_rng(0))
    before = visits.stage == Stage.PRE_SCAN
    only = type(visits)(*(column[before] for column in vars(visits).values()))
    with pytest.raises(ValueError, match="no position was looked at"):
        fit_acceptance(only, EVERYTHING)
