"""Training to copy from the text: the optimum of planted texts, both sources, and what is refused."""

from __future__ import annotations

import json
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lede.buffers.settings import StoreSettings
from lede.buffers.store import TraceStore
from lede.checkpoint import load_policy
from lede.cost_model import CostModel
from lede.cost_profile import CostProfile
from lede.evaluation import EvaluateConfig, evaluate
from lede.features import CALIBRATED_FEATURES, MEMORY_FEATURES
from lede.lookup import LookupConfig
from lede.policies import LearnedPolicy, LookupPolicy, LookupValuePolicy, SourceValuePolicy
from lede.policies.base import ExitAt, LayerState, Lookup, Policy, PreScan, PreScanState
from lede.seeding import Purpose
from lede.simulation import simulate
from lede.threshold_training import train_thresholds
from lede.trace_table import TraceTable
from lede.training import TrainConfig, train
from lede.wall_clock_data import best_static as best_exit
from tests.copied_texts import VOCABULARY, copied_text
from tests.planted_costs import PLANTED

N_LAYERS, BUDGET = 6, 90
# copies that go wrong are dear
COSTS = CostModel(N_LAYERS, (None,) * N_LAYERS, replace(PLANTED, layer_token=1e-4))
FINGERPRINT: dict[str, Any] = {
    "name": "copies", "architecture": {"n_layers": N_LAYERS}, "tokenizer": None, "logits": [1.0], "dtype": "float32",
}  # fmt: skip
PROFILE = CostProfile(
    model="copies", fingerprint=FINGERPRINT, candidates=(1, 3), contexts=(8,), repeats=1, device="cpu",
    device_name="imagined", threads=1, dtype="float32", attention="none", versions={}, measurements=(), costs=COSTS,
    residuals={},
)  # fmt: skip


def store(n_prompts: int, seed: int) -> TraceStore:
    settings = StoreSettings(
        kind="traces", model="copies", n_layers=N_LAYERS, vocab_size=VOCABULARY, candidates=(1, 3),
        fingerprint=FINGERPRINT, max_new_tokens=BUDGET,
    )  # fmt: skip
    return TraceStore(settings, [copied_text(i, BUDGET, N_LAYERS, seed) for i in range(n_prompts)])


@pytest.fixture(scope="module")
def traces() -> TraceStore:
    return store(40, 0)


@pytest.fixture(scope="module")
def test_table() -> TraceTable:
    return TraceTable.from_traces(list(store(30, 1).prompts), BUDGET, VOCABULARY)


def config(tmp_path: Path, **settings: Any) -> TrainConfig:
    PROFILE.save(tmp_path / "profile.json")
    return TrainConfig(buffer="memory", profile=str(tmp_path / "profile.json"), out=str(tmp_path / "run"), **settings)


class ByMatch(Policy):
    """Copies `length` tokens behind a match of at least `least`."""

    kind = "by match"

    def __init__(self, least: int, length: int) -> None:
        super().__init__()
        self.least, self.length = least, length

    @property
    def lookup(self) -> LookupConfig:
        return LookupConfig(3)

    def candidates_for(self, n_layers: int) -> tuple[int, ...]:
        return ()

    def pre_scan(self, state: PreScanState) -> PreScan | Lookup:
        return Lookup(self.length) if state.match is not None and state.match.length >= self.least else PreScan.SKIP

    def scan(self, state: LayerState) -> bool:
        return False

    def draft(self, state: LayerState) -> bool:
        return False


def best_rule(table: TraceTable) -> float:
    """The largest speedup of a rule that these texts are made for, chosen on them."""
    rules = [ByMatch(least, length) for least in (1, 2, 3) for length in (2, 4, 8, 16)]
    return max(simulate(rule, table, COSTS).speedup for rule in rules)


def best_static(table: TraceTable) -> float:
    return max(simulate(LookupPolicy(draft_length=n), table, COSTS).speedup for n in (1, 2, 3, 4, 6, 8, 16))


def test_the_network_finds_the_optimum_of_planted_texts(
    traces: TraceStore, test_table: TraceTable, tmp_path: Path
) -> None:
    policy = train(config(tmp_path, sources="lookup", steps=2000, eval_interval=500), traces, progress=False)
    rule, static = best_rule(test_table), best_static(test_table)
    found = simulate(policy, test_table, COSTS)
    assert rule > 1.1 * static
    assert found.speedup > 0.99 * rule
    assert found.head_reads.sum() == 0
    assert policy.config.candidates == ()
    assert policy.config.lookups == tuple(map(Lookup, (2, 4, 8, 16)))
    again = load_policy(tmp_path / "run" / "policy")
    assert isinstance(again, LearnedPolicy)
    assert simulate(again, test_table, COSTS).seconds.tolist() == found.seconds.tolist()
    settled = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (settled["episode"], settled["n_steps"], settled["sources"]) == ("round", 1, "lookup")
    assert settled["resolved"]["lookup"]["max_suffix"] == policy.config.lookup.max_suffix  # type: ignore[union-attr]


def test_the_reference_finds_it_too(traces: TraceStore, test_table: TraceTable, tmp_path: Path) -> None:
    settings = config(tmp_path, sources="lookup", algo="thresholds")
    policy = train_thresholds(settings, traces, progress=False)
    assert isinstance(policy, LookupValuePolicy)
    assert simulate(policy, test_table, COSTS).speedup > 0.98 * best_rule(test_table)
    again = load_policy(tmp_path / "run" / "policy")
    assert isinstance(again, LookupValuePolicy)
    observations = np.random.default_rng(0).random((50, len(again.features.names))).astype(np.float32)
    np.testing.assert_array_equal(again.decide(observations), policy.decide(observations))


def test_thresholds_over_both_sources(test_table: TraceTable, tmp_path: Path) -> None:
    settings = config(
        tmp_path, sources="exit,lookup", algo="thresholds", candidates="1,3", lookups=(2, 8), prune_at=(3,),
        max_suffix=3, continuation="recent", memory="none",
    )  # fmt: skip
    policy = train_thresholds(settings, store(12, 0), progress=False)
    assert isinstance(policy, SourceValuePolicy)
    assert policy.config.lookups == (Lookup(2), Lookup(8), Lookup(2, 3), Lookup(8, 3))
    assert policy.config.candidates == (1, 3)
    assert policy.fingerprint == FINGERPRINT
    again = load_policy(tmp_path / "run" / "policy")
    found = simulate(policy, test_table, COSTS)
    assert simulate(again, test_table, COSTS).seconds.tolist() == found.seconds.tolist()
    assert found.speedup > 0.95 * best_rule(test_table)
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["resolved"]["candidates"] == [1, 3]
    evaluation = evaluate(
        EvaluateConfig(
            policy=("plain",), reference=(str(tmp_path / "run" / "policy"),), traces=Path("memory"), resamples=50
        ),
        store(30, 1),
    )
    plain = evaluation.policies[0].of_reference
    assert plain is not None
    assert plain.value == pytest.approx(1 / found.speedup, rel=1e-6)
    assert plain.lower < plain.value < plain.upper


def test_thresholds_over_both_sources_remember_other_texts(tmp_path: Path) -> None:
    settings = config(
        tmp_path, sources="exit,lookup", algo="thresholds", candidates="1", lookups=(2, 8), max_suffix=3,
        continuation="recent", memory="train",
    )  # fmt: skip
    policy = train_thresholds(settings, store(12, 0), progress=False)
    assert policy.memory is not None
    assert policy.features is not None
    assert "match_remembered" in policy.features.names
    again = load_policy(tmp_path / "run" / "policy")
    assert again.memory is not None
    assert again.memory.digest == policy.memory.digest
    judged = EvaluateConfig(policy=(str(tmp_path / "run" / "policy"),), traces=Path("memory"), resamples=50)
    assert evaluate(judged, store(6, 1)).policies[0].speedup.value > 1


@pytest.mark.parametrize(("sources", "episode"), [("exit", "prompt"), ("lookup", "round"), ("exit,lookup", "round")])
def test_rounds_are_episodes_where_the_text_drafts(sources: Any, episode: str, tmp_path: Path) -> None:
    assert config(tmp_path, sources=sources).settled("traces").episode == episode


@pytest.mark.slow
def test_both_sources_beat_either(traces: TraceStore, test_table: TraceTable, tmp_path: Path) -> None:
    speedups = {}
    for sources in ("exit", "lookup", "exit,lookup"):
        settings = config(tmp_path, sources=sources, steps=1500, eval_interval=500, candidates="1,3", min_exits=1)
        policy = train(replace(settings, out=str(tmp_path / sources)), traces, progress=False)
        speedups[sources] = simulate(policy, test_table, COSTS).speedup
    assert speedups["exit,lookup"] > 0.99 * max(speedups["exit"], speedups["lookup"])
    assert policy.features.names == (*CALIBRATED_FEATURES, *MEMORY_FEATURES)
    curve = (tmp_path / "exit,lookup" / "logs" / "learning_curve.jsonl").read_text().splitlines()
    assert sum(json.loads(curve[-1])["score"]["sources"].values()) == pytest.approx(1)


@pytest.mark.parametrize("sources", [pytest.param("lookup", marks=pytest.mark.slow), "exit,lookup"])
def test_a_resumed_run_ends_in_the_same_weights(traces: TraceStore, sources: str, tmp_path: Path) -> None:
    settings = config(
        tmp_path, sources=sources, steps=30, refresh_interval=10, eval_interval=10, checkpoint_interval=5,
        lookups=(2, 4), prune_at=(3,), max_suffix=3, continuation="recent", keep="last",
    )  # fmt: skip
    whole = train(replace(settings, out=str(tmp_path / "whole")), traces, progress=False)
    train(replace(settings, steps=15), traces, progress=False)
    resumed = train(replace(settings, resume=True), traces, progress=False)
    assert whole.config.lookups == (Lookup(2), Lookup(4), Lookup(2, 3), Lookup(4, 3))
    for name, tensor in whole.tensors().items():
        np.testing.assert_array_equal(tensor, resumed.tensors()[name])


@pytest.mark.parametrize("algo", ["dqn", "thresholds"])
def test_no_two_draws_share_a_stream(
    algo: Any, traces: TraceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forecasts of layers and of copies, folds of the memory, generations of rounds: each has luck of its own."""
    places: dict[tuple[int, ...], set[str]] = {}
    spawn = np.random.SeedSequence

    def note(entropy: int, spawn_key: tuple[int, ...]) -> np.random.SeedSequence:
        frames = (each.filename for each in reversed(traceback.extract_stack(limit=4)[:-1]))
        places.setdefault(spawn_key, set()).add(next(name for name in frames if not name.endswith("seeding.py")))
        return spawn(entropy, spawn_key=spawn_key)

    monkeypatch.setattr(np.random, "SeedSequence", note)
    settings = config(
        tmp_path, sources="exit,lookup", algo=algo, steps=8, eval_interval=8, refresh_interval=4, lookups=(2,),
        max_suffix=3,
    )  # fmt: skip
    (train if algo == "dqn" else train_thresholds)(settings, traces.select(range(6)), progress=False)
    shared = {key: files for key, files in places.items() if len(files) > 1}
    assert not shared
    assert {key[0] for key in places} >= {Purpose.TRAINING, Purpose.SYNTHESIS, Purpose.COPY_FORECAST}


@pytest.mark.parametrize("sources", ["exit", "exit,lookup"])
def test_drafts_of_fixed_lengths_are_learned(traces: TraceStore, sources: str, tmp_path: Path) -> None:
    """Where deciding is dear the policy ends up with them."""
    few, steps = traces.select(range(10)), 45 if sources == "exit" else 15
    costs = replace(COSTS, costs=replace(COSTS.costs, observe=3e-3, policy=3e-3))
    settings = config(
        tmp_path, sources=sources, steps=steps, refresh_interval=15, eval_interval=45, checkpoint_interval=45,
        lookups=(2,), max_suffix=3, continuation="recent", candidates="auto", fixed_lengths=(2, 4), memory="none",
    )  # fmt: skip
    replace(PROFILE, costs=costs).save(tmp_path / "profile.json")
    policy = train(settings, few, progress=False)
    candidates = policy.config.candidates
    assert policy.config.fixed_drafts == tuple(ExitAt(layer, n) for layer in candidates or () for n in (2, 4))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["episode"] == "round"
    table = TraceTable.from_traces(list(few.prompts), BUDGET, VOCABULARY)
    best = best_exit(table, costs, layers=(1, 3), lengths=(2, 4))
    assert best.config.exit_layer in (candidates or ())
    if sources == "exit":
        assert (simulate(policy, table, costs).log.fixed > 0).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fixed_lengths": (4, 2)}, r"ascending lengths within 1\.\.max_draft = 12, got \[4, 2\]"),
        ({"fixed_lengths": (13,)}, r"within 1\.\.max_draft = 12, got \[13\]"),
        ({"fixed_lengths": (2,), "objective": "paper"}, "fixed_lengths are of drafts by layers"),
        ({"fixed_lengths": (2,), "sources": "lookup"}, "fixed_lengths are of drafts by layers"),
        ({"fixed_lengths": (2,), "sources": "exit,lookup", "algo": "thresholds"}, "alone for --algo thresholds"),
        ({"sources": "lookup", "objective": "paper"}, "sources lookup are chosen from by tokens a second"),
        ({"sources": "lookup", "algo": "thresholds", "prune_at": (2,)}, "leave out --prune-at"),
        ({"lookups": (4, 2)}, "lookups must be ascending"),
        ({"max_suffix": 99}, "max_suffix"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings).settled("traces")
