from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from lede.envs import LayerExitEnv, LayerExitVectorEnv
from tests.ending_models import ending_model
from tests.tiny_models import FAMILY_NAMES, VOCAB_SIZE, prompt, tiny_model

PROMPTS = [prompt(i, 4 + 3 * i) for i in range(3)]
CANDIDATES = (1, 3, 4)
INFO_KEYS = {"prompt_index", "token_index", "layer", "exit_layer", "match", "target_token"}


def make(**settings: Any) -> LayerExitVectorEnv:
    defaults = {"model": tiny_model("llama"), "prompts": PROMPTS, "candidates": CANDIDATES, "max_new_tokens": 6}
    env = gymnasium.make_vec("lede/LayerExit-v0", num_envs=3, **{**defaults, **settings})
    assert isinstance(env, LayerExitVectorEnv)
    return env


def test_spaces_and_autoreset_mode() -> None:
    env = make()
    assert env.action_space == gymnasium.spaces.MultiDiscrete([2, 2, 2])
    assert env.observation_space.shape == (3, 4)
    modern = tuple(map(int, gymnasium.__version__.split(".")[:2])) >= (1, 1)
    assert ("autoreset_mode" in env.metadata) == modern
    if modern:
        assert env.metadata["autoreset_mode"].name == "NEXT_STEP"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("episode", ["token", "prompt"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_rows_are_single_environments(family: str, episode: Any, temperature: float) -> None:
    """Same text, same rewards, same ends, same counts; observations to rounding."""
    settings: dict[str, Any] = {
        "candidates": CANDIDATES,
        "max_new_tokens": 6,
        "episode": episode,
        "order": "sequential",
        "temperature": temperature,
    }
    vector = make(model=tiny_model(family), **settings)
    single = LayerExitEnv(tiny_model(family), PROMPTS, **settings)
    actions = np.random.default_rng(0).integers(0, 2, (60, 3))
    observations, infos = vector.reset(seed=0)
    columns: list[list[tuple[Any, ...]]] = [[], [], []]
    resetting, moved_on = np.zeros(3, dtype=bool), np.zeros(3, dtype=bool)
    for chosen in actions:
        before = observations.copy()
        observations, rewards, terminated, truncated, infos = vector.step(chosen)
        for r in range(3):
            if resetting[r]:  # a step that only resets pays nothing and ends nothing
                assert (rewards[r], terminated[r], truncated[r]) == (0, False, False)
                moved_on[r] |= infos["token_index"][r] == 1  # to another prompt
            elif not moved_on[r]:
                row = (chosen[r], before[r], rewards[r], terminated[r], truncated[r])
                columns[r].append((*row, infos["match"][r], infos["target_token"][r]))
        resetting = terminated | truncated
    for r, column in enumerate(columns):
        observation, info = single.reset(seed=0)
        while info["prompt_index"] != r:
            observation, info = single.reset()
        for action, seen, reward, terminated, truncated, match, target in column:
            np.testing.assert_allclose(seen, observation, atol=1e-6)
            observation, *outcome, info = single.step(action)
            assert outcome == [reward, terminated, truncated]
            assert (info["match"], info["target_token"]) == (match, target)
            if terminated or truncated:
                observation, info = single.reset()
        assert sum(target >= 0 for *_, target in column) == 5  # every decided token of the prompt, once


def test_each_layer_runs_once_a_step_however_the_rows_differ() -> None:
    model = ending_model(VOCAB_SIZE)
    ran: list[tuple[int, int]] = []
    for i, layer in enumerate(model.hf_model.model.layers, start=1):
        layer.register_forward_hook(lambda _, args, out, i=i: ran.append((i, args[0].shape[0])))
    env = LayerExitVectorEnv(3, model, PROMPTS, CANDIDATES, max_new_tokens=6)
    env.reset(seed=0)
    ran.clear()
    env.step([1, 0, 0])  # row 0: layers 2-6; rows 1 and 2: layers 2-3
    assert ran == [(2, 3), (3, 3), (4, 1), (5, 1), (6, 1)]
    ran.clear()
    env.step([0, 1, 0])  # row 0 starts its next token; row 1: layers 4-6; row 2: layer 4
    assert ran == [(4, 2), (5, 1), (6, 1), (1, 1)]


def test_rows_share_one_pass_over_the_prompts() -> None:
    prompts = [prompt(i, 5) for i in range(7)]
    env = make(prompts=prompts, episode="prompt", max_new_tokens=2)
    _, infos = env.reset(seed=1)
    visited = infos["prompt_index"].tolist()
    while len(visited) < 14:
        env.step([1, 1, 1])
        _, _, _, _, infos = env.step([0, 0, 0])
        visited += infos["prompt_index"].tolist()
    assert sorted(visited[:7]) == list(range(7)) == sorted(visited[7:14])


def test_seeds_reproduce() -> None:
    env = make(temperature=1.0)
    runs = []
    for _ in range(2):
        seen = [env.reset(seed=5)[0], *(env.step([1, 0, 1])[0] for _ in range(8)), env.reset()[0]]
        runs.append(np.stack(seen))
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0][0], env.reset(seed=6)[0])


def test_infos_are_arrays_with_masks() -> None:
    env = make()
    _, infos = env.reset(seed=0)
    assert set(infos) == INFO_KEYS | {f"_{key}" for key in INFO_KEYS}
    assert all(values.shape == (3,) for values in infos.values())
    copy = infos["token_index"].copy()
    env.step([1, 1, 1])
    env.step([1, 1, 1])
    np.testing.assert_array_equal(infos["token_index"], copy)  # later steps don't change what was given


@pytest.mark.parametrize("actions", [[0, 1], [0, 1, 2], 1])
def test_unusable_actions_are_refused(actions: Any) -> None:
    env = make()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="must be 3 times 0"):
        env.step(actions)


def test_a_step_before_the_first_reset_is_refused() -> None:
    with pytest.raises(ResetNeeded):
        make().step([0, 0, 0])


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="num_envs must be at least 1, got 0"):
        LayerExitVectorEnv(0, tiny_model("llama"), PROMPTS)
