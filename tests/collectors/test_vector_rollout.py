"""A collector over a vector environment stores what happened, and no step that only resets."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest

from lede.buffers import PromptRollout, StoreWriter, check_store, open_store
from lede.collectors import record_rollouts
from lede.envs import LayerExitEnv, LayerExitVectorEnv
from lede.models import EarlyExitModel
from tests.buffers.samples import settings
from tests.ending_models import ending_model, model_that_ends
from tests.tiny_models import VOCAB_SIZE, prompt

CANDIDATES = (1, 3, 4)
PROMPTS = [prompt(i, 4 + i) for i in range(6)]
BUDGET = 8
MODERN = tuple(map(int, gymnasium.__version__.split(".")[:2])) >= (1, 1)


class SameStep(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Single environments whose next episodes begin in the step that ends one, as gymnasium 1.1 and later can do it."""

    def __init__(self, envs: Sequence[LayerExitEnv]) -> None:
        self.envs = envs
        self.num_envs = len(envs)
        self.metadata = {"autoreset_mode": SimpleNamespace(name="SAME_STEP")}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        results = [env.reset(seed=None if seed is None else seed + i) for i, env in enumerate(self.envs)]
        return np.stack([each[0] for each in results]), self._stack([each[1] for each in results])

    def step(self, actions: Any) -> Any:
        results: list[Any] = [list(env.step(action)) for env, action in zip(self.envs, actions, strict=True)]
        final_obs = np.stack([each[0] for each in results])
        final_info = self._stack([each[4] for each in results])
        ended = [each[2] or each[3] for each in results]
        for each, env, over in zip(results, self.envs, ended, strict=True):
            if over:
                each[0], each[4] = env.reset()
        infos = self._stack([each[4] for each in results])
        if any(ended):
            infos |= {"final_obs": final_obs, "final_info": final_info}
        observations, rewards, terminated, truncated = (np.stack([each[i] for each in results]) for i in range(4))
        return observations, rewards, terminated, truncated, infos

    @staticmethod
    def _stack(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {key: np.array([info[key] for info in infos]) for key in infos[0]}


def act(observations: npt.NDArray[np.float32], infos: dict[str, Any]) -> npt.NDArray[np.int64]:
    """By place in the text alone, so that rows and single environments do the same."""
    chosen: npt.NDArray[np.bool_] = (infos["token_index"] * 5 + infos["layer"] + infos["prompt_index"]) % 3 == 0
    return chosen.astype(np.int64)


def arguments(model: EarlyExitModel, **changes: Any) -> dict[str, Any]:
    made = {"model": model, "prompts": PROMPTS, "candidates": CANDIDATES, "max_new_tokens": BUDGET, "episode": "prompt"}
    return {**made, "order": "sequential", **changes}


def make(kind: str, model: EarlyExitModel) -> Any:
    if kind == "lede":
        return gymnasium.make_vec("lede/LayerExit-v0", num_envs=3, **arguments(model))
    if kind == "same-step":
        return SameStep([LayerExitEnv(**arguments(model)) for _ in range(3)])
    modes: Any = vars(gymnasium.vector).get("AutoresetMode")
    chosen = {"autoreset_mode": modes.SAME_STEP} if kind == "gymnasium same-step" else {}
    return gymnasium.vector.SyncVectorEnv([lambda: LayerExitEnv(**arguments(model))] * 2, **chosen)


def stepped_alone(model: EarlyExitModel) -> list[list[Any]]:
    """Every transition of every prompt, by the single environment: prompt, state, action, reward, end, next state."""
    env = LayerExitEnv(**arguments(model))
    found = []
    observation, info = env.reset(seed=0)
    for _ in PROMPTS:
        rows: list[Any] = []
        while not rows or not (rows[-1][3] or rows[-1][4]):
            told = {key: np.array([value]) for key, value in info.items()}
            action = int(act(observation[None], told)[0])
            before = observation
            observation, reward, terminated, truncated, info = env.step(np.int64(action))
            rows.append([before, action, reward, terminated, truncated, observation])
        found.append(rows)
        observation, info = env.reset()
    return found


KINDS = ["lede", "same-step", "gymnasium next-step", "gymnasium same-step"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_reset_step_is_stored_in_either_autoreset_mode(kind: str) -> None:
    """A8.3: counts and values equal those of the single environment."""
    if kind == "gymnasium same-step" and not MODERN:
        pytest.skip("gymnasium 1.0 has no same-step mode")
    model, n_tokens = model_that_ends(PROMPTS[2], 3)
    assert n_tokens <= BUDGET
    found: list[PromptRollout] = list(record_rollouts(make(kind, model), act, len(PROMPTS), seed=0))
    expected = stepped_alone(model)
    assert sorted(each.prompt_index for each in found) == list(range(len(PROMPTS)))
    assert sum(each.n_rows for each in found) == sum(map(len, expected))
    ends = set()
    for each in found:
        rows = expected[each.prompt_index]
        assert each.actions.tolist() == [row[1] for row in rows]
        np.testing.assert_allclose(each.rewards, [row[2] for row in rows], atol=1e-6)
        np.testing.assert_allclose(each.observations, [row[0] for row in rows], atol=1e-6)
        assert each.ended_by_eos == rows[-1][3] == (not rows[-1][4])
        last = rows[-1][0] if each.ended_by_eos else rows[-1][5]
        np.testing.assert_allclose(each.final_observation, last, atol=1e-6)
        assert each.prompt_ids.tolist() == PROMPTS[each.prompt_index]
        assert each.token_end.sum() == each.token_ids.size - 1
        ends.add(each.ended_by_eos)
    assert ends == {True, False}  # both ends occur


def test_what_was_recorded_makes_a_sound_store(tmp_path: Any) -> None:
    model = ending_model(VOCAB_SIZE)
    made = settings("transitions", n_layers=model.n_layers, vocab_size=VOCAB_SIZE, candidates=CANDIDATES)
    with StoreWriter.open(tmp_path / "r.zarr", made) as writer:
        for rollout in record_rollouts(make("lede", model), act, 4, seed=0):
            writer.add(rollout)
    assert check_store(tmp_path / "r.zarr").damage == ()
    assert len(open_store(tmp_path / "r.zarr")) == 4


def test_an_environment_that_can_not_be_recorded_is_refused() -> None:
    model = ending_model(VOCAB_SIZE)
    with pytest.raises(ValueError, match="make the environment with episode='prompt'"):
        next(record_rollouts(LayerExitVectorEnv(2, **arguments(model, episode="token")), act, 1))
    with pytest.raises(ValueError, match="n_prompts must be at least 1, got 0"):
        next(record_rollouts(LayerExitVectorEnv(2, **arguments(model)), act, 0))
    disabled = SameStep([LayerExitEnv(**arguments(model))])
    disabled.metadata = {"autoreset_mode": SimpleNamespace(name="DISABLED")}
    with pytest.raises(ValueError, match="autoreset mode is DISABLED"):
        next(record_rollouts(disabled, act, 1))
    with pytest.raises(ValueError, match="recorded in lede/LayerExit-v0"):
        next(record_rollouts(gymnasium.make_vec("CartPole-v1", num_envs=1), act, 1))
