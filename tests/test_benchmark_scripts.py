"""The scripts in benchmarks/: what they compute apart from running policies."""

from __future__ import annotations

import pytest

from benchmarks.head_price import with_head_price
from lede.cost_model import Measurement
from lede.cost_profile import CostProfile
from tests.planted_costs import PLANTED, planted_model


def profile() -> CostProfile:
    def measured(kind: str, last: int, seconds: float) -> Measurement:
        return Measurement(kind, 0, last, 1, 8, seconds, seconds, seconds)  # type: ignore[arg-type]  # kind is a literal

    return CostProfile(
        model="demo", fingerprint={}, candidates=(2,), contexts=(8,), repeats=1, device="cpu", device_name="a chip",
        threads=1, dtype="float32", attention="sdpa", versions={}, costs=planted_model(), residuals={"all": 0.01},
        measurements=(measured("layers", 1, 6e-4), measured("head", 0, 4e-4)),
    )  # fmt: skip


def test_head_price_changes_head_reads_alone() -> None:
    before, after = profile(), with_head_price(profile(), 4.3)
    assert before.head_over_layer() == pytest.approx(2 / 3)
    assert after.head_over_layer() == pytest.approx(4.3)
    by = 4.3 / (2 / 3)
    assert after.costs.head_seconds(3) == pytest.approx(by * before.costs.head_seconds(3))
    assert after.costs.seconds(1, 4, 3, 100) == before.costs.seconds(1, 4, 3, 100)
    dearer = after.costs.plain_seconds(8) - before.costs.plain_seconds(8)
    assert dearer == pytest.approx((by - 1) * PLANTED.head)
    assert CostProfile.from_json(before.to_json()) == before


def test_head_price_wants_a_price() -> None:
    with pytest.raises(ValueError, match="above 0, got -1"):
        with_head_price(profile(), -1)
