"""The script that times the booking of seconds: its arithmetic, what it switches off, and a run on short texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.metrics_cost import MetricsCost, MetricsSettings, Unread, main, once
from lede import generation
from lede.intervals import Interval
from lede.statistics import DecodingStats, Meter
from tests.tiny_models import tiny_model


def test_told_apart_is_clear_of_the_control() -> None:
    control = Interval(1.0, 0.99, 1.01)
    assert not MetricsCost("plain", 8, Interval(1.01, 1.0, 1.02), control).told_apart
    assert MetricsCost("plain", 8, Interval(1.03, 1.02, 1.04), control).told_apart
    assert MetricsCost("plain", 8, Interval(0.97, 0.96, 0.98), control).told_apart


def test_off_books_nothing_and_on_everything() -> None:
    on, off = Meter(), Unread()
    for meter in (on, off):
        meter.enter("draft")
        meter.enter("verify")
    assert off.stats().seconds.total == 0
    assert on.stats().seconds.draft > 0


def test_the_meter_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    stats = Meter.stats

    def recorded(self: Meter) -> DecodingStats:
        made.append(type(self).__name__)
        return stats(self)

    monkeypatch.setattr(Meter, "stats", recorded)
    model = tiny_model("llama")
    assert once(model, None, [1, 2, 3], 4, "off") > 0
    assert once(model, None, [1, 2, 3], 4, "on") > 0
    assert made == ["Unread", "Meter"]
    assert vars(generation)["Meter"] is Meter


def test_a_run_on_short_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\ndef f(x):\n")
    out = tmp_path / "metrics.json"
    policies = ("plain", "static:exit_layer=5;draft_length=2")
    found = main(MetricsSettings(prompts, out, policy=policies, n_prompts=2, max_new_tokens=4))
    assert [each.policy for each in found] == list(policies)
    assert [each["told_apart"] for each in json.loads(out.read_text())] == [each.told_apart for each in found]
    assert "on / off" in capsys.readouterr().out
