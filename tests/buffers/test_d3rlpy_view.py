"""What d3rlpy trains on is what the store holds; n-step returns equal sums made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lede.buffers import NStepPicker, TransitionStore
from lede.quiet_d3rlpy import import_d3rlpy
from tests.buffers.samples import make_rollout, settings

d3rlpy = import_d3rlpy()


def make_episode(rewards: list[float], terminated: bool, actions: list[int] | None = None) -> Any:
    """An episode whose observation at step i is (i, 1); a truncated one gets its closing row."""
    closing = 0 if terminated else 1
    n = len(rewards) + closing
    return d3rlpy.dataset.Episode(
        observations=np.stack([np.arange(n), np.ones(n)], axis=1).astype(np.float32),
        actions=np.asarray((actions or [0] * len(rewards)) + [0] * closing, dtype=np.int32)[:, None],
        rewards=np.asarray([*rewards, *[0.0] * closing], dtype=np.float32)[:, None],
        terminated=terminated,
    )


def returns(episode: Any, picker: NStepPicker) -> list[float]:
    """The n-step return from every row that a transition starts at."""
    return [float(picker(episode, i).reward[0]) for i in range(episode.transition_count)]


@pytest.mark.parametrize("terminated", [True, False])
def test_no_reward_is_lost_at_the_end(terminated: bool) -> None:
    episode = make_episode([1, 2, 3, 4, 100], terminated)
    assert returns(episode, NStepPicker(3)) == [6, 9, 107, 104, 100]
    assert returns(episode, NStepPicker(1)) == [1, 2, 3, 4, 100]
    assert returns(episode, NStepPicker(2, gamma=0.5)) == [2, 3.5, 5, 54, 100]
    assert [NStepPicker(3)(episode, i).interval for i in range(5)] == [3, 3, 3, 2, 1]


def test_where_a_return_bootstraps() -> None:
    picker = NStepPicker(2)
    cut, ended = make_episode([1, 2, 3], terminated=False), make_episode([1, 2, 3], terminated=True)
    assert [picker(cut, i).next_observation[0] for i in range(3)] == [2, 3, 3]
    assert [picker(cut, i).terminal for i in range(3)] == [0, 0, 0]
    assert [picker(ended, i).terminal for i in range(3)] == [0, 1, 1]
    assert picker(ended, 0).next_observation.tolist() == [2, 1]
    assert picker(ended, 1).next_observation.tolist() == [0, 0]
    with pytest.raises(ValueError, match="no transition starts at row 3"):
        picker(cut, 3)


def test_a_return_is_cut_before_the_first_action_that_is_not_greedy() -> None:
    episode = make_episode([1, 10, 100, 1000], terminated=True, actions=[1, 0, 1, 0])
    picker = NStepPicker(4, greedy=lambda observations: np.zeros(len(observations), dtype=int))
    # the action at row 2 is not greedy; a return's own first action never cuts it
    assert returns(episode, picker) == [11, 10, 1100, 1000]
    first = picker(episode, 0)
    assert (first.interval, first.terminal, first.next_observation.tolist()) == (2, 0.0, [2, 1])
    assert first.next_action.tolist() == [1]
    assert picker(episode, 2).terminal == 1.0


def test_the_greedy_choice_sees_the_states_of_the_later_actions() -> None:
    episode = make_episode([1, 10, 100, 1000], terminated=False, actions=[0, 0, 1, 1])
    picker = NStepPicker(9, greedy=lambda observations: (observations[:, 0] >= 2).astype(int))
    assert returns(episode, picker) == [1111, 1110, 1100, 1000]
    picker.greedy = lambda observations: (observations[:, 0] >= 3).astype(int)
    assert returns(episode, picker) == [11, 10, 1100, 1000]


@given(
    rewards=st.lists(st.integers(-5, 5), min_size=1, max_size=8),
    actions=st.lists(st.integers(0, 1), min_size=8, max_size=8),
    chosen=st.lists(st.integers(0, 1), min_size=8, max_size=8),
    n_steps=st.integers(1, 9),
    gamma=st.sampled_from([1.0, 0.5]),
    terminated=st.booleans(),
)
def test_returns_equal_the_definition(
    rewards: list[int], actions: list[int], chosen: list[int], n_steps: int, gamma: float, terminated: bool
) -> None:
    episode = make_episode([float(r) for r in rewards], terminated, actions[: len(rewards)])
    picker = NStepPicker(n_steps, gamma, lambda observations: np.asarray(chosen)[observations[:, 0].astype(int)])
    for start in range(len(rewards)):
        total, step = 0.0, start
        while step < len(rewards) and step - start < n_steps and (step == start or actions[step] == chosen[step]):
            total += gamma ** (step - start) * rewards[step]
            step += 1
        transition = picker(episode, start)
        assert transition.reward[0] == total
        assert transition.interval == step - start
        assert transition.terminal == float(terminated and step == len(rewards))
        if not transition.terminal:
            assert transition.next_observation[0] == step


def test_token_episodes_end_terminated() -> None:
    rollout = make_rollout(0, (1, 3, 2))
    buffer = TransitionStore(settings("transitions"), [rollout]).to_d3rlpy()
    assert [episode.size() for episode in buffer.episodes] == [1, 3, 2]
    assert all(episode.terminated for episode in buffer.episodes)
    assert buffer.transition_count == 6
    joined = np.concatenate([episode.observations for episode in buffer.episodes])
    np.testing.assert_array_equal(joined, rollout.observations)
    np.testing.assert_array_equal(np.concatenate([e.rewards for e in buffer.episodes])[:, 0], rollout.rewards)


def test_prompt_episodes_are_terminated_by_eos_and_truncated_by_the_budget() -> None:
    rollouts = [make_rollout(0, (1, 3), eos=True), make_rollout(1, (2, 2)), make_rollout(2, ())]
    buffer = TransitionStore(settings("transitions"), rollouts).to_d3rlpy(episode="prompt", n_steps=3)
    ended, cut = buffer.episodes
    assert (ended.terminated, cut.terminated) == (True, False)
    assert (ended.transition_count, cut.transition_count) == (4, 4)
    np.testing.assert_array_equal(cut.observations[-1], rollouts[1].final_observation)
    last = buffer.transition_picker(cut, 3)
    assert last.reward[0] == rollouts[1].rewards[-1]
    assert last.terminal == 0
    np.testing.assert_array_equal(last.next_observation, rollouts[1].final_observation)
    np.testing.assert_allclose(buffer.transition_picker(cut, 1).reward[0], rollouts[1].rewards[1:].sum(), rtol=1e-6)


def test_a_batch_holds_the_rows_of_the_store() -> None:
    rollouts = [make_rollout(i, (3, 1, 2)) for i in range(3)]
    store = TransitionStore(settings("transitions"), rollouts)
    arrays = store.arrays()
    rows = {tuple(row): i for i, row in enumerate(arrays["observations"].tolist())}
    batch = store.to_d3rlpy(n_steps=1).sample_transition_batch(64)
    for k in range(64):
        i = rows[tuple(batch.observations[k].tolist())]
        assert batch.actions[k, 0] == arrays["actions"][i]
        assert batch.rewards[k, 0] == arrays["rewards"][i]
        assert batch.terminals[k, 0] == arrays["token_end"][i]
        expected = np.zeros(4) if arrays["token_end"][i] else arrays["observations"][i + 1]
        np.testing.assert_array_equal(batch.next_observations[k], expected)


def test_there_are_two_actions_even_if_one_is_never_seen() -> None:
    rollout = make_rollout(0, (3, 3))
    assert rollout.actions.tolist() == [0] * 6
    buffer = TransitionStore(settings("transitions"), [rollout]).to_d3rlpy()
    assert buffer.dataset_info.action_size == 2
    assert buffer.dataset_info.action_space == d3rlpy.constants.ActionSpace.DISCRETE
    algo = d3rlpy.algos.DQNConfig(batch_size=4).create(device="cpu:0")
    algo.build_with_dataset(buffer)
    assert algo.action_size == 2
    assert np.isfinite(algo.update(buffer.sample_transition_batch(4))["loss"])


def test_a_discount_on_whole_prompts_is_refused_with_its_reason() -> None:
    store = TransitionStore(settings("transitions"), [make_rollout(0)])
    with pytest.raises(ValueError, match=r"\(1 - gamma\) times the value of all that follows"):
        store.to_d3rlpy(episode="prompt", gamma=0.99)
    picker: Any = store.to_d3rlpy(gamma=0.99, n_steps=2).transition_picker
    assert (picker.gamma, picker.n_steps) == (0.99, 2)


def test_settings_that_make_no_sense_are_refused() -> None:
    store = TransitionStore(settings("transitions"), [make_rollout(0)])
    with pytest.raises(ValueError, match="n_steps must be at least 1, got 0"):
        store.to_d3rlpy(n_steps=0)
    with pytest.raises(ValueError, match=r"gamma must be in \(0, 1\], got 1.5"):
        store.to_d3rlpy(gamma=1.5)
    with pytest.raises(ValueError, match="'token' or 'prompt', got 'word'"):
        store.to_d3rlpy(episode="word")  # type: ignore[arg-type]
    empty = replace(make_rollout(0, ()), prompt_index=1)
    with pytest.raises(ValueError, match="holds no decision"):
        TransitionStore(settings("transitions"), [empty]).to_d3rlpy()
