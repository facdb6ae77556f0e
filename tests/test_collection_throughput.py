"""The script that measures collection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.collection_throughput import Collection, CollectionConfig, figures, main
from tests.tiny_models import N_LAYERS, prompt, tiny_model


def test_parts_yield_what_they_say() -> None:
    collection = Collection(
        tiny_model("llama"), [prompt(0, 4), prompt(1, 9)], CollectionConfig(max_new_tokens=6, env_tokens=3)
    )
    found = {name: run() for name, run in collection.parts.items()}
    told = ("generate", "forward", "forward, every head", "teacher", "teacher, branches", "teacher, stored")
    assert {found[name] for name in told} == {2 * 6}
    n_candidates = len(collection.rules.candidates)
    assert 2 * 5 <= found["teacher, played"] <= 2 * 5 * n_candidates
    assert 3 <= found["environment"] <= 3 * n_candidates
    assert 3 <= found["environment, all layers"] <= 3 * (N_LAYERS - 1)
    assert 0 < collection.storage_shares[0] < 1


def test_figures_are_medians_of_ratios_within_a_repetition() -> None:
    collection = Collection(tiny_model("llama"), [prompt(0, 4)], CollectionConfig(max_new_tokens=5))
    collection.storage_shares = [0.01, 0.5, 0.02]
    seconds = {
        "generate": [1.0, 10.0, 2.0],
        "forward": [1.0, 10.0, 1.0],
        "forward, every head": [2.0, 20.0, 2.0],
        "teacher": [3.0, 25.0, 8.0],
        "teacher, played": [4.0, 40.0, 4.0],
        "environment": [2.0, 20.0, 1.0],
        "environment, all layers": [2.0, 20.0, 2.0],
    }
    yields = {"teacher, played": 40, "environment": 2, "environment, all layers": 10}
    found = {name: {"yield": yields.get(name, 5), "seconds": each} for name, each in seconds.items()}
    told = figures(collection, found)
    assert told["teacher over generate + forward with every head"] == 1.0
    assert told["teacher over generate + forward with the last head"] == pytest.approx(2 / 3)
    assert told["storage share"] == 0.02
    assert told["transitions/s over the environment, one episode a token"] == pytest.approx(10.0)
    n_candidates = len(collection.rules.candidates)
    assert told["transitions/s over the environment, both outcomes"] == pytest.approx(2 * n_candidates * 4 / 3)
    everywhere = told["transitions/s over the environment, both outcomes, all layers"]
    assert everywhere == pytest.approx(2 * (N_LAYERS - 1) * 4 / 3 / 5)
    assert (told["bytes per transition, rollouts"], told["bytes per transition, traces"]) == (31, 24)


def test_the_script_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs" / "collection.json"
    main(CollectionConfig(batch_size=1, max_new_tokens=2, env_tokens=1, repeats=1, clock="cpu", out=out))
    record: dict[str, Any] = json.loads(out.read_text())
    assert record["settings"]["batch_size"] == 1
    assert {len(part["seconds"]) for part in record["parts"].values()} == {1}
    assert "storage share" in capsys.readouterr().out
