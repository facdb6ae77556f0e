"""Training for seconds: the optimum of a problem with a known answer, resumption, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from lede.buffers.settings import StoreSettings
from lede.buffers.store import TraceStore, open_store
from lede.buffers.writer import StoreWriter
from lede.cost_profile import CostProfile
from lede.features import CALIBRATED_FEATURES, DEFAULT_FEATURES
from lede.optimal_drafting import DraftingProblem
from lede.policies import LearnedPolicy, SurvivalPolicy
from lede.run_folder import RunFolder
from lede.simulation import simulate
from lede.threshold_training import train_thresholds
from lede.trace_table import TraceTable
from lede.training import TrainConfig, train
from lede.training_data import load_data

PROBLEM = DraftingProblem()
FINGERPRINT: dict[str, Any] = {
    "name": "drafting",
    "architecture": {"n_layers": PROBLEM.text.n_layers},
    "tokenizer": None,
    "logits": [1.0, 2.0],
    "dtype": "float32",
}
PROFILE = CostProfile(
    model="drafting", fingerprint=FINGERPRINT, candidates=PROBLEM.text.candidates, contexts=(8,), repeats=1,
    device="cpu", device_name="imagined", threads=1, dtype="float32", attention="none", versions={}, measurements=(),
    costs=PROBLEM.cost_model, residuals={},
)  # fmt: skip
N_TOKENS = 65


def store(n_prompts: int, seed: int, problem: DraftingProblem = PROBLEM) -> TraceStore:
    settings = StoreSettings(
        kind="traces",
        model="drafting",
        n_layers=PROBLEM.text.n_layers,
        vocab_size=PROBLEM.text.vocab_size,
        candidates=PROBLEM.text.candidates,
        fingerprint=FINGERPRINT,
        max_new_tokens=2 * N_TOKENS,
    )
    return TraceStore(settings, problem.traces(n_prompts, N_TOKENS, seed))


@pytest.fixture(scope="module")
def traces() -> TraceStore:
    return store(150, 0)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    PROFILE.save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def learn(
    traces: TraceStore, profile: str | None, out: Path, validation: TraceStore | None = None, **settings: Any
) -> LearnedPolicy:
    given: dict[str, Any] = {"max_draft": PROBLEM.max_draft, "features": PROBLEM.features.names, **settings}
    config = TrainConfig(buffer="memory", profile=profile, out=str(out), **given)
    return train(config, traces, validation, progress=False)


@pytest.mark.parametrize(
    ("episode", "shaping", "least"),
    [
        ("prompt", False, 0.99),
        pytest.param("round", False, 0.99, marks=pytest.mark.slow),
        pytest.param("prompt", True, 0.99, marks=pytest.mark.slow),
    ],
)
def test_the_best_round_is_found(profile: str, tmp_path: Path, episode: str, shaping: bool, least: float) -> None:
    varied: dict[str, Any] = {"episode": episode, "shaping": shaping, "steps": 8000, "eval_interval": 1000}
    policy = learn(store(300, 0), profile, tmp_path / "run", store(150, 5), **varied)
    # long texts, since a text's end cuts its last round short
    table = TraceTable.from_traces(PROBLEM.traces(500, 257, seed=9), 600, PROBLEM.text.vocab_size)
    share = simulate(policy, table, PROBLEM.cost_model).rate / PROBLEM.rate()
    assert share > least, f"{share:.4f} of the optimum"
    assert share < 1.01  # what luck there is in 500 texts


def test_a_resumed_run_is_the_uninterrupted_one(traces: TraceStore, profile: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "refresh_interval": 40, "generations": 2, "eval_interval": 50, "checkpoint_interval": 50, "batch_size": 32,
    }  # fmt: skip
    whole = learn(traces, profile, tmp_path / "whole", steps=200, **settings)
    learn(traces, profile, tmp_path / "parts", steps=110, **settings)
    (tmp_path / "parts" / "checkpoints" / "step_000000110.pt").unlink()  # as if killed after step 100
    resumed = learn(traces, profile, tmp_path / "parts", steps=200, resume=True, **settings)
    for name, tensor in whole.tensors().items():
        np.testing.assert_array_equal(resumed.tensors()[name], tensor)
    curves = [RunFolder(tmp_path / name).curve.read_text() for name in ("whole", "parts")]
    assert curves[0] == curves[1]


def test_the_curve_says_what_is_lost_where(traces: TraceStore, profile: str, tmp_path: Path) -> None:
    policy = learn(traces, profile, tmp_path / "run", steps=300, eval_interval=100)
    points = [json.loads(line) for line in RunFolder(tmp_path / "run").curve.read_text().splitlines()]
    last = points[-1]["score"]
    assert last["speedup"] > 1
    assert abs(last["reward"]) < 0.5
    assert sum(last["exits"].values()) == pytest.approx(1)
    assert sum(last["regret"].values()) < 1
    assert set(last["regret"]) >= {"inspection", "wrong_layer"}
    assert abs(last["q_error"]) < 20
    assert policy.profile == PROFILE
    assert LearnedPolicy.from_pretrained(str(tmp_path / "run" / "policy")).profile == PROFILE


def test_the_forecast_is_fitted_and_travels_with_the_policy(traces: TraceStore, profile: str, tmp_path: Path) -> None:
    policy = learn(traces, profile, tmp_path / "run", features=None, candidates="1,3", steps=60, eval_interval=30)
    assert policy.features.names == CALIBRATED_FEATURES
    assert policy.features.forecast is not None
    assert policy.features.forecast.layers == policy.config.candidates == (1, 3)
    loaded = LearnedPolicy.from_pretrained(str(tmp_path / "run" / "policy"))
    assert loaded.config == policy.config
    table = TraceTable.from_traces(PROBLEM.traces(20, 65, seed=9), 600, PROBLEM.text.vocab_size)
    played = [simulate(each, table, PROBLEM.cost_model).seconds for each in (policy, loaded)]
    np.testing.assert_array_equal(played[0], played[1])
    again = learn(traces, profile, tmp_path / "again", features=None, candidates="1,3", steps=1, eval_interval=1)
    assert again.features == policy.features


def test_training_stops_early_without_a_new_best(traces: TraceStore, profile: str, tmp_path: Path) -> None:
    learn(traces, profile, tmp_path / "run", steps=3000, eval_interval=20, patience=2, learning_rate=1e-9)
    points = RunFolder(tmp_path / "run").curve.read_text().splitlines()
    assert len(points) < 30


def test_the_paper_objective_is_scored_in_seconds_too(traces: TraceStore, profile: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"features": None, "objective": "paper", "steps": 100, "eval_interval": 50}
    policy = learn(traces, profile, tmp_path / "run", **settings)
    assert not policy.decides_pre_scan
    points = [json.loads(line) for line in RunFolder(tmp_path / "run").curve.read_text().splitlines()]
    assert points[-1]["score"]["speedup"] > 0.3
    assert points[-1]["score"]["reward"] < 1  # the paper's, not the speedup


def test_the_objective_follows_from_what_is_given() -> None:
    config = TrainConfig(buffer="b", out="o", profile="p")
    settled = config.settled("traces")
    assert (settled.objective, settled.episode, settled.keep) == ("wall-clock", "prompt", "best")
    assert settled.features == CALIBRATED_FEATURES
    plain = TrainConfig(buffer="b", out="o").settled("traces")
    assert (plain.objective, plain.episode, plain.keep, plain.features) == ("paper", "token", "last", None)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("traces", {"objective": "wall-clock"}, "needs a cost profile"),
        ("transitions", {"objective": "wall-clock"}, "needs traces"),
        ("transitions", {"profile": "p"}, "need a buffer of traces"),
        ("transitions", {"candidates": "2,4"}, "need a buffer of traces"),
        ("traces", {"profile": "p", "episode": "token"}, "episodes of a prompt or a round, got 'token'"),
        ("traces", {"episode": "round"}, "belongs to the wall-clock objective"),
        ("traces", {"profile": "p", "gamma": 0.9}, r"has gamma 1.*got 0.9"),
        ("traces", {"profile": "p", "features": ("depth", "in_scan")}, r"\['in_draft'\] is missing"),
        ("traces", {"profile": "p", "features": ("foo",)}, r"features \['foo'\] must be distinct names out of"),
    ],
)
def test_what_does_not_fit_is_refused(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(buffer="b", out="o", **settings).settled(kind)


@pytest.mark.parametrize("whose", ["training", "validation"])
def test_texts_without_room_for_a_draft_are_refused(whose: str, profile: str, tmp_path: Path) -> None:
    """Of two tokens the prefill gives one and a plain pass the other: nobody is asked."""
    short = TraceStore(replace(store(1, 0).settings, max_new_tokens=2), PROBLEM.traces(3, 2, seed=0))
    buffer, validation = (short, None) if whose == "training" else (store(3, 0), short)
    with pytest.raises(ValueError, match=f"the {whose} traces were collected with max_new_tokens 2, which leaves no"):
        learn(buffer, profile, tmp_path / "run", validation)


def test_a_profile_of_another_model_is_refused(traces: TraceStore, tmp_path: Path) -> None:
    other = replace(PROFILE, fingerprint={**FINGERPRINT, "architecture": {"n_layers": 7}})
    other.save(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"profile is of another model than the buffer .*n_layers.*lede profile"):
        learn(traces, str(tmp_path / "other.json"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_plans_are_never_chosen_where_they_are_illegal(traces: TraceStore, profile: str, tmp_path: Path) -> None:
    from lede.learner import Learner

    config = TrainConfig(buffer="b", out="o", profile=profile).settled("traces")
    flags = [PROBLEM.features.names.index(name) for name in ("in_scan", "in_draft")]
    mean, std = np.full(6, 0.3), np.full(6, 0.4)
    learner = Learner(config, mean, std, seed=0, n_actions=5, stage_flags=flags)
    rng = np.random.default_rng(0)
    seen = rng.random((400, 6)).astype(np.float32)
    stage = rng.integers(0, 3, 400)
    seen[:, flags] = np.eye(3, dtype=np.float32)[stage][:, 1:]
    chosen = learner.target_greedy(seen)
    assert chosen[stage > 0].max() <= 1
    assert chosen[stage == 0].max() >= 2
    with pytest.raises(ValueError, match="plans of the pre-scan need the features"):
        Learner(config, mean, std, seed=0, n_actions=5)


def test_thresholds_look_at_the_features_that_are_given(profile: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"buffer": "memory", "profile": profile, "algo": "thresholds", "max_draft": 3}
    names = ("surprisal", "drafted", "in_scan", "in_draft")
    policy = train_thresholds(
        TrainConfig(out=str(tmp_path / "a"), features=names, **given), store(4, 0), progress=False
    )
    assert policy.features is not None
    assert policy.features.names == ("surprisal", "drafted")
    odd = TrainConfig(out=str(tmp_path / "b"), features=("trace", *names), **given)
    with pytest.raises(ValueError, match="trace depend on decisions before"):
        train_thresholds(odd, store(4, 0), progress=False)


def test_thresholds_are_found_without_a_network(traces: TraceStore, profile: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"buffer": "memory", "profile": profile, "max_draft": PROBLEM.max_draft}
    config = TrainConfig(out=str(tmp_path / "run"), algo="thresholds", **given)
    policy = train_thresholds(config, traces, progress=False)
    table = TraceTable.from_traces(PROBLEM.traces(100, 257, seed=9), 600, PROBLEM.text.vocab_size)
    assert simulate(policy, table, PROBLEM.cost_model).rate > 0.95 * PROBLEM.rate()
    loaded = SurvivalPolicy.from_pretrained(str(tmp_path / "run" / "policy"))
    assert loaded.config == policy.config
    assert loaded.profile == PROFILE
    with pytest.raises(ValueError, match="holds a run already"):
        train_thresholds(config, traces, progress=False)
    with pytest.raises(ValueError, match=r"call lede\.threshold_training\.train_thresholds"):
        train(config, traces, progress=False)
    with pytest.raises(ValueError, match="need traces and a cost profile"):
        replace(config, profile=None).settled("traces")


def test_candidates_are_searched_if_asked(traces: TraceStore, profile: str, tmp_path: Path) -> None:
    policy = learn(traces, profile, tmp_path / "run", candidates="auto", steps=20, eval_interval=10)
    found = policy.config.candidates
    assert found is not None
    assert 1 <= len(found) <= 4
    resolved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert resolved["candidates"] == "auto"
    assert tuple(resolved["resolved"]["candidates"]) == found
    with pytest.raises(ValueError, match="auto weighs what inspections cost and needs a cost profile"):
        learn(traces, None, tmp_path / "none", candidates="auto", features=None)


@pytest.mark.parametrize(("objective", "window"), [("wall-clock", 2**19), ("paper", 2**19), ("paper", 100)])
def test_what_is_held_out_chooses_no_candidates(
    objective: Literal["wall-clock", "paper"],
    window: int,
    profile: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[int] = []

    def search(table: TraceTable, *args: Any, **settings: Any) -> SimpleNamespace:
        searched.extend(table.prompt_index.tolist())
        return SimpleNamespace(candidates=PROBLEM.text.candidates)

    monkeypatch.setattr("lede.candidate_search.search_candidates", search)
    whole = TraceStore(replace(store(1, 0).settings, max_new_tokens=9), PROBLEM.traces(40, 9, seed=0))
    with StoreWriter.open(tmp_path / "traces.zarr", whole.settings, shard_prompts=5) as writer:
        for trace in whole:
            writer.add(trace)
    features = CALIBRATED_FEATURES if objective == "wall-clock" else DEFAULT_FEATURES
    config = TrainConfig(
        buffer="b", out="o", profile=profile, objective=objective, window=window, candidates="auto", holdout=0.5,
        min_exits=0, max_draft=PROBLEM.max_draft, features=features,
    )  # fmt: skip
    data = load_data(config.settled("traces"), open_store(tmp_path / "traces.zarr"), None, PROFILE)
    assert data.held_out
    assert searched
    assert not set(searched) & set(data.held_out)


@pytest.mark.parametrize(
    ("acceptance", "least", "most_drafting"),
    [((0.05, 0.04, 0.03, 0.02, 0.01), 0.97, 0.02), ((0.98, 0.97, 0.96, 0.95, 0.94), 1.4, 1.0)],
    ids=["nothing to draft", "planted agreement"],
)
def test_it_skips_where_drafting_never_pays(
    profile: str, tmp_path: Path, acceptance: tuple[float, ...], least: float, most_drafting: float
) -> None:
    problem = DraftingProblem(text=replace(PROBLEM.text, acceptance=acceptance))
    found = learn(store(60, 0, problem), profile, tmp_path / "run", steps=1500)
    table = TraceTable.from_traces(problem.traces(100, 257, seed=9), 600, problem.text.vocab_size)
    played = simulate(found, table, problem.cost_model)
    assert played.speedup > least
    assert (played.log.layer > 0).mean() <= most_drafting
