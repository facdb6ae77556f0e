"""The cost model by itself: spans, rounds that are none, and fits of measurements that no model explains."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from lede.cost_model import Measurement, fit, residuals, visible
from tests.planted_costs import planted_model
from tests.tiny_models import WINDOW


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scanned": (3, 2)}, "must ascend"),
        ({"scanned": (6,)}, "must ascend"),
        ({"exit_layer": 2}, "needs an exit layer and tokens"),
        ({"n_drafted": 2}, "needs an exit layer and tokens"),
        ({"scanned": (1, 2), "exit_layer": 1, "n_drafted": 1}, "ended at layer 2, not at the exit layer 1"),
        ({"exit_layer": 6, "n_drafted": 1}, "outside 1..5"),
        ({"context": -1}, "context at least 0"),
    ],
)
def test_what_is_no_round_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planted_model().round_seconds(**{"context": 8, **arguments})


def test_spans() -> None:
    model = planted_model()
    assert model.seconds(3, 3) == model.seconds(3, 3, resumed=True) == 0
    assert model.seconds(0, 4, 1, 9) == pytest.approx(
        model.seconds(0, 2, 1, 9) + model.seconds(2, 4, 1, 9, resumed=True)
    )
    for wrong in ((3, 2), (0, 7), (-1, 2)):
        with pytest.raises(ValueError, match="not a span"):
            model.seconds(*wrong)
    with pytest.raises(ValueError, match="q must be at least 1"):
        model.head_seconds(0)
    assert visible([None, WINDOW], 0, 2, 100) == 100 + WINDOW - 1


def measured(kind: Any, q: int, context: int, seconds: float, last: int = 0) -> Measurement:
    return Measurement(kind, 0, last, q, context, seconds, seconds, seconds)


def test_no_cost_is_negative_and_the_residual_says_so() -> None:
    falling = [measured("head", q, 0, 1.0 - 0.04 * q) for q in range(1, 17)]
    rows = [*falling, measured("layers", 1, 4, 1.0, 2), measured("layers", 1, 8, 1.0, 2)]
    found = fit(rows, [None, None])
    assert min(asdict(found.costs).values()) >= 0
    assert found.costs.head_token == 0
    left = residuals(found, rows)
    assert left["head"] > 0.05
    assert left["layers"] < 1e-9


def test_one_context_predicts_the_same_behind_any() -> None:
    rows = [measured("layers", 1, 64, 1e-3 * last + 1e-4, last) for last in (1, 2, 3)]
    found = fit(rows, [None] * 3)
    assert found.costs.layer_context == 0
    assert found.seconds(0, 3, 1, 64) == pytest.approx(3.1e-3)
    assert found.seconds(0, 3, 1, 640) == found.seconds(0, 3, 1, 64)
