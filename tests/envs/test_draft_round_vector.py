from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from lede.buffers import TraceStore
from lede.cost_model import CostModel
from lede.envs import DraftRoundEnv, DraftRoundVectorEnv
from lede.features import WALL_CLOCK_FEATURES
from tests.buffers.samples import N_LAYERS, make_trace, settings
from tests.planted_costs import PLANTED

N = 3
COSTS = CostModel(N_LAYERS, (None,) * N_LAYERS, PLANTED)
STORE = TraceStore(settings(max_new_tokens=12), [make_trace(i, 12 - i, eos=i > 0) for i in range(N)])
SAMPLED = TraceStore(settings(max_new_tokens=12), [make_trace(i, 12, eos=False, sampled=True) for i in range(N)])


def make(num_envs: int = N, **changes: Any) -> DraftRoundVectorEnv:
    defaults = {"traces": STORE, "profile": COSTS, "max_draft": 4}
    env = gymnasium.make_vec("lede/DraftRound-v0", num_envs=num_envs, **{**defaults, **changes})
    assert isinstance(env, DraftRoundVectorEnv)
    return env


def legal(infos: dict[str, Any], rng: np.random.Generator) -> Any:
    """A random legal action for every lane."""
    return (rng.random(infos["action_mask"].shape) * infos["action_mask"]).argmax(axis=1)


def test_spaces_masks_and_autoreset_mode() -> None:
    env = make()
    assert env.action_space == gymnasium.spaces.MultiDiscrete([5, 5, 5])
    assert env.observation_space.shape == (3, len(WALL_CLOCK_FEATURES))
    _, infos = env.reset(seed=0)
    assert infos["action_mask"].dtype == np.int8
    for _ in range(20):
        chosen = env.action_space.sample(tuple(infos["action_mask"]))
        assert (np.take_along_axis(infos["action_mask"], chosen[:, None], axis=1) == 1).all()
        infos = env.step(chosen)[4]
    modern = tuple(map(int, gymnasium.__version__.split(".")[:2])) >= (1, 1)
    assert ("autoreset_mode" in env.metadata) == modern
    if modern:
        assert env.metadata["autoreset_mode"].name == "NEXT_STEP"


@pytest.mark.parametrize("traces", [STORE, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("episode", ["prompt", "round"])
def test_lanes_are_single_environments(episode: Any, traces: Any) -> None:
    """Every lane's first prompt, to its end: all that is told is what a single environment tells."""
    shared: dict[str, Any] = {"max_draft": 4, "episode": episode, "order": "sequential", "rate": 50.0}
    vector = make(traces=traces, **shared)
    rng = np.random.default_rng(0)
    observations, infos = vector.reset(seed=5)
    singles = [DraftRoundEnv(traces, COSTS, **shared) for _ in range(N)]
    for lane, single in enumerate(singles):
        _, info = single.reset(seed=5)
        while info["prompt_index"] != lane:
            _, info = single.reset()
    on_first, resetting = np.ones(N, dtype=bool), np.zeros(N, dtype=bool)
    steps = np.zeros(N, dtype=int)
    while on_first.any():
        chosen = legal(infos, rng)
        observations, rewards, terminated, truncated, infos = vector.step(chosen)
        assert not truncated.any()
        for lane in np.flatnonzero(on_first).tolist():
            if resetting[lane]:  # a step that only resets pays nothing and ends nothing
                assert (rewards[lane], terminated[lane]) == (0, False)
                seen, info = singles[lane].reset()
                if info["prompt_index"] != lane:  # on to other prompts, which lanes share
                    on_first[lane] = False
                    continue
            else:
                seen, reward, over, _, info = singles[lane].step(chosen[lane])
                assert (rewards[lane], terminated[lane]) == (reward, over)
                steps[lane] += 1
            np.testing.assert_array_equal(observations[lane], seen)
            for key, value in info.items():
                np.testing.assert_array_equal(infos[key][lane], value)
        resetting = terminated
    assert (steps > 4).all()


def test_lanes_share_one_pass_over_the_prompts() -> None:
    env = make(num_envs=2, order="sequential")
    rng = np.random.default_rng(0)
    _, infos = env.reset(seed=1)
    visited, over = infos["prompt_index"].tolist(), np.zeros(2, dtype=bool)
    while len(visited) < 6:
        _, _, ended, _, infos = env.step(legal(infos, rng))
        visited += infos["prompt_index"][over].tolist()
        over = ended
    assert visited[:6] == [0, 1, 2, 0, 1, 2]


def test_a_prompt_pays_its_tokens_and_seconds_once() -> None:
    env = make(num_envs=40, rate=20.0)
    rng = np.random.default_rng(0)
    _, infos = env.reset(seed=0)
    first = infos["prompt_index"]
    tokens, paid = np.zeros(40), np.zeros(40)
    running, seconds = np.ones(40, dtype=bool), np.zeros(40)
    while running.any():
        _, rewards, ended, _, infos = env.step(legal(infos, rng))
        for total, values in ((tokens, infos["tokens"]), (seconds, infos["seconds"]), (paid, rewards)):
            total[running] += values[running]
        running &= ~ended
    np.testing.assert_array_equal(tokens, [STORE.prompts[i].n_decided for i in first])
    np.testing.assert_allclose(paid, tokens - 20 * seconds)


def test_skipping_always_is_plain_decoding_and_earns_nothing() -> None:
    env = make(num_envs=3, order="sequential")
    env.reset(seed=0)
    total, running = 0.0, np.ones(3, dtype=bool)
    while running.any():
        _, rewards, ended, _, _ = env.step(np.zeros(3, dtype=int))
        total += rewards[running].sum()
        running &= ~ended
    n_rounds = sum(trace.n_decided - (not trace.ended_by_eos) for trace in STORE.prompts)  # the last one is not asked
    assert total == pytest.approx(-env.rate * n_rounds * (PLANTED.observe + PLANTED.policy))  # but for being asked


def test_the_rate_can_change() -> None:
    env = make(rate=10.0)
    paid = []
    for rate in (10.0, 20.0):
        env.reset(seed=0)
        env.set_rate(rate)
        paid.append(env.step(np.ones(3, dtype=int))[1])
    np.testing.assert_allclose(paid[1], 2 * paid[0])
    assert env.rate == 20.0


@pytest.mark.parametrize("actions", [[0, 1], 1, [0.0, 1.0, 1.0]])
def test_unusable_actions_are_refused(actions: Any) -> None:
    env = make()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="must be 3 whole numbers from 0 to 4"):
        env.step(actions)


def test_illegal_actions_are_named_by_lane() -> None:
    env = make()
    with pytest.raises(ResetNeeded):
        env.step([0, 0, 0])
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"action -1 of lane 2 .* in the pre-scan"):
        env.step([0, 0, -1])
    env.step([0, 1, 0])
    with pytest.raises(ValueError, match=r"action 2 of lane 1 .* in the scan they are 0"):
        env.step([2, 2, 2])
