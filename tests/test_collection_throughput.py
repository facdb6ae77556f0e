"""The script that measures collection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.collection_baselines import Baselines
from benchmarks.collection_bound import multiply_adds, multiply_adds_a_second, steps_for_every_outcome
from benchmarks.collection_throughput import Collection, CollectionConfig, figures, main
from lede.models import EarlyExitModel
from tests.tiny_models import N_LAYERS, VOCAB_SIZE, prompt, tiny_model


def test_parts_yield_what_they_say() -> None:
    collection = Collection(
        tiny_model("llama"), [prompt(0, 4), prompt(1, 9)], CollectionConfig(max_new_tokens=6, env_tokens=3)
    )
    found = {name: run() for name, run in collection.parts.items()}
    of_tokens = {name for name in found if name != "teacher, played" and not name.startswith("environment")}
    assert len(of_tokens) == 8
    assert found.pop("teacher, stored") == 32 * 6, "a whole shard"
    assert {found[name] for name in of_tokens if name in found} == {2 * 6}
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
        "transformers, generate": [5.0, 25.0, 16.0],
        "transformers, forward": [1.0, 50.0, 4.0],
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
    assert told["teacher over transformers' generate + forward"] == 2.5
    assert told["storage share"] == 0.02
    assert told["transitions/s over the environment, one episode a token"] == pytest.approx(10.0)
    n_candidates = len(collection.rules.candidates)
    assert told["transitions/s over the environment, both outcomes"] == pytest.approx(2 * n_candidates * 4 / 3)
    everywhere = told["transitions/s over the environment, both outcomes, all layers"]
    assert everywhere == pytest.approx(2 * (N_LAYERS - 1) * 4 / 3 / 5)
    replaced = told["transitions/s over the environment, steps for both outcomes"]
    assert replaced == pytest.approx(n_candidates * (n_candidates + 3) / 2 * 4 / 3)
    assert told["multiply-adds a token, every head"] == multiply_adds(collection.model)
    speed = told["multiply-adds/s of the machine"] / told["multiply-adds a token, every head"]
    most = told["transitions/s over the environment, one episode a token, the most that arithmetic allows"]
    assert most == pytest.approx(40 / 5 * speed / 1)
    assert (told["bytes per transition, rollouts"], told["bytes per transition, traces"]) == (31, 24)


def test_the_environment_can_be_left_out() -> None:
    collection = Collection(tiny_model("llama"), [prompt(0, 4)], CollectionConfig(max_new_tokens=5, env_tokens=0))
    assert not any("environment" in name or "played" in name for name in collection.parts)
    collection.storage_shares = [0.01]
    told = figures(collection, {name: {"yield": 5, "seconds": [1.0]} for name in collection.parts})
    assert told["teacher over transformers' generate + forward"] == 2.0
    assert not any("environment" in name for name in told)


def baselines(model: EarlyExitModel) -> Baselines:
    prompts = [prompt(0, 4), prompt(1, 9)]
    return Baselines(model, prompts, [[*ids, *prompt(2 + i, 6)] for i, ids in enumerate(prompts)])


@pytest.mark.parametrize("every_layer", [False, True])
def test_passes_read_the_same_positions(monkeypatch: pytest.MonkeyPatch, every_layer: bool) -> None:
    """Those of the new tokens: from the end of the shorter prompt to the end of the longer text."""
    model = tiny_model("llama")
    read: list[int] = []
    kept: list[tuple[int, ...]] = []
    head = model.head

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        read.append(hidden.shape[1])
        return head(hidden)

    monkeypatch.setattr(model, "head", noted)
    parts = baselines(model)
    assert parts.forward(every_layer) == 2 * 6
    assert sum(read) == 2 * (15 - 4) * (N_LAYERS if every_layer else 1)
    live = model.hf_model.get_output_embeddings()
    hook = live.register_forward_hook(lambda *arguments: kept.append(tuple(arguments[2].shape)))
    assert parts.transformers_forward() == 2 * 6
    hook.remove()
    assert kept == [(2, 15 - 4, VOCAB_SIZE)]


def test_what_arithmetic_allows() -> None:
    """Counted by hand for a Llama; and the machine multiplies at some speed."""
    model = tiny_model("llama")
    config = model.config
    width, heads = config.hidden_size, config.num_attention_heads
    own = width // heads
    attention = 2 * width * heads * own + 2 * width * config.num_key_value_heads * own
    layer = attention + 3 * width * config.intermediate_size
    assert multiply_adds(model) == N_LAYERS * (layer + width * VOCAB_SIZE)
    assert 1e6 < multiply_adds_a_second(tiny_model("llama", torch.float32)) < 1e16


@pytest.mark.parametrize("n_candidates", [1, 3, 19])
def test_every_outcome_takes_an_episode_for_each_exit_and_one_without(n_candidates: int) -> None:
    seen: set[tuple[int, int]] = set()
    n_steps = 0
    for plan in range(n_candidates + 1):  # where it leaves; after the last candidate it never does
        for candidate in range(min(plan + 1, n_candidates)):
            seen.add((candidate, int(candidate == plan)))
            n_steps += 1
    assert len(seen) == 2 * n_candidates
    assert steps_for_every_outcome(n_candidates) == n_steps


def test_the_script_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs" / "collection.json"
    main(CollectionConfig(batch_size=1, max_new_tokens=2, env_tokens=1, repeats=1, clock="cpu", out=out))
    record: dict[str, Any] = json.loads(out.read_text())
    assert record["settings"]["batch_size"] == 1
    assert {len(part["seconds"]) for part in record["parts"].values()} == {1}
    assert "storage share" in capsys.readouterr().out
