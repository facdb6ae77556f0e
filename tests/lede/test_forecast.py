"""Calibrated features: their coefficients, where they come from, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from lede.acceptance import AcceptanceModel, calibration_error, inputs
from lede.cost_tables import CostTables
from lede.draft_rounds import DraftRounds, Stage
from lede.features import CALIBRATED, CALIBRATED_FEATURES, FeatureConfig, Forecast
from lede.forecast import FORECAST_INPUTS, N_WEIGHTS
from lede.observer import Observer
from lede.optimal_drafting import DraftingProblem
from lede.reference_thresholds import fit_forecast, fit_forecasts
from lede.trace_table import TraceTable
from lede.visits import watch_plans
from tests.forecasts import made_up

INPUTS = FeatureConfig(FORECAST_INPUTS)
PROBLEM = DraftingProblem()


def some_positions(n: int = 500) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(3)
    return rng.integers(0, 2, n), rng.exponential(2.0, n), rng.exponential(3.0, n), rng.integers(0, 6, n)


def test_one_position_is_like_many() -> None:
    forecast = made_up((2, 5))
    place, surprisal, margin, drafted = some_positions()
    layer = np.array([2, 5])[place]
    many = forecast.log_chances(layer, surprisal, margin, drafted)
    rows = zip(layer.tolist(), surprisal.tolist(), margin.tolist(), drafted.tolist(), strict=True)
    one = [forecast.log_chance(*row) for row in rows]
    np.testing.assert_allclose(many, one, rtol=1e-12)
    assert len(set(np.round(many, 12))) == many.size
    assert (many < 0).all()


def test_the_regressions_are_those_of_the_survival_policy() -> None:
    forecast = made_up((2, 5))
    model = AcceptanceModel(INPUTS, [forecast.first, forecast.later], np.zeros(2))
    place, surprisal, margin, drafted = some_positions()
    seen = np.stack([surprisal, margin, drafted], axis=1).astype(np.float32)
    assert inputs(seen, INPUTS).shape[1] == N_WEIGHTS
    wanted = np.log(model.probability(seen, drafted > 0, place))
    found = forecast.log_chances(np.array([2, 5])[place], seen[:, 0], seen[:, 1], drafted)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_extreme_readings_stay_numbers() -> None:
    forecast = made_up((2,))
    for surprisal, margin in ((0.0, 1e4), (1e4, 0.0), (0.0, 0.0)):
        one = forecast.log_chance(2, surprisal, margin, 0)
        assert math.isfinite(one)
        assert one == pytest.approx(forecast.log_chances(np.array([2]), [surprisal], [margin], np.array([0]))[0])


def test_coefficients_survive_json() -> None:
    config = FeatureConfig(CALIBRATED_FEATURES, forecast=made_up((2, 5)))
    assert FeatureConfig.from_json(json.loads(json.dumps(asdict(config)))) == config
    before = {"names": ["entropy", "trace"], "top_k": 5, "window": 8, "draft_agreement": False}  # an older file
    assert FeatureConfig.from_json(before) == FeatureConfig(("entropy", "trace"))


@pytest.mark.parametrize("name", CALIBRATED)
def test_calibrated_features_want_a_forecast(name: str) -> None:
    config = FeatureConfig(("entropy", name))
    assert config.calibrated
    with pytest.raises(ValueError, match=f"features {name} need a forecast"):
        Observer(config, 8, 100)
    table = TraceTable.from_traces(PROBLEM.traces(2, 9, seed=1), 9, PROBLEM.text.vocab_size)
    costs = CostTables(PROBLEM.cost_model, (1, 3), table.max_context)
    with pytest.raises(ValueError, match="need a forecast"):
        DraftRounds(table, costs, config)
    with pytest.raises(ValueError, match=r"fitted at layers \[1\] and says nothing of \[3\]"):
        DraftRounds(table, costs, replace(config, forecast=made_up((1,))))
    with pytest.raises(ValueError, match="neither of which is among the names"):
        FeatureConfig(("entropy",), forecast=made_up((1,)))


def test_wrong_coefficients_are_refused() -> None:
    row = (0.0,) * N_WEIGHTS
    with pytest.raises(ValueError, match=rf"{N_WEIGHTS} coefficients for each .* got \[{N_WEIGHTS}\] in later"):
        Forecast((1, 2), (row, row), (row,))
    with pytest.raises(ValueError, match=r"distinct and ascending, got \[2, 1\]"):
        Forecast((2, 1), (row, row), (row, row))


def test_what_is_fitted_is_calibrated_on_other_texts() -> None:
    training, test = (
        TraceTable.from_traces(PROBLEM.traces(n, 65, seed=n), 65, PROBLEM.text.vocab_size) for n in (150, 80)
    )
    layers = PROBLEM.text.candidates
    forecast = fit_forecast(training, PROBLEM.cost_model, layers)
    assert forecast == fit_forecast(training, PROBLEM.cost_model, layers)
    model = fit_forecasts(training, PROBLEM.cost_model, layers, INPUTS)
    np.testing.assert_array_equal([forecast.first, forecast.later], model.weights)
    config = FeatureConfig(("chance", "outlook", "in_scan", "in_draft"), forecast=forecast)
    rounds = DraftRounds(test, CostTables(PROBLEM.cost_model, layers, test.max_context, PROBLEM.max_draft), config)
    visits, _ = watch_plans(rounds, np.random.default_rng(0))
    chance, outlook = visits.observations[:, 0], visits.observations[:, 1]
    whole = visits.here & visits.on_text
    for stage in (Stage.SCAN, Stage.DRAFT):
        rows, alive = visits.stage == stage, (visits.stage == stage) & visits.on_text
        assert calibration_error(chance[alive], visits.here[alive]) < 0.05
        assert calibration_error(outlook[rows], whole[rows]) < 0.05
        assert chance[alive].std() > 0.05
    scan = visits.stage == Stage.SCAN
    np.testing.assert_array_equal(chance[scan], outlook[scan])
    assert (outlook[~scan] <= chance[~scan] + 1e-6).all()
    assert not visits.observations[visits.stage == Stage.PRE_SCAN].any()
