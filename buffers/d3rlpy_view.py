"""A store as d3rlpy sees it: episodes, a replay buffer, and an n-step picker that loses nothing.

d3rlpy (2.8.1) differs from what lede needs in three ways. Its list of transitions ends one short of a truncated
episode, so that the last reward never counts: such episodes get a closing row here. Its n-step picker takes
off-policy actions as they come: this one can cut at them. It guesses the number of actions from the data: it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lede.quiet_d3rlpy import import_d3rlpy

import_d3rlpy()  # before its names are imported: without this it prints, and changes torch's settings

from d3rlpy.constants import ActionSpace  # noqa: E402  # only after import_d3rlpy
from d3rlpy.dataset import (  # noqa: E402  # only after import_d3rlpy
    Episode,
    EpisodeBase,
    InfiniteBuffer,
    ReplayBuffer,
    Signature,
    Transition,
    TransitionPickerProtocol,
)

if TYPE_CHECKING:
    from lede.buffers.records import PromptRollout
    from lede.buffers.store import Episodes, TransitionStore

N_ACTIONS = 2

Greedy = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.integer]]
"""Chooses actions `(row,)` for observations `(row, feature)`."""


class NStepPicker(TransitionPickerProtocol):  # type: ignore[misc]  # d3rlpy's own types are not read
    """Picks n-step transitions: the discounted sum of up to n rewards and the state to bootstrap from.

    A return ends after n rewards or with the episode; with `greedy`, also before the first action after the first
    that is not greedy, where it bootstraps. What such a return sums up after its own action is then what the greedy
    policy would have done, whatever behaviour the data come from (the cut of Watkins's Q(lambda), C. J. C. H. Watkins,
    Learning from Delayed Rewards, 1989).

    Args:
        n_steps: Most rewards in a return.
        gamma: Discount factor; must be the algorithm's.
        greedy: Actions `(row,)` that the target network would choose for observations `(row, feature)`; None never
            cuts. It is called anew for every transition, so it follows the network that it closes over.
    """

    def __init__(self, n_steps: int = 1, gamma: float = 1.0, greedy: Greedy | None = None) -> None:
        if n_steps < 1:
            raise ValueError(f"n_steps must be at least 1, got {n_steps}")
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1], got {gamma}")
        self.n_steps = n_steps
        self.gamma = gamma
        self.greedy = greedy

    def __call__(self, episode: EpisodeBase, index: int) -> Transition:
        """The transition that starts at a row of an episode.

        Raises:
            ValueError: No transition starts there.
        """
        if not 0 <= index < episode.transition_count:
            raise ValueError(f"no transition starts at row {index} of an episode with {episode.transition_count}")
        observations = np.asarray(episode.observations)
        # the last row of a truncated episode only closes it, and nothing starts there
        end = min(index + self.n_steps, episode.transition_count)
        if self.greedy is not None and end - index > 1:
            later = slice(index + 1, end)
            chosen = np.asarray(self.greedy(observations[later])).reshape(-1)
            off_policy = np.flatnonzero(chosen != episode.actions[later, 0])
            end = index + 1 + int(off_policy[0]) if off_policy.size else end
        terminal = episode.terminated and end == episode.size()
        interval = end - index
        rewards = np.asarray(episode.rewards[index:end], dtype=np.float64)
        discounts = self.gamma ** np.arange(interval)[:, None]
        return Transition(
            observation=observations[index],
            action=episode.actions[index],
            reward=np.sum(discounts * rewards, axis=0).astype(np.float32),
            next_observation=np.zeros_like(observations[index]) if terminal else observations[end],
            next_action=np.zeros_like(episode.actions[index]) if terminal else episode.actions[end],
            terminal=float(terminal),
            interval=interval,
            rewards_to_go=episode.rewards[index:],
        )


def replay_buffer(
    store: TransitionStore, episode: Episodes, gamma: float, n_steps: int, greedy: Greedy | None
) -> ReplayBuffer:
    """The replay buffer of `TransitionStore.to_d3rlpy`, which says what the arguments are."""
    if episode not in ("token", "prompt"):
        raise ValueError(f"episode must be 'token' or 'prompt', got '{episode}'")
    if episode == "prompt" and gamma < 1:
        raise ValueError(
            f"gamma {gamma} with episode='prompt': d3rlpy discounts per decision, and over a whole prompt that prices "
            "one continue at about (1 - gamma) times the value of all that follows instead of 0.01, which teaches to "
            "exit first; use gamma 1, or episode='token'"
        )
    picker = NStepPicker(n_steps, gamma, greedy)
    split = _token_episodes if episode == "token" else _prompt_episodes
    episodes = [each for rollout in store for each in split(rollout)]
    if not episodes:
        raise ValueError("the store holds no decision: prompts need at least 2 new tokens")
    width = len(store.settings.features.names)
    return ReplayBuffer(
        InfiniteBuffer(),
        transition_picker=picker,
        episodes=episodes,
        observation_signature=Signature(dtype=[np.dtype(np.float32)], shape=[(width,)]),
        action_signature=Signature(dtype=[np.dtype(np.int32)], shape=[(1,)]),
        reward_signature=Signature(dtype=[np.dtype(np.float32)], shape=[(1,)]),
        action_space=ActionSpace.DISCRETE,
        action_size=N_ACTIONS,
    )


def _token_episodes(rollout: PromptRollout) -> Iterator[Episode]:
    """One episode a decided token, terminated."""
    actions, rewards = rollout.actions.astype(np.int32)[:, None], rollout.rewards[:, None]
    start = 0
    for end in (np.flatnonzero(rollout.token_end) + 1).tolist():
        yield Episode(rollout.observations[start:end], actions[start:end], rewards[start:end], terminated=True)
        start = end


def _prompt_episodes(rollout: PromptRollout) -> Iterator[Episode]:
    """The prompt as one episode: terminated at EOS, else truncated with a closing row; none without a decision."""
    if not rollout.n_rows:
        return
    observations, rewards = rollout.observations, rollout.rewards[:, None]
    actions = rollout.actions.astype(np.int32)[:, None]
    if not rollout.ended_by_eos:
        observations = np.concatenate([observations, rollout.final_observation[None]])
        actions = np.concatenate([actions, np.zeros((1, 1), dtype=np.int32)])
        rewards = np.concatenate([rewards, np.zeros((1, 1), dtype=np.float32)])
    yield Episode(observations, actions, rewards, terminated=rollout.ended_by_eos)
