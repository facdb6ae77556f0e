"""The learner: what d3rlpy computes, what is frozen, and what importing it leaves alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lede.learner import Learner
from lede.policies.learned import LearnedPolicy
from lede.training import TrainConfig
from lede.transitions import NStepBatch

MEAN, STD = np.asarray([4.0, 2.0, 1.0, 0.3]), np.asarray([2.0, 0.5, 1.0, 0.1])


def make_learner(**settings: Any) -> Learner:
    values = {"hidden": (16, 8), "learning_rate": 1e-2, "averaging": 0.0, **settings}
    return Learner(TrainConfig(buffer="none", out="none", **values), MEAN, STD, seed=3)


def observations(n: int, seed: int = 0) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (MEAN + STD * rng.normal(size=(n, 4))).astype(np.float32)


def random_batch(n: int = 64, seed: int = 0, only_continue: bool = False) -> NStepBatch:
    rng = np.random.default_rng(seed)

    def column(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        return values.astype(np.float32)[:, None]

    return NStepBatch(
        observations=observations(n, seed),
        actions=column(np.zeros(n) if only_continue else rng.integers(0, 2, n)),
        rewards=column(rng.normal(size=n)),
        next_observations=observations(n, seed + 1),
        terminals=column(rng.random(n) < 0.3),
        intervals=column(rng.integers(0, 4, n)),
    )


def values(learner: Learner, x: npt.NDArray[np.float32], which: str = "q_funcs") -> npt.NDArray[np.float64]:
    """Q `(row, action)` by hand, normalisation included."""
    network = getattr(learner.algo.impl.modules, which)[0]
    with torch.no_grad():
        found: torch.Tensor = network(torch.as_tensor(((x - MEAN) / STD).astype(np.float32))).q_value
    return found.numpy().astype(np.float64)


@pytest.mark.parametrize("algo", ["dqn", "double-dqn", "cql"])
def test_the_frozen_policy_decides_like_the_algorithm(algo: str) -> None:
    learner = make_learner(algo=algo)
    for seed in range(30):
        learner.update(random_batch(seed=seed))
    policy = LearnedPolicy.from_network(learner.layers(), mean=learner.mean, std=learner.std)
    x = observations(1000, seed=99)
    np.testing.assert_allclose(policy.q_values(x), values(learner, x), atol=1e-4)
    assert np.mean(policy.greedy(x) == learner.algo.predict(x)) > 0.998  # but for rounding at a tie
    assert 0.05 < policy.greedy(x).mean() < 0.95


@pytest.mark.parametrize("algo", ["dqn", "double-dqn", "cql"])
def test_the_loss_is_the_formula(algo: str) -> None:
    learner = make_learner(algo=algo, gamma=0.9, target_update_interval=1000, cql_alpha=0.25)
    for seed in range(5):  # so that network and target differ
        learner.update(random_batch(seed=seed))
    batch = random_batch(seed=7)
    n = np.arange(len(batch.actions))
    q, q_next = values(learner, batch.observations), values(learner, batch.next_observations)
    q_target = values(learner, batch.next_observations, "targ_q_funcs")
    best = (q_target if algo == "dqn" else q_next).argmax(axis=1)
    assert not np.array_equal(q_target.argmax(axis=1), q_next.argmax(axis=1))
    action = batch.actions[:, 0].astype(int)
    wanted = batch.rewards[:, 0] + 0.9 ** batch.intervals[:, 0] * q_target[n, best] * (1 - batch.terminals[:, 0])
    loss = np.mean(0.5 * (q[n, action] - wanted) ** 2)
    if algo == "cql":
        loss += 0.25 * np.mean(np.log(np.exp(q).sum(axis=1)) - q[n, action])
    assert learner.update(batch) == pytest.approx(loss, rel=1e-5)


def test_the_squared_error_differs_from_huber_where_errors_exceed_one() -> None:
    batch = random_batch(seed=7)
    far = NStepBatch(**{**vars(batch), "rewards": batch.rewards + 10})
    squared, huber = (make_learner(loss=loss).update(far) for loss in ("squared", "huber"))
    assert squared > 2 * huber


def test_two_actions_though_the_data_hold_one() -> None:
    learner = make_learner()
    learner.update(random_batch(only_continue=True))
    assert learner.layers()[-1][0].shape == (2, 8)


def test_target_greedy_follows_the_target_network_only() -> None:
    learner = make_learner(target_update_interval=10)
    x = observations(500, seed=5)
    learner.update(random_batch(seed=0))  # step 0 copies
    before = learner.target_greedy(x)
    assert np.array_equal(before, values(learner, x, "targ_q_funcs").argmax(axis=1))
    for seed in range(1, 10):
        learner.update(random_batch(seed=seed))
    assert np.array_equal(learner.target_greedy(x), before)
    learner.update(random_batch(seed=10))
    assert not np.array_equal(learner.target_greedy(x), before)


def test_the_average_lags_behind_and_spans_recent_weights() -> None:
    learner, seen = make_learner(averaging=0.9), []
    for seed in range(200):
        learner.update(random_batch(seed=seed))
        seen.append(learner.algo.impl.q_function[0].state_dict()["_fc.bias"].numpy().copy())
    share = [max(0.1, 10 / (step + 10)) for step in range(1, 201)]
    average = np.zeros(2)
    for each, weight in zip(share, seen, strict=True):
        average = (1 - each) * average + each * weight
    np.testing.assert_allclose(learner.layers()[-1][1], average, atol=1e-5)
    assert not np.allclose(average, seen[-1], atol=1e-5)


def test_the_callers_random_state_is_left_alone_and_the_seed_decides() -> None:
    before = torch.random.get_rng_state()
    first, second = make_learner(), make_learner()
    assert torch.equal(torch.random.get_rng_state(), before)
    for (a, _), (b, _) in zip(first.layers(), second.layers(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_importing_d3rlpy_prints_nothing_and_leaves_torch_alone() -> None:
    code = """
import torch
torch.cuda.is_available = lambda: True  # d3rlpy changes settings where CUDA is there
from lede.quiet_d3rlpy import import_d3rlpy
assert import_d3rlpy().__name__ == "d3rlpy"
import torch._dynamo.config
assert torch.get_float32_matmul_precision() == "highest", torch.get_float32_matmul_precision()
assert not torch._dynamo.config.compiled_autograd
import gym_notices.notices
assert gym_notices.notices.notices
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
