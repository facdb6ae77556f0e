"""Transitions in flat columns, and n-step batches drawn from them without a loop over rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from lede.buffers.records import PromptRollout

EpisodeUnit = Literal["token", "prompt"]
Greedy = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.integer]]
"""Chooses actions `(row,)` for observations `(row, feature)`."""


@dataclass(frozen=True)
class NStepBatch:
    """Transitions over up to n decisions."""

    observations: npt.NDArray[np.float32]  # (batch, feature)
    """State before the first decision."""
    actions: npt.NDArray[np.float32]  # (batch, 1)
    """First decision."""
    rewards: npt.NDArray[np.float32]  # (batch, 1)
    """Discounted sum of the rewards on the way."""
    next_observations: npt.NDArray[np.float32]  # (batch, feature)
    """State to bootstrap from; zeros where the episode terminated."""
    terminals: npt.NDArray[np.float32]  # (batch, 1)
    """1 where the episode terminated on the way."""
    intervals: npt.NDArray[np.float32]  # (batch, 1)
    """Exponent of gamma at the bootstrap: decisions passed, or tokens passed in prompt episodes."""

    @classmethod
    def join(cls, pieces: Sequence[NStepBatch]) -> NStepBatch:
        """One batch of several."""
        if len(pieces) == 1:
            return pieces[0]
        columns = {each.name: [getattr(piece, each.name) for piece in pieces] for each in fields(cls)}
        return cls(**{name: np.concatenate(parts) for name, parts in columns.items()})


@dataclass(frozen=True)
class Transitions:
    """Decisions of many prompts, one below the other, and where each leads."""

    observations: npt.NDArray[np.float32]  # (row + closing, feature)
    """State before each decision; then the closing states, one a prompt."""
    actions: npt.NDArray[np.signedinteger]  # (row,)
    """0 = continue, 1 = exit; further ones are plans of the pre-scan."""
    rewards: npt.NDArray[np.float32]  # (row,)
    """What each decision earned."""
    exit_layer: npt.NDArray[np.int16]  # (row,)
    """The layer where the action is exit, else 0."""
    match: npt.NDArray[np.int8]  # (row,)
    """Whether the exit was accepted; -1 where the action is continue."""
    token_end: npt.NDArray[np.bool_]  # (row,)
    """Last decision of its token."""
    next_row: npt.NDArray[np.int64]  # (row,)
    """Row of `observations` that the decision leads to."""
    episode_end: npt.NDArray[np.bool_]  # (row,)
    """Last decision of its episode."""
    terminated: npt.NDArray[np.bool_]  # (row,)
    """Whether nothing follows: an end that is no truncation."""
    episode: EpisodeUnit
    """What an episode is."""

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[PromptRollout], episode: EpisodeUnit = "token") -> Transitions:
        """Stack prompts; a token episode terminates at its end, a prompt episode at EOS and is truncated otherwise.

        Raises:
            ValueError: There is no decision at all.
        """
        rollouts = [rollout for rollout in rollouts if rollout.n_rows]
        if not rollouts:
            raise ValueError("the buffer holds no decision: collect prompts with max_new_tokens of at least 2")
        sizes = np.asarray([rollout.n_rows for rollout in rollouts])
        n_rows = int(sizes.sum())
        last = np.cumsum(sizes) - 1
        next_row = np.arange(1, n_rows + 1)
        next_row[last] = n_rows + np.arange(len(rollouts))
        token_end = np.concatenate([rollout.token_end for rollout in rollouts])
        if episode == "token":
            episode_end = terminated = token_end
        else:
            episode_end, terminated = np.zeros(n_rows, dtype=bool), np.zeros(n_rows, dtype=bool)
            episode_end[last] = True
            terminated[last] = [rollout.ended_by_eos for rollout in rollouts]
        rows = [rollout.observations for rollout in rollouts]
        return cls(
            observations=np.concatenate([*rows, np.stack([rollout.final_observation for rollout in rollouts])]),
            actions=np.concatenate([rollout.actions for rollout in rollouts]),
            rewards=np.concatenate([rollout.rewards for rollout in rollouts]),
            exit_layer=np.concatenate([rollout.exit_layer for rollout in rollouts]),
            match=np.concatenate([rollout.match for rollout in rollouts]),
            token_end=token_end,
            next_row=next_row,
            episode_end=episode_end,
            terminated=terminated,
            episode=episode,
        )

    def __len__(self) -> int:
        return self.actions.size

    @property
    def states(self) -> npt.NDArray[np.float32]:
        """States before the decisions, `(row, feature)`."""
        return self.observations[: len(self)]

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """Mean of each feature over the states, `(feature,)`."""
        return np.asarray(self.states.mean(axis=0, dtype=np.float64))

    @property
    def std(self) -> npt.NDArray[np.float64]:
        """Standard deviation of each feature, `(feature,)`; 1 for one that never changes."""
        std = self.states.std(axis=0, dtype=np.float64)
        return np.where(std > 1e-6, std, 1.0)

    def probe(self, n: int) -> npt.NDArray[np.float32]:
        """Some of the states, evenly spaced, `(at most n, feature)`."""
        return self.states[:: max(1, len(self) // n)][:n]

    def draw(
        self, rng: np.random.Generator, position: int, n: int
    ) -> Iterator[tuple[Transitions, npt.NDArray[np.int64]]]:
        """`n` rows at random, with replacement, and what they are rows of.

        Args:
            rng: Draws them.
            position: Rows drawn before; of no importance here, see `lede.windows`.
            n: Rows.
        """
        yield self, rng.integers(0, len(self), n)

    def batch(
        self, rows: npt.NDArray[np.integer], n_steps: int, gamma: float, greedy: Greedy | None = None
    ) -> NStepBatch:
        """The transitions that start at `rows`.

        Args:
            rows: First decisions, `(batch,)`.
            n_steps: Most decisions to follow.
            gamma: Discount, per decision in token episodes and per token in prompt episodes: a discount per decision
                would there price one continue at (1 - gamma) times the value of all that follows.
            greedy: Where given, a return stops before the first later decision that is not greedy, and bootstraps
                there. What is left follows the greedy policy, so the return needs no correction for the behaviour.
        """
        last_row = len(self) - 1
        here = np.asarray(rows, dtype=np.int64)
        alive = np.ones(here.shape, dtype=bool)
        terminals = np.zeros(here.shape, dtype=bool)
        rewards = np.zeros(here.shape)
        intervals = np.zeros(here.shape, dtype=np.int64)
        for step in range(n_steps):
            if step and greedy is not None and alive.any():
                live = np.flatnonzero(alive)
                alive[live] = greedy(self.observations[here[live]]) == self.actions[here[live]]
            row = np.minimum(here, last_row)  # a closing state has no row of its own; it is never alive
            rewards += np.where(alive, gamma**intervals * self.rewards[row], 0.0)
            passed = self.token_end[row] if self.episode == "prompt" else np.ones(here.shape, dtype=bool)
            intervals += alive & passed
            terminals |= alive & self.terminated[row]
            here = np.where(alive, self.next_row[row], here)
            alive &= ~self.episode_end[row]
        return NStepBatch(
            observations=self.observations[rows],
            actions=self.actions[rows].astype(np.float32)[:, None],
            rewards=rewards.astype(np.float32)[:, None],
            next_observations=np.where(terminals[:, None], np.float32(0), self.observations[here]),
            terminals=terminals.astype(np.float32)[:, None],
            intervals=intervals.astype(np.float32)[:, None],
        )
