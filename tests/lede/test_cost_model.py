"""The cost model by itself: spans, rounds that are none, and fits of measurements that no model explains."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from lede.cost_model import CostModel, Kind, Measurement, fit, residuals, visible
from tests.planted_costs import AGAIN, BLOCKS, PLANTED, planted_model
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


def test_what_is_cheaper_again_and_steps_of_blocks_are_fitted() -> None:
    truth = CostModel(4, (None,) * 4, PLANTED, AGAIN, BLOCKS)

    def timed(kind: Kind, first: int, last: int, q: int, context: int, seconds: float) -> Measurement:
        return Measurement(kind, first, last, q, context, seconds, seconds, seconds)

    found = []
    for context in (8, 64):
        spans = [(0, 1), (0, 2), (1, 3), (0, 4)]
        found += [timed("layers", a, b, 1, context, truth.seconds(a, b, 1, context)) for a, b in spans]
        found += [timed("again", 0, b, 1, context, truth.again_seconds(b, context)) for b in (1, 2, 3)]
        found += [
            timed("verify", a, 4, q, context, truth.verify_seconds(a, q, context)) for a in (0, 2) for q in range(1, 9)
        ]
    found += [timed("head", 0, 0, q, 0, truth.head_seconds(q)) for q in range(1, 9)]
    model = fit(found, (None,) * 4)
    assert [layer for layer, _ in model.again] == [1, 2, 3]
    for m in found:
        if m.kind == "again":
            assert model.predict(m) == pytest.approx(m.seconds, rel=0.02)
    # the formula alone can't follow the steps: the ratios by q bring the prediction to within a few percent
    assert max(abs(model.predict(m) / m.seconds - 1) for m in found if m.kind == "verify") < 0.05
    straight = replace(model, blocks=())
    assert max(abs(straight.predict(m) / m.seconds - 1) for m in found if m.kind == "verify") > 0.1
    assert truth.again_seconds(3, 8) < truth.seconds(0, 3, 1, 8)
