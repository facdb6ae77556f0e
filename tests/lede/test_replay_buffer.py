"""The buffer gives d3rlpy what d3rlpy's own would, and whatever of d3rlpy reads a buffer reads it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from lede.buffers import NStepPicker, TransitionStore
from lede.quiet_d3rlpy import import_d3rlpy
from lede.replay_buffer import NStepReplayBuffer, greedy_under
from lede.transitions import Transitions
from tests.buffers.samples import make_rollout, settings

d3rlpy = import_d3rlpy()

STORE = TransitionStore(
    settings("transitions"), [make_rollout(i, (3, 1, 2, 3), eos=i % 2 == 0) for i in range(6)] + [make_rollout(6, ())]
)


def make(episode: Any = "token", **changes: Any) -> NStepReplayBuffer:
    return NStepReplayBuffer(Transitions.from_rollouts(list(STORE), episode), **changes)


def often(observations: Any) -> Any:
    """A rule that agrees with the data now and then."""
    return (observations[:, 0] > 0.5).astype(int)


def values(transition: Any) -> tuple[Any, ...]:
    """What a learner reads of a transition."""
    arrays = (transition.observation, transition.action, transition.reward, transition.next_observation)
    return (*(tuple(map(float, array)) for array in arrays), transition.terminal, transition.interval)


@pytest.mark.parametrize("greedy", [None, often], ids=["uncut", "cut"])
@pytest.mark.parametrize(("episode", "gamma"), [("token", 1.0), ("token", 0.5), ("prompt", 1.0)])
def test_every_transition_is_that_of_d3rlpys_way(episode: Any, gamma: float, greedy: Any) -> None:
    ours = make(episode, n_steps=3, gamma=gamma, greedy=greedy)
    theirs = STORE.to_d3rlpy(episode, gamma, 3, greedy)
    assert ours.size() == theirs.size() == len(ours.episodes)
    assert ours.transition_count == theirs.transition_count
    assert ours.dataset_info == theirs.dataset_info
    longer = 0
    for one, other in zip(ours.episodes, theirs.episodes, strict=True):
        np.testing.assert_array_equal(one.observations, other.observations)
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.rewards, other.rewards)
        assert (one.terminated, one.transition_count) == (other.terminated, other.transition_count)
        for i in range(one.transition_count):
            picked, expected = ours.transition_picker(one, i), theirs.transition_picker(other, i)
            if episode == "token":  # prompt episodes count tokens, d3rlpy decisions; with gamma 1 that is the same
                assert values(picked)[:2] + values(picked)[3:] == values(expected)[:2] + values(expected)[3:]
            np.testing.assert_array_equal(picked.next_observation, expected.next_observation)
            np.testing.assert_allclose(picked.reward, expected.reward, rtol=1e-6)
            assert picked.terminal == expected.terminal
            longer += expected.interval > 1
    assert longer > 10


def test_batches_are_uniform_over_those_transitions() -> None:
    buffer = make(n_steps=2, seed=7)
    known = {values(buffer.transition_picker(e, i)): 0 for e in buffer.episodes for i in range(e.transition_count)}
    assert len(known) == buffer.transition_count
    n_drawn = 100 * len(known)
    batch = buffer.sample_transition_batch(n_drawn)
    columns = (batch.observations, batch.actions, batch.rewards, batch.next_observations)
    for *arrays, terminal, interval in zip(*columns, batch.terminals[:, 0], batch.intervals[:, 0], strict=True):
        known[(*(tuple(map(float, array)) for array in arrays), float(terminal), int(interval))] += 1
    counts = np.asarray(list(known.values()))
    assert counts.sum() == n_drawn
    assert ((counts - 100) ** 2 / 100).sum() < 2 * len(known)  # chi-square, more than 5 standard deviations away


def test_seeds_reproduce() -> None:
    batches = [make(seed=seed).sample_transition_batch(32).observations for seed in (1, 1, 2)]
    np.testing.assert_array_equal(batches[0], batches[1])
    assert not np.array_equal(batches[0], batches[2])


def test_prompt_episodes_discount_tokens() -> None:
    rollout = make_rollout(0, (3, 2), eos=False)
    transitions = Transitions.from_rollouts([rollout], "prompt")
    buffer = NStepReplayBuffer(transitions, n_steps=4, gamma=0.5)
    picked = buffer.transition_picker(buffer.episodes[0], 0)
    np.testing.assert_allclose(picked.reward[0], rollout.rewards[:3].sum() + 0.5 * rollout.rewards[3], rtol=1e-6)
    assert picked.interval == 1


def algorithm(**changes: Any) -> Any:
    config = d3rlpy.algos.DoubleDQNConfig(batch_size=16, target_update_interval=5, gamma=1.0, **changes)
    return config.create(device="cpu:0")


def fit(learner: Any, buffer: NStepReplayBuffer, **changes: Any) -> Any:
    return learner.fit(
        buffer,
        n_steps=20,
        n_steps_per_epoch=10,
        show_progress=False,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
        **changes,
    )


@pytest.mark.parametrize("episode", ["token", "prompt"])
def test_d3rlpy_fits_and_evaluates(episode: Any) -> None:
    buffer = make(episode, n_steps=3)
    buffer.greedy = greedy_under(learner := algorithm(observation_scaler=buffer.observation_scaler()))
    metrics = d3rlpy.metrics
    evaluators = {
        "td_error": metrics.TDErrorEvaluator(),
        "advantage": metrics.DiscountedSumOfAdvantageEvaluator(),
        "value": metrics.AverageValueEstimationEvaluator(),
        "initial": metrics.InitialStateValueEstimationEvaluator(),
        "soft_opc": metrics.SoftOPCEvaluator(return_threshold=-100.0),
        "match": metrics.DiscreteActionMatchEvaluator(),
    }
    (_, _), (_, last) = fit(learner, buffer, evaluators=evaluators)
    assert set(evaluators) <= set(last)
    assert all(np.isfinite(value) for value in last.values())
    assert learner.impl.action_size == 2
    # fitted Q evaluation of the learner on the same rows
    fqe = d3rlpy.ope.DiscreteFQE(algo=learner, config=d3rlpy.ope.FQEConfig(batch_size=16, gamma=1.0), device="cpu:0")
    assert np.isfinite(fit(fqe, make(episode))[-1][1]["loss"])


def test_scalers_of_d3rlpy_fit_on_it() -> None:
    fitted = algorithm(
        observation_scaler=d3rlpy.preprocessing.StandardObservationScaler(eps=0.0),
        reward_scaler=d3rlpy.preprocessing.StandardRewardScaler(),
    )
    buffer = make()
    fit(fitted, buffer)
    ours = buffer.observation_scaler()
    np.testing.assert_allclose(fitted.observation_scaler.mean, ours.mean, rtol=1e-5)
    np.testing.assert_allclose(fitted.observation_scaler.std, ours.std, rtol=1e-5)


def test_the_cut_follows_the_algorithm() -> None:
    buffer = make(n_steps=3)
    learner = algorithm()
    buffer.greedy = greedy_under(learner)
    assert (buffer.sample_transition_batch(64).intervals == 1).all()  # no network, nothing is greedy
    learner.build_with_dataset(buffer)
    state = buffer.transitions.states[:5]
    np.testing.assert_array_equal(buffer.greedy(state), learner.predict(state))


def test_there_are_as_many_actions_as_given() -> None:
    buffer = make(n_actions=6)
    learner = algorithm()
    learner.build_with_dataset(buffer)
    assert learner.impl.action_size == buffer.dataset_info.action_size == 6


def test_episodes_index_like_a_list() -> None:
    episodes = make("prompt").episodes
    assert len(episodes) == 6
    np.testing.assert_array_equal(episodes[-1].observations, episodes[5].observations)
    assert [len(episode) for episode in episodes[1:3]] == [10, 9]  # a truncated one has its closing row
    with pytest.raises(IndexError):
        episodes[6]


def test_dumps_load_in_d3rlpy() -> None:
    buffer = make("prompt")
    file = io.BytesIO()
    buffer.dump(file)
    loaded = d3rlpy.dataset.ReplayBuffer.load(file, d3rlpy.dataset.InfiniteBuffer(), transition_picker=NStepPicker())
    assert loaded.transition_count == buffer.transition_count
    np.testing.assert_array_equal(loaded.episodes[1].observations, buffer.episodes[1].observations)


ONLINE, TRAJECTORIES = "create_fifo_replay_buffer", r"TransitionStore\.to_d3rlpy"

NOT_SUPPORTED: dict[str, tuple[Any, str]] = {
    "append": (lambda b: b.append(0, 0, 0), ONLINE),
    "append_episode": (lambda b: b.append_episode(b.episodes[0]), r"before Transitions\.from_rollouts"),
    "clip_episode": (lambda b: b.clip_episode(True), ONLINE),
    "sample_trajectory": (lambda b: b.sample_trajectory(3), TRAJECTORIES),
    "sample_trajectory_batch": (lambda b: b.sample_trajectory_batch(2, 3), TRAJECTORIES),
    "trajectory_slicer": (lambda b: b.trajectory_slicer, TRAJECTORIES),
    "buffer": (lambda b: b.buffer, "in `transitions`"),
    "load": (lambda b: b.load(None, None), r"ReplayBuffer\.load"),
    "from_episode_generator": (lambda b: b.from_episode_generator(None, None), r"d3rlpy\.dataset\.ReplayBuffer"),
    "foreign_episode": (lambda b: b.transition_picker(make().episodes[0], 0), r"lede\.buffers\.NStepPicker"),
}


@pytest.mark.parametrize(("call", "message"), NOT_SUPPORTED.values(), ids=NOT_SUPPORTED)
def test_what_is_not_supported_says_what_to_use(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(make())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_steps": 0}, "n_steps must be at least 1, got 0"),
        ({"gamma": 0.0}, r"gamma must be in \(0, 1\], got 0"),
        ({"n_actions": 1}, "hold action 1: give 2"),
    ],
)
def test_unusable_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_no_transition_starts_at_a_closing_row() -> None:
    buffer = make("prompt")
    truncated = buffer.episodes[1]
    with pytest.raises(ValueError, match="no transition starts at row 9 of an episode with 9"):
        buffer.transition_picker(truncated, 9)
