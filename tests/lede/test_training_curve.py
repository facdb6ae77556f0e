"""Scores of the greedy policy: played on traces, and read off rollouts that agree with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from lede.buffers.playback import synthesize
from lede.buffers.settings import StoreSettings
from lede.buffers.store import TraceStore
from lede.learning_curve import (
    CurvePoint,
    GreedyScore,
    LearningCurve,
    read_curve,
    score_on_rollouts,
    score_on_traces,
)
from lede.optimal_stopping import StoppingProblem
from lede.sweep import SweepConfig, sweep

PROBLEM = StoppingProblem()
SETTINGS = StoreSettings(kind="traces", model="none", n_layers=16, vocab_size=64, candidates=PROBLEM.candidates)


def low_entropy(observations: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    return (observations[:, 1] < 1).astype(np.int64)


def never(observations: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    return np.zeros(len(observations), dtype=np.int64)


def by_hand(store: TraceStore) -> tuple[float, float, float, float]:
    """Reward, acceptance, exit layer and exit rate of `low_entropy`, token by token."""
    rewards, matches, layers, n_tokens = [], [], [], 0
    for trace in store:
        for t in range(trace.n_decided):
            n_tokens += 1
            reward = 0.0
            for layer in PROBLEM.candidates:
                if trace.entropy[t, layer - 1] < 1:
                    match = float(trace.match[t, layer - 1])
                    reward += match * 1 + (1 - match) * -2 + (16 - layer) / 16
                    matches.append(match)
                    layers.append(layer)
                    break
                reward -= 0.01
            rewards.append(reward)
    return float(np.mean(rewards)), float(np.mean(matches)), float(np.mean(layers)), len(matches) / n_tokens


@pytest.mark.parametrize("sampled", [False, True])
def test_score_on_traces_is_exact(sampled: bool) -> None:
    traces = PROBLEM.traces(n_prompts=5, n_tokens=21, seed=1)
    if sampled:  # probabilities of a match, of which the score takes the expectation
        rng = np.random.default_rng(0)
        traces = [replace(trace, match=rng.random(trace.match.shape).astype(np.float32)) for trace in traces]
    store = TraceStore(SETTINGS, traces)
    score = score_on_traces(store.prompts, SETTINGS, low_entropy)
    found = (score.reward, score.acceptance, score.exit_layer, score.exit_rate)
    assert found == pytest.approx(by_hand(store), abs=1e-6)
    assert score.n_tokens == 100


def test_score_on_uniform_rollouts_is_near_the_score_on_their_traces() -> None:
    store = TraceStore(SETTINGS, PROBLEM.traces(n_prompts=60, n_tokens=101, seed=2))
    exact = score_on_traces(store.prompts, SETTINGS, low_entropy)
    read = score_on_rollouts(synthesize(store, seed=4).prompts, low_entropy)
    assert exact.acceptance is not None
    assert exact.exit_layer is not None
    assert read.n_tokens == pytest.approx(store.n_rows / (len(PROBLEM.candidates) + 1), rel=0.1)
    assert read.reward == pytest.approx(exact.reward, abs=0.15)
    assert read.acceptance == pytest.approx(exact.acceptance, abs=0.05)
    assert read.exit_layer == pytest.approx(exact.exit_layer, abs=0.4)
    assert read.exit_rate == pytest.approx(exact.exit_rate, abs=0.08)


def test_a_policy_that_never_exits_has_no_acceptance() -> None:
    store = TraceStore(SETTINGS, PROBLEM.traces(n_prompts=3, n_tokens=11, seed=3))
    score = score_on_traces(store.prompts, SETTINGS, never)
    assert (score.acceptance, score.exit_layer, score.exit_rate) == (None, None, 0.0)
    assert score.reward == pytest.approx(-0.01 * len(PROBLEM.candidates), abs=1e-6)


def test_curve_round_trip_and_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # files of one second are told apart, and read in order, by this counter's digits: a 10th would come before a 9th
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    score = GreedyScore(reward=1.0, acceptance=None, exit_layer=None, exit_rate=0.0, n_tokens=7)
    points = [
        CurvePoint(0, None, 0.1, 0.2, score),
        CurvePoint(10, 0.5, 0.3, 0.4, replace(score, reward=1.5, acceptance=0.9, exit_layer=4.0, exit_rate=0.5)),
        CurvePoint(20, 0.4, 0.3, 0.4, replace(score, reward=1.7)),
    ]
    with LearningCurve(tmp_path) as curve:
        for point in points:
            curve.add(point)
    assert read_curve(tmp_path / "learning_curve.jsonl") == points
    with LearningCurve(tmp_path, points[:2]) as curve:  # gone on with from step 10
        curve.add(replace(points[2], loss=0.25))
    assert read_curve(tmp_path / "learning_curve.jsonl") == [*points[:2], replace(points[2], loss=0.25)]
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [(10, 0.5), (20, 0.25)]
    assert [each.step for each in events.Scalars("greedy/reward")] == [0, 10, 20]
    assert [each.step for each in events.Scalars("greedy/acceptance")] == [10]
    assert read_curve(tmp_path / "none.jsonl") == []
    with LearningCurve(tmp_path) as curve:  # started over
        curve.add(points[0])
    assert [each.step for each in EventAccumulator(str(tmp_path)).Reload().Scalars("greedy/reward")] == [0]


def test_all_seeds_of_a_sweep_are_scored_on_the_same_prompts(tmp_path: Path) -> None:
    """Otherwise the best seed would be the one that was dealt the easiest prompts."""
    store = TraceStore(SETTINGS, PROBLEM.traces(n_prompts=20, n_tokens=9, seed=0))
    config = SweepConfig(
        buffer="memory", out=str(tmp_path / "sweep"), seeds=4, seed=3, steps=1, holdout=0.2, hidden=(4,), min_exits=0
    )
    found = sweep(config, store, progress=False)
    told = [json.loads((tmp_path / "sweep" / run.name / "config.json").read_text()) for run in found.runs]
    held = [each["resolved"]["held_out"] for each in told]
    assert len(held[0]) == 4
    assert held == [held[0]] * 4
