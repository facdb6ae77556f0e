"""The batched twin of `DraftRoundEnv`: many lanes, stepped at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector.utils import batch_space

from lede.envs.episodes import PromptOrder
from lede.envs.layer_exit_vector import AUTORESET, Flags, Observations
from lede.envs.round_lanes import EpisodeUnit, Profile, RoundLanes
from lede.features import FeatureConfig

if TYPE_CHECKING:
    from lede.envs.trace_source import Traces


class DraftRoundVectorEnv(gymnasium.vector.VectorEnv[Observations, npt.NDArray[np.integer], npt.NDArray[Any]]):
    """`num_envs` lanes of `DraftRoundEnv`; see there for states, actions, rewards and arguments.

    The lanes share one queue of prompts, so that together they visit every prompt once in a pass. Autoreset is
    next-step: after a lane's episode has ended, the next `step` ignores its action, starts its next episode and pays
    nothing.

    Infos are arrays `(num_envs,)` under the keys of `DraftRoundEnv`, and `action_mask` `(num_envs, action)`, whose
    rows `action_space.sample(tuple(infos["action_mask"]))` takes. Where an episode has ended, the mask is that of its
    last state.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], **AUTORESET}  # type: ignore[misc]  # gymnasium calls it no ClassVar

    def __init__(
        self,
        num_envs: int,
        traces: Traces,
        profile: Profile,
        candidates: str | Sequence[int] | None = None,
        features: FeatureConfig | None = None,
        max_draft: int = 12,
        rate: float | None = None,
        episode: EpisodeUnit = "prompt",
        order: PromptOrder = "shuffled",
        vocab_size: int | None = None,
        render_mode: str | None = None,
        fixed_lengths: Sequence[int] = (),
    ) -> None:
        if render_mode is not None:
            raise ValueError(f"nothing is rendered; leave out render_mode, got '{render_mode}'")
        lanes = RoundLanes(
            traces, profile, candidates, features, max_draft, rate, episode, order, vocab_size, num_envs,
            fixed_lengths=fixed_lengths,
        )  # fmt: skip
        self._begin(lanes)

    def _begin(self, lanes: RoundLanes) -> None:
        """Take over lanes that nobody has stepped yet."""
        self.lanes, self.num_envs = lanes, lanes.n_lanes
        self.single_observation_space = spaces.Box(*self.lanes.bounds, dtype=np.float32)
        self.single_action_space = spaces.Discrete(self.lanes.n_actions)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._fresh = True

    @property
    def rate(self) -> float:
        """Price of a second in tokens."""
        return self.lanes.rate

    def set_rate(self, rate: float | None) -> None:
        """Set the price of a second from the next step on; None for the rate of plain decoding.

        Raises:
            ValueError: It is no positive number.
        """
        self.lanes.set_rate(rate)

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
        return self._view()

    def step(
        self, actions: npt.ArrayLike
    ) -> tuple[Observations, npt.NDArray[np.float64], Flags, Flags, dict[str, Any]]:
        """Decide in every lane; lanes whose episode had ended start their next one instead.

        Raises:
            ValueError: There are not `num_envs` actions, or one is not legal where its lane stands.
            gymnasium.error.ResetNeeded: No episode was begun.
        """
        if self._fresh:
            raise ResetNeeded("call reset() before the first step()")
        chosen = np.asarray(actions)
        going_on, over = np.flatnonzero(~self.lanes.ended), np.flatnonzero(self.lanes.ended)
        self._check(chosen, going_on)
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminated = np.zeros(self.num_envs, dtype=np.bool_)
        if going_on.size:
            rewards[going_on], terminated[going_on] = self.lanes.step(going_on, chosen[going_on])
        if over.size:
            self.lanes.move_on(over, self.np_random)
        observations, infos = self._view()
        return observations, rewards, terminated, np.zeros(self.num_envs, dtype=np.bool_), infos

    def _check(self, chosen: npt.NDArray[Any], lanes: npt.NDArray[np.int64]) -> None:
        n_actions = self.lanes.n_actions
        if chosen.shape != (self.num_envs,) or chosen.dtype.kind not in "iu":
            raise ValueError(f"actions must be {self.num_envs} whole numbers from 0 to {n_actions - 1}, got {chosen!r}")
        wanted = chosen[lanes]
        inside = (wanted >= 0) & (wanted < n_actions)
        legal = inside & (self.lanes.infos["action_mask"][lanes, np.where(inside, wanted, 0)] == 1)
        if not legal.all():
            lane = int(lanes[np.flatnonzero(~legal)[0]])
            raise ValueError(
                f"action {chosen[lane]} of lane {lane} is not among the legal actions; {self.lanes.legal_actions(lane)}"
            )

    def _view(self) -> tuple[Observations, dict[str, Any]]:
        self.lanes.look()
        infos: dict[str, Any] = {}
        for key, values in self.lanes.infos.items():
            infos[key], infos[f"_{key}"] = values.copy(), np.ones(self.num_envs, dtype=np.bool_)
        return self.lanes.observations.copy(), infos
