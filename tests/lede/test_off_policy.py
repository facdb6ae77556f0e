"""Fitted Q evaluation on a problem whose values are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from lede.buffers.playback import synthesize
from lede.buffers.settings import StoreSettings
from lede.buffers.store import TraceStore, TransitionStore
from lede.features import FeatureConfig
from lede.off_policy import FqeConfig, evaluate_off_policy, fitted_value
from lede.optimal_stopping import StoppingProblem
from lede.policies.learned import LearnedPolicy
from lede.transitions import Greedy, Transitions

PROBLEM = StoppingProblem()
FEATURES = FeatureConfig()
THRESHOLD = 1.3  # entropy, between two states


@pytest.fixture(scope="module")
def traces() -> TraceStore:
    settings = StoreSettings(
        kind="traces",
        model="stopping",
        n_layers=PROBLEM.n_layers,
        vocab_size=PROBLEM.vocab_size,
        candidates=PROBLEM.candidates,
        features=FEATURES,
    )
    return TraceStore(settings, PROBLEM.traces(n_prompts=300, n_tokens=51, seed=0))


@pytest.fixture(scope="module")
def logged(traces: TraceStore) -> Transitions:
    return Transitions.from_rollouts([rollout for seed in range(4) for rollout in synthesize(traces, seed=seed)])


def acting(exits: npt.NDArray[np.bool_]) -> Greedy:
    """A policy that exits where the table `(candidate, state)` says so."""

    def greedy(observations: npt.NDArray[np.float32]) -> npt.NDArray[np.integer]:
        layer = observations[:, FEATURES.names.index("depth")] * PROBLEM.n_layers
        entropy = observations[:, FEATURES.names.index("entropy")]
        k = np.abs(layer[:, None] - np.asarray(PROBLEM.candidates)).argmin(axis=1)
        state = np.abs(entropy[:, None] - np.asarray(PROBLEM.entropies)).argmin(axis=1)
        return np.asarray(exits[k, state], dtype=np.int64)

    return greedy


def threshold_policy(threshold: float = THRESHOLD) -> LearnedPolicy:
    """Exits where the entropy is below the threshold."""
    weight = np.zeros((2, len(FEATURES.names)))
    weight[1, FEATURES.names.index("entropy")] = -1.0
    layers = [(weight, np.asarray([0.0, threshold]))]
    return LearnedPolicy.from_network(layers, features=FEATURES, candidates=PROBLEM.candidates)


def always_at(place: int) -> npt.NDArray[np.bool_]:
    """Exits at one candidate, whatever the state."""
    exits = np.zeros_like(PROBLEM.solve()[0])
    exits[place] = True
    return exits


@pytest.mark.parametrize("place", [None, 0, -1])
def test_the_estimate_is_near_the_true_value(place: int | None, logged: Transitions) -> None:
    exits = PROBLEM.solve()[0] if place is None else always_at(place)
    estimate = fitted_value(logged, acting(exits), FqeConfig(steps=1500))
    assert estimate == pytest.approx(PROBLEM.value(exits), abs=0.06)


def test_the_huber_loss_is_further_off(logged: Transitions) -> None:
    """A value is the mean of about +1.8 and -1.2, and the Huber loss fits something between that and their median."""
    exits = always_at(1)
    estimate = fitted_value(logged, acting(exits), FqeConfig(steps=1000, loss="huber"))
    assert estimate > PROBLEM.value(exits) + 0.1


def test_truth_and_estimate_of_a_learned_policy(traces: TraceStore) -> None:
    found = evaluate_off_policy(threshold_policy(), traces, config=FqeConfig(steps=1000))
    exits = np.tile(np.asarray(PROBLEM.entropies) < THRESHOLD, (len(PROBLEM.candidates), 1))
    assert found.truth == pytest.approx(PROBLEM.value(exits), abs=0.05)
    assert abs(found.distance) < 0.06
    assert found.distance == found.estimate - found.truth
    assert found.logged < found.truth - 0.2  # uniform decisions are a poor behaviour
    assert found.n_transitions > 300 * 50


def test_the_same_seed_gives_the_same_estimate(logged: Transitions) -> None:
    exits, _ = PROBLEM.solve()
    estimates = [fitted_value(logged, acting(exits), FqeConfig(steps=20, seed=seed)) for seed in (3, 3, 4)]
    assert estimates[0] == estimates[1]
    assert estimates[0] != estimates[2]


def test_a_log_of_other_decisions_is_refused(traces: TraceStore) -> None:
    log = synthesize(traces, "uniform", candidates=(2, 4))
    with pytest.raises(ValueError, match=r"candidates: \(2, 4\) / \(2, 4, 6, 8, 10, 12\)"):
        evaluate_off_policy(threshold_policy(), traces, log)


def test_a_log_of_another_process_is_refused(traces: TraceStore) -> None:
    log = synthesize(traces, "uniform")
    warm = TransitionStore(replace(log.settings, temperature=1.0), list(log))
    with pytest.raises(
        ValueError, match=r"recorded otherwise than the traces \(log / traces\): temperature: 1.0 / 0.0"
    ):
        evaluate_off_policy(threshold_policy(), traces, warm)


def test_features_of_rounds_are_refused(traces: TraceStore) -> None:
    policy = LearnedPolicy.from_network(
        [(np.zeros((2, 2)), np.zeros(2))], features=FeatureConfig(("entropy", "acceptance")), candidates=(2, 4)
    )
    with pytest.raises(ValueError, match="acceptance"):
        evaluate_off_policy(policy, traces)


def test_prompt_episodes_are_refused(logged: Transitions) -> None:
    with pytest.raises(ValueError, match="token episodes"):
        fitted_value(replace(logged, episode="prompt"), acting(PROBLEM.solve()[0]))
