"""Transitions as a replay buffer of d3rlpy whose batches are drawn without a loop over rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from lede.quiet_d3rlpy import import_d3rlpy
from lede.seeding import Purpose, numpy_stream
from lede.transitions import NStepBatch, Transitions

import_d3rlpy()  # before its names are imported: without this it prints, and changes torch's settings

from d3rlpy.constants import ActionSpace  # noqa: E402  # only after import_d3rlpy
from d3rlpy.dataset import (  # noqa: E402  # only after import_d3rlpy
    DatasetInfo,
    EpisodeBase,
    ReplayBufferBase,
    Signature,
    Transition,
    TransitionMiniBatch,
    dump,
)
from d3rlpy.preprocessing import StandardObservationScaler  # noqa: E402  # only after import_d3rlpy

from lede.episode_rows import EpisodeRows, Episodes  # noqa: E402  # only after import_d3rlpy

if TYPE_CHECKING:
    from lede.transitions import Greedy

Observations = npt.NDArray[np.float32]


class NStepReplayBuffer(ReplayBufferBase):  # type: ignore[misc]  # d3rlpy's own types are not read
    """A fixed set of transitions for `algo.fit(buffer, ...)`, `algo.fitter`, evaluators and fitted Q evaluation.

    Batches are those of `Transitions.batch`, the ones that `lede train` learns from; d3rlpy's own buffer assembles a
    batch one transition at a time.

    Args:
        transitions: Decisions, one below the other.
        n_steps: Most decisions in a return.
        gamma: Discount of the returns. Give the algorithm the same one. In prompt episodes it counts tokens, and so do
            the batch's intervals, which are the exponents of the algorithm's own gamma.
        greedy: Cuts a return before the first later decision that is not greedy, see `Transitions.batch` and
            `greedy_under`. None never cuts.
        n_actions: Actions that there are, whichever occur; the Q-network's outputs.
        seed: Of the draws of rows.

    What a fixed set of transitions does not do, such as growing, raises TypeError with what to use instead.

    Raises:
        ValueError: A number is out of range, or an action is not below `n_actions`.
    """

    def __init__(
        self,
        transitions: Transitions,
        n_steps: int = 1,
        gamma: float = 1.0,
        greedy: Greedy | None = None,
        n_actions: int = 2,
        seed: int = 0,
    ) -> None:
        if n_steps < 1:
            raise ValueError(f"n_steps must be at least 1, got {n_steps}")
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1], got {gamma}")
        highest = int(transitions.actions.max())
        if highest >= n_actions:
            raise ValueError(f"n_actions is {n_actions}, and the transitions hold action {highest}: give {highest + 1}")
        self.transitions = transitions
        self.n_steps = n_steps
        self.gamma = gamma
        self.greedy = greedy
        self._rng = numpy_stream(seed, Purpose.TRAINING)
        self._info = DatasetInfo(
            observation_signature=_signature(np.float32, transitions.observations.shape[1]),
            action_signature=_signature(np.int32, 1),
            reward_signature=_signature(np.float32, 1),
            action_space=ActionSpace.DISCRETE,
            action_size=n_actions,
        )

    def sample_transition_batch(self, batch_size: int) -> TransitionMiniBatch:
        """Transitions from rows drawn uniformly.

        `next_actions` are zeros, and `transitions` is empty: no discrete algorithm of d3rlpy reads them.
        """
        batch = self._batch(self._rng.integers(0, self.transition_count, batch_size))
        return TransitionMiniBatch(
            observations=batch.observations,
            actions=batch.actions,
            rewards=batch.rewards,
            next_observations=batch.next_observations,
            next_actions=np.zeros_like(batch.actions),
            terminals=batch.terminals,
            intervals=batch.intervals,
            transitions=[],
        )

    def sample_transition(self) -> Transition:
        """One transition from a row drawn uniformly."""
        return self._transition(int(self._rng.integers(0, self.transition_count)))

    @cached_property
    def episodes(self) -> Episodes:
        """The episodes in order, made when they are asked for."""
        return Episodes(self.transitions)

    def size(self) -> int:
        """Number of episodes."""
        return len(self.episodes)

    @property
    def transition_count(self) -> int:
        """Number of transitions: every decision starts one."""
        return len(self.transitions)

    @property
    def transition_picker(self) -> Callable[[EpisodeBase, int], Transition]:
        """Picks the transition that starts at a decision of one of `episodes`, for scalers and evaluators."""
        return self._pick

    @property
    def dataset_info(self) -> DatasetInfo:
        """Shapes, and the number of actions."""
        return self._info

    def observation_scaler(self) -> StandardObservationScaler:
        """A fitted scaler for an algorithm's config; d3rlpy would fit its own with two loops over all transitions."""
        states = self.transitions.states
        std = states.std(axis=0, dtype=np.float64)
        # a feature that never changes is left as it is
        return StandardObservationScaler(
            mean=states.mean(axis=0, dtype=np.float64), std=np.where(std > 1e-6, std, 1.0), eps=0.0
        )

    def dump(self, f: BinaryIO) -> None:
        """Write the episodes as d3rlpy's HDF5, for its `ReplayBuffer.load`."""
        dump(self.episodes, f)

    def append(self, observation: Any, action: Any, reward: Any) -> NoReturn:
        """Not supported: the buffer is fixed."""
        raise TypeError(f"{_FIXED}; for online training use d3rlpy.dataset.create_fifo_replay_buffer")

    def append_episode(self, episode: EpisodeBase) -> NoReturn:
        """Not supported: the buffer is fixed."""
        raise TypeError(f"{_FIXED}; put the rollouts together before Transitions.from_rollouts")

    def clip_episode(self, terminated: bool) -> NoReturn:
        """Not supported: the buffer is fixed."""
        raise TypeError(f"{_FIXED}; for online training use d3rlpy.dataset.create_fifo_replay_buffer")

    def sample_trajectory(self, length: int) -> NoReturn:
        """Not supported: the buffer draws transitions."""
        raise TypeError(f"{_NO_TRAJECTORIES}; for decision transformers use TransitionStore.to_d3rlpy")

    def sample_trajectory_batch(self, batch_size: int, length: int) -> NoReturn:
        """Not supported: the buffer draws transitions."""
        raise TypeError(f"{_NO_TRAJECTORIES}; for decision transformers use TransitionStore.to_d3rlpy")

    @property
    def trajectory_slicer(self) -> NoReturn:
        """Not supported: the buffer draws transitions."""
        raise TypeError(f"{_NO_TRAJECTORIES}; for decision transformers use TransitionStore.to_d3rlpy")

    @property
    def buffer(self) -> NoReturn:
        """Not supported: the rows are in `transitions`."""
        raise TypeError("an NStepReplayBuffer keeps its rows in `transitions`, not in a buffer of d3rlpy")

    @classmethod
    def from_episode_generator(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: rows come from `Transitions`."""
        raise TypeError("an NStepReplayBuffer is made from Transitions; use d3rlpy.dataset.ReplayBuffer")

    @classmethod
    def load(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: rows come from `Transitions`."""
        raise TypeError("an NStepReplayBuffer is made from Transitions; use d3rlpy.dataset.ReplayBuffer.load")

    def _batch(self, rows: npt.NDArray[np.integer]) -> NStepBatch:
        return self.transitions.batch(rows, self.n_steps, self.gamma, self.greedy)

    def _pick(self, episode: EpisodeBase, index: int) -> Transition:
        if not isinstance(episode, EpisodeRows) or episode.transitions is not self.transitions:
            raise TypeError(
                "the transition picker of an NStepReplayBuffer takes the episodes of that buffer; for others use "
                "lede.buffers.NStepPicker"
            )
        if not 0 <= index < episode.transition_count:
            raise ValueError(f"no transition starts at row {index} of an episode with {episode.transition_count}")
        return self._transition(episode.first_row + index)

    def _transition(self, row: int) -> Transition:
        batch = self._batch(np.asarray([row]))
        end = row + int(np.argmax(self.transitions.episode_end[row:])) + 1
        return Transition(
            observation=batch.observations[0],
            action=batch.actions[0].astype(np.int32),
            reward=batch.rewards[0],
            next_observation=batch.next_observations[0],
            next_action=np.zeros(1, dtype=np.int32),
            terminal=float(batch.terminals[0, 0]),
            interval=int(batch.intervals[0, 0]),
            rewards_to_go=self.transitions.rewards[row:end, None],
        )


def greedy_under(algo: Any) -> Greedy:
    """Chooses as an algorithm of d3rlpy would at that moment: the `greedy` of a buffer that the algorithm learns from.

    Before the algorithm has a network, nothing is greedy, and every return has one step.
    """

    def greedy(observations: Observations) -> npt.NDArray[np.integer]:
        if algo.impl is None:
            return np.full(len(observations), -1, dtype=np.int64)
        return np.asarray(algo.predict(observations))

    return greedy


_FIXED = "an NStepReplayBuffer does not grow"
_NO_TRAJECTORIES = "an NStepReplayBuffer draws transitions, no trajectories"


def _signature(dtype: npt.DTypeLike, width: int) -> Signature:
    return Signature(dtype=[np.dtype(dtype)], shape=[(width,)])
