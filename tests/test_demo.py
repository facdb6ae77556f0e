"""`lede demo --quick`: the README's first command, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lede
from lede.cli import main
from lede.demo.run import LEARNED, PAPER, PROMPTS, THRESHOLDS


def test_demo_does_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert main(["demo", "--quick", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "best static setting" in told
    report = json.loads((out / "report.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["transformers", "plain", "best static", PAPER, LEARNED, THRESHOLDS]
    assert all(row["exact"] in ("yes", "ties") for row in rows.values())
    assert sum(row["exact"] == "ties" for row in rows.values()) <= 1
    assert rows[LEARNED]["acceptance_rate"] is not None
    assert rows["plain"]["speedup"] == 1
    assert len(report["agreement_by_layer"]) == lede.load_model("demo").n_layers
    assert report["agreement_by_layer"][-1] == 1
    for name in ("agreement.png", "speed.png", "report.md", "traces.zarr", "validation.zarr", "rollouts.zarr"):
        assert (out / name).exists(), name
    assert any((out / "run" / "logs").glob("events.out.tfevents.*"))
    policy = lede.load_policy(out / "policy")
    generated = lede.generate(lede.load_model("demo"), "def main():\n", policy=policy, max_new_tokens=8)
    assert generated.stats.tokens == 8
    # again into the same folder: what a demo wrote is replaced, what it did not write is not touched
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    assert main(["demo", "--quick", "--out", str(foreign)]) == 2
    assert (foreign / "thesis.tex").read_text() == "precious"


def test_stores_and_runs_of_the_user_are_not_replaced(tmp_path: Path) -> None:
    for name in ("traces.zarr", "run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    assert main(["demo", "--quick", "--out", str(tmp_path)]) == 2
    assert (tmp_path / "traces.zarr" / "mine").exists()
    assert (tmp_path / "run" / "mine").exists()


def test_a_stopped_demo_says_that_it_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lede.demo.run.gather", interrupt)
    assert main(["demo", "--quick", "--out", str(tmp_path / "demo")]) == 130
    assert capsys.readouterr().out.endswith("stopped; the demo begins anew when it is run again\n")


def test_prompts_of_the_splits_are_disjoint() -> None:
    entries = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len({entry["prompt"] for entry in entries}) == len(entries)
    counts = {split: sum(entry["split"] == split for entry in entries) for split in ("train", "validation", "test")}
    assert counts == {"train": 104, "validation": 16, "test": 24}
