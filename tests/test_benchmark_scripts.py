"""The scripts in benchmarks/: what they compute apart from running policies."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import engine_memory, engine_profile
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


def test_an_engine_profile_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = engine_profile.ProfileSettings(
        tmp_path / "engine.json",
        policy=("static:exit_layer=5;draft_length=2",),
        max_new_tokens=6,
        repeats=1,
        contexts="16,9999",
        rows="1,3",
        rows_context=8,
        compiled=False,
    )
    found = engine_profile.main(settings)
    names = ["transformers generate", "plain, eager", "static:exit_layer=5;draft_length=2, eager"]
    assert list(found["sections"]) == list(found["operations"]) == names
    for spent in list(found["sections"].values())[1:]:
        assert sum(ms for section, ms in spent.items() if section != "total") <= spent["total"]
    assert found["operations"]["plain, eager"]["products"] > 0
    assert list(found["contexts"]["eager"]) == ["token at 16", "attention at 16"], "the model has no 9,999 positions"
    assert list(found["rows"]["eager"]) == ["1 row", "3 rows"]
    assert (tmp_path / "engine.json").exists()
    assert "milliseconds a token" in capsys.readouterr().out


@pytest.mark.slow
def test_engine_memory_of_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = engine_memory.main(engine_memory.MemorySettings(tmp_path / "memory.json", max_new_tokens=4))
    assert list(found) == list(engine_memory.KINDS)
    assert all(size is None or size > 10**8 for size in found.values())
    assert "over transformers" in capsys.readouterr().out
