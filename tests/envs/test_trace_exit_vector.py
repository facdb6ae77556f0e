from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from lede.envs import TraceExitEnv, TraceExitVectorEnv
from tests.buffers.samples import make_trace

N = 3
TRACES = [make_trace(i, 6, eos=i == 1) for i in range(N)]
SAMPLED = [make_trace(i, 6, eos=i == 1, sampled=True) for i in range(N)]


def make(traces: Any = TRACES, num_envs: int = N, **changes: Any) -> TraceExitVectorEnv:
    settings = {"traces": traces, "vocab_size": 50, "candidates": (1, 2, 4), **changes}
    env = gymnasium.make_vec("lede/TraceExit-v0", num_envs=num_envs, **settings)
    assert isinstance(env, TraceExitVectorEnv)
    return env


def test_spaces_and_autoreset_mode() -> None:
    env = make()
    assert env.action_space == gymnasium.spaces.MultiDiscrete([2, 2, 2])
    assert env.observation_space.shape == (3, 4)
    modern = tuple(map(int, gymnasium.__version__.split(".")[:2])) >= (1, 1)
    assert ("autoreset_mode" in env.metadata) == modern
    if modern:
        assert env.metadata["autoreset_mode"].name == "NEXT_STEP"


@pytest.mark.parametrize("traces", [TRACES, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("episode", ["token", "prompt"])
def test_lanes_are_single_environments(episode: Any, traces: Any) -> None:
    """Every lane's first prompt, to its end: all that is told is what a single environment tells."""
    vector = make(traces, episode=episode, order="sequential")
    actions = np.random.default_rng(0).integers(0, 2, (80, N))
    observations, infos = vector.reset(seed=5)
    told: list[list[tuple[Any, ...]]] = [[], [], []]
    resetting = np.zeros(N, dtype=bool)
    for chosen in actions:
        before, before_infos = observations, infos
        observations, rewards, terminated, truncated, infos = vector.step(chosen)
        for lane in range(N):
            if resetting[lane]:  # a step that only resets pays nothing and ends nothing
                assert (rewards[lane], terminated[lane], truncated[lane]) == (0, False, False)
                continue
            keys = [key for key in infos if not key.startswith("_")]
            now, then = ({key: int(each[key][lane]) for key in keys} for each in (infos, before_infos))
            outcome = (observations[lane], rewards[lane], terminated[lane], truncated[lane], now)
            told[lane].append((before[lane], then, int(chosen[lane]), outcome))
        resetting = terminated | truncated
    for lane in range(N):
        single = TraceExitEnv(traces, (1, 2, 4), episode, order="sequential", vocab_size=50)
        seen, info = single.reset(seed=5)
        while info["prompt_index"] != lane:
            seen, info = single.reset()
        steps = 0
        for before, then, action, (after, *outcome) in told[lane]:
            if info["prompt_index"] != lane:
                break  # on to other prompts, which lanes share
            np.testing.assert_array_equal(before, seen)
            assert info == then
            seen, reward, over, cut, info = single.step(action)
            np.testing.assert_array_equal(after, seen)
            assert outcome == [reward, over, cut, info]
            steps += 1
            if over or cut:
                seen, info = single.reset()
        assert steps >= 5  # every decided token of the prompt takes a step at least


def test_lanes_share_one_pass_over_the_prompts() -> None:
    env = make([make_trace(i, 2) for i in range(7)], episode="prompt", candidates=(2,))
    _, infos = env.reset(seed=1)
    visited = infos["prompt_index"].tolist()
    while len(visited) < 14:
        env.step([1, 1, 1])
        _, _, _, _, infos = env.step([0, 0, 0])
        visited += infos["prompt_index"].tolist()
    assert sorted(visited[:7]) == list(range(7)) == sorted(visited[7:14])


def test_more_lanes_than_prompts() -> None:
    env = make(num_envs=50)
    _, infos = env.reset(seed=0)
    assert sorted(np.bincount(infos["prompt_index"])) == [16, 17, 17]
    env.step(np.ones(50, dtype=int))


def test_seeds_reproduce() -> None:
    env = make(SAMPLED)
    runs = []
    for _ in range(2):
        env.reset(seed=5)
        runs.append(np.stack([env.step([1, 0, 1])[1] for _ in range(12)]))
    np.testing.assert_array_equal(runs[0], runs[1])
    env.reset(seed=6)
    assert not np.array_equal(runs[0], np.stack([env.step([1, 0, 1])[1] for _ in range(12)]))


def test_what_was_given_does_not_change() -> None:
    env = make()
    observations, infos = env.reset(seed=0)
    kept = observations.copy(), {key: values.copy() for key, values in infos.items()}
    env.step([1, 0, 1])
    env.step([1, 0, 1])
    np.testing.assert_array_equal(observations, kept[0])
    for key, values in infos.items():
        np.testing.assert_array_equal(values, kept[1][key])


@pytest.mark.parametrize("actions", [[0, 1], [0, 1, 2], 1])
def test_unusable_actions_are_refused(actions: Any) -> None:
    env = make()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="must be 3 times 0"):
        env.step(actions)


def test_a_step_before_the_first_reset_is_refused() -> None:
    with pytest.raises(ResetNeeded):
        make().step([0, 0, 0])


def test_no_lanes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_envs must be at least 1, got 0"):
        TraceExitVectorEnv(0, TRACES, vocab_size=50)
