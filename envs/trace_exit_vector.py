"""The batched twin of `TraceExitEnv`: many lanes, stepped at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector.utils import batch_space

from lede.envs.episodes import EpisodeKind, PromptOrder
from lede.envs.layer_exit_vector import AUTORESET, Flags, Observations
from lede.envs.trace_lanes import TraceLanes
from lede.envs.trace_source import TraceSource
from lede.features import FeatureConfig
from lede.rewards import RewardConfig

if TYPE_CHECKING:
    from lede.envs.trace_source import Traces


class TraceExitVectorEnv(gymnasium.vector.VectorEnv[Observations, npt.NDArray[np.integer], npt.NDArray[Any]]):
    """`num_envs` lanes of `TraceExitEnv`; see there for states, actions, rewards and arguments.

    A step is a fixed number of array operations, whatever `num_envs` is. The lanes share one queue of prompts, so that
    together they visit every prompt once in a pass. Autoreset is next-step: after a lane's episode has ended, the next
    `step` ignores its action, starts its next episode and pays nothing.

    Infos are arrays `(num_envs,)` under the keys of `TraceExitEnv`.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], **AUTORESET}  # type: ignore[misc]  # gymnasium calls it no ClassVar

    def __init__(
        self,
        num_envs: int,
        traces: Traces,
        candidates: str | Sequence[int] | None = None,
        episode: EpisodeKind = "token",
        features: FeatureConfig | None = None,
        reward: RewardConfig | None = None,
        order: PromptOrder = "shuffled",
        vocab_size: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None:
            raise ValueError(f"nothing is rendered; leave out render_mode, got '{render_mode}'")
        source = TraceSource.load(traces, candidates, features, reward, vocab_size)
        self.lanes = TraceLanes(source, episode, order, num_envs)
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(*self.lanes.bounds, dtype=np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._fresh = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Take all lanes to their next episodes; with a seed, start all over."""
        super().reset(seed=seed)
        if self._fresh or seed is not None:
            self.lanes.start_over(self.np_random, seed)
            self._fresh = False
        else:
            self.lanes.move_on(np.arange(self.num_envs), self.np_random)
        return self.lanes.observations.copy(), self._infos()

    def step(
        self, actions: npt.ArrayLike
    ) -> tuple[Observations, npt.NDArray[np.float64], Flags, Flags, dict[str, Any]]:
        """Continue (0) or exit (1) in every lane; lanes whose episode had ended start their next one instead.

        Raises:
            ValueError: The actions are not `num_envs` times 0 or 1.
            gymnasium.error.ResetNeeded: No episode was begun.
        """
        chosen = np.asarray(actions)
        if chosen.shape != (self.num_envs,) or not ((chosen == 0) | (chosen == 1)).all():
            raise ValueError(f"actions must be {self.num_envs} times 0 (continue) or 1 (exit), got {actions!r}")
        if self._fresh:
            raise ResetNeeded("call reset() before the first step()")
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminated = np.zeros(self.num_envs, dtype=np.bool_)
        truncated = np.zeros(self.num_envs, dtype=np.bool_)
        over, going_on = np.flatnonzero(self.lanes.ended), np.flatnonzero(~self.lanes.ended)
        if going_on.size:
            rewards[going_on], terminated[going_on], truncated[going_on] = self.lanes.step(going_on, chosen[going_on])
        if over.size:
            self.lanes.move_on(over, self.np_random)
        return self.lanes.observations.copy(), rewards, terminated, truncated, self._infos()

    def _infos(self) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for key, values in self.lanes.infos.items():
            infos[key], infos[f"_{key}"] = values.copy(), np.ones(self.num_envs, dtype=np.bool_)
        return infos
