"""Batches drawn without a loop: equal to the picker's, and equal to sums done by hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from lede.buffers.records import PromptRollout
from lede.buffers.settings import StoreSettings
from lede.buffers.store import TransitionStore
from lede.transitions import NStepBatch, Transitions

SETTINGS = StoreSettings(kind="transitions", model="none", n_layers=8, vocab_size=16, candidates=(2, 3, 4))


def random_rollout(prompt_index: int, n_tokens: int, ended_by_eos: bool) -> PromptRollout:
    rng = np.random.default_rng(prompt_index)
    candidates = np.asarray(SETTINGS.candidates)
    choice = rng.integers(0, candidates.size + 1, n_tokens)  # the last option is no exit
    last = np.minimum(choice, candidates.size - 1)
    token, candidate = np.nonzero(np.arange(candidates.size) <= last[:, None])
    token_end = candidate == last[token]
    actions = token_end & (choice[token] < candidates.size)
    observations = rng.normal(size=(token.size, 4)).astype(np.float32)
    return PromptRollout(
        prompt_index=prompt_index,
        prompt_ids=np.arange(3),
        token_ids=np.zeros(n_tokens + 1, dtype=np.int64),
        ended_by_eos=ended_by_eos,
        observations=observations,
        actions=actions.astype(np.int8),
        rewards=rng.normal(size=token.size).astype(np.float32),
        layer=candidates[candidate].astype(np.int16),
        exit_layer=np.where(actions, candidates[candidate], 0).astype(np.int16),
        token_index=(token + 1).astype(np.int32),
        token_end=token_end,
        match=np.where(actions, 1, -1).astype(np.int8),
        final_observation=observations[-1] if ended_by_eos else rng.normal(size=4).astype(np.float32),
    )


def sign_policy(observations: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    return (observations[:, 0] > 0).astype(np.int64)


ROLLOUTS = [random_rollout(0, 7, True), random_rollout(1, 9, False), random_rollout(2, 1, False)]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("n_steps", [1, 2, 3, 8])
@pytest.mark.parametrize(("episode", "gamma"), [("token", 1.0), ("token", 0.9), ("prompt", 1.0)])
def test_equals_the_picker_row_by_row(episode: str, gamma: float, n_steps: int, cut: bool) -> None:
    greedy = sign_policy if cut else None
    transitions = Transitions.from_rollouts(ROLLOUTS, episode)  # type: ignore[arg-type]
    batch = transitions.batch(np.arange(len(transitions)), n_steps, gamma, greedy)
    buffer = TransitionStore(SETTINGS, ROLLOUTS).to_d3rlpy(episode, gamma, n_steps, greedy)  # type: ignore[arg-type]
    picked = [
        buffer.transition_picker(each, index) for each in buffer.episodes for index in range(each.transition_count)
    ]
    assert len(picked) == len(transitions)
    np.testing.assert_array_equal(batch.observations, [each.observation for each in picked])
    np.testing.assert_array_equal(batch.actions, [each.action for each in picked])
    np.testing.assert_allclose(batch.rewards, [each.reward for each in picked], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(batch.next_observations, [each.next_observation for each in picked])
    np.testing.assert_array_equal(batch.terminals[:, 0], [each.terminal for each in picked])
    if episode == "token":  # the picker counts decisions; in prompt episodes ours counts tokens
        np.testing.assert_array_equal(batch.intervals[:, 0], [each.interval for each in picked])


def two_tokens(ended_by_eos: bool) -> PromptRollout:
    """Continue, exit; then continue, continue, exit."""
    actions = np.asarray([0, 1, 0, 0, 1], dtype=np.int8)
    return PromptRollout(
        prompt_index=0,
        prompt_ids=np.arange(3),
        token_ids=np.zeros(3, dtype=np.int64),
        ended_by_eos=ended_by_eos,
        observations=np.arange(5, dtype=np.float32)[:, None],
        actions=actions,
        rewards=np.asarray([1, 2, 4, 8, 16], dtype=np.float32),
        layer=np.asarray([2, 3, 2, 3, 4]),
        exit_layer=np.asarray([0, 3, 0, 0, 4]),
        token_index=np.asarray([1, 1, 2, 2, 2]),
        token_end=np.asarray([False, True, False, False, True]),
        match=np.asarray([-1, 1, -1, -1, 1], dtype=np.int8),
        final_observation=np.asarray([99.0], dtype=np.float32),
    )


def whole(ended_by_eos: bool, n_steps: int, gamma: float) -> NStepBatch:
    transitions = Transitions.from_rollouts([two_tokens(ended_by_eos)], "prompt")
    return transitions.batch(np.arange(5), n_steps, gamma)


def test_prompt_episodes_discount_by_token() -> None:
    batch = whole(ended_by_eos=False, n_steps=3, gamma=0.5)
    # a continue is free of discount; what lies behind a token's end counts half
    assert batch.rewards[:, 0].tolist() == [1 + 2 + 4 / 2, 2 + 4 / 2 + 8 / 2, 4 + 8 + 16, 8 + 16, 16]
    assert batch.intervals[:, 0].tolist() == [1, 1, 1, 1, 1]
    assert batch.next_observations[:, 0].tolist() == [3, 4, 99, 99, 99]
    assert not batch.terminals.any()


def test_last_reward_of_a_truncated_prompt_counts_and_eos_terminates() -> None:
    truncated, ended = (whole(ended_by_eos, n_steps=3, gamma=1.0) for ended_by_eos in (False, True))
    assert truncated.rewards[:, 0].tolist() == ended.rewards[:, 0].tolist() == [7, 14, 28, 24, 16]
    assert ended.terminals[:, 0].tolist() == [0, 0, 1, 1, 1]
    assert ended.next_observations[:, 0].tolist() == [3, 4, 0, 0, 0]
    assert truncated.next_observations[:, 0].tolist() == [3, 4, 99, 99, 99]


def test_a_buffer_without_decisions_is_refused() -> None:
    with pytest.raises(ValueError, match="no decision"):
        Transitions.from_rollouts([])
