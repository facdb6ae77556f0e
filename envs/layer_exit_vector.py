"""The batched twin of `LayerExitEnv`: many rows, one model, shared forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector.utils import batch_space

from lede.envs.episodes import EpisodeKind, Episodes, ModelSource, PromptOrder, PromptSource
from lede.features import FeatureConfig
from lede.prompts import Chat
from lede.rewards import RewardConfig

Observations = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

AUTORESET: dict[str, Any] = {}
"""The part of the metadata that tells gymnasium how a vector environment starts its next episodes."""
if tuple(int(part) for part in gymnasium.__version__.split(".")[:2]) >= (1, 1):
    # 1.0 has this mode and no other, and no name for it
    AUTORESET["autoreset_mode"] = vars(gymnasium.vector)["AutoresetMode"].NEXT_STEP


class LayerExitVectorEnv(gymnasium.vector.VectorEnv[Observations, npt.NDArray[np.integer], npt.NDArray[Any]]):
    """`num_envs` rows of `LayerExitEnv` on one model; see there for states, actions, rewards and arguments.

    Rows that cross the same layers go through them in one forward pass. They share one queue of prompts, so that
    together they visit every prompt once in a pass. Autoreset is next-step: after a row's episode has ended, the next
    `step` ignores its action, starts its next episode and pays nothing.

    Infos are arrays `(num_envs,)` under the keys of `LayerExitEnv`.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], **AUTORESET}  # type: ignore[misc]  # gymnasium calls it no ClassVar

    def __init__(
        self,
        num_envs: int = 1,
        model: ModelSource = "demo",
        prompts: PromptSource | None = None,
        candidates: str | Sequence[int] | None = None,
        max_new_tokens: int = 64,
        episode: EpisodeKind = "token",
        features: FeatureConfig | None = None,
        reward: RewardConfig | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        order: PromptOrder = "shuffled",
        chat: Chat = "auto",
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None:
            raise ValueError(f"nothing is rendered; leave out render_mode, got '{render_mode}'")
        self.episodes = Episodes(
            model,
            prompts,
            candidates,
            max_new_tokens,
            episode,
            features,
            reward,
            temperature,
            top_k,
            top_p,
            order,
            chat,
            n_rows=num_envs,
        )
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(*self.episodes.bounds, dtype=np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._fresh = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Take all rows to their next episodes; with a seed, start all over."""
        super().reset(seed=seed)
        if self._fresh or seed is not None:
            self.episodes.start_over(self.np_random, seed)
            self._fresh = False
        else:
            self.episodes.move_on(range(self.num_envs), self.np_random)
        return self.episodes.observations.copy(), self._infos()

    def step(
        self, actions: npt.ArrayLike
    ) -> tuple[Observations, npt.NDArray[np.float64], Flags, Flags, dict[str, Any]]:
        """Continue (0) or exit (1) in every row; rows whose episode had ended start their next one instead.

        Raises:
            ValueError: The actions are not `num_envs` times 0 or 1.
            gymnasium.error.ResetNeeded: No episode was begun.
        """
        chosen = np.asarray(actions)
        if chosen.shape != (self.num_envs,) or not np.isin(chosen, (0, 1)).all():
            raise ValueError(f"actions must be {self.num_envs} times 0 (continue) or 1 (exit), got {actions!r}")
        if self._fresh:
            raise ResetNeeded("call reset() before the first step()")
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminated = np.zeros(self.num_envs, dtype=np.bool_)
        truncated = np.zeros(self.num_envs, dtype=np.bool_)
        over = np.flatnonzero(self.episodes.ended).tolist()
        going_on = np.flatnonzero(~self.episodes.ended).tolist()
        for row, outcome in self.episodes.step({r: int(chosen[r]) for r in going_on}).items():
            rewards[row] = outcome.reward
            terminated[row], truncated[row] = outcome.terminated, outcome.truncated
        self.episodes.move_on(over, self.np_random)
        return self.episodes.observations.copy(), rewards, terminated, truncated, self._infos()

    def _infos(self) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for key, values in self.episodes.infos.items():
            infos[key], infos[f"_{key}"] = values.copy(), np.ones(self.num_envs, dtype=np.bool_)
        return infos
