"""Playback gives the transitions that acting token by token would give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from lede.buffers import PromptTrace, TraceStore, play, replay, synthesize
from lede.features import ConfidenceTrace, FeatureConfig
from lede.rewards import RewardConfig
from lede.seeding import Purpose, numpy_stream
from tests.buffers.samples import CANDIDATES, N_LAYERS, VOCAB, make_trace, settings

SETTINGS = settings("transitions", features=FeatureConfig(window=3), reward=RewardConfig(final_reward=0.5))


def act(trace: PromptTrace, exits: list[int]) -> dict[str, list[object]]:
    """Decide token by token as the process is defined, for a trace whose matches are certain."""
    running = ConfidenceTrace(trace.anchor, SETTINGS.features.window)
    rows: dict[str, list[object]] = {name: [] for name in ("observation", "action", "reward", "layer", "t", "match")}
    for t, exit_layer in enumerate(exits):
        for layer in CANDIDATES:
            leaves = layer == exit_layer
            hit = trace.match[t, layer - 1] == 1
            bonus = (N_LAYERS - layer) / N_LAYERS
            go_on = -0.01 + (0.5 if layer == CANDIDATES[-1] else 0)
            rows["observation"].append(
                (trace.confidence[t, layer - 1], trace.entropy[t, layer - 1], running.value(), layer / N_LAYERS)
            )
            rows["action"].append(int(leaves))
            rows["reward"].append(((1 if hit else -2) + bonus) if leaves else go_on)
            rows["layer"].append(layer)
            rows["t"].append(t + 1)
            rows["match"].append(int(hit) if leaves else -1)
            if leaves:
                break
        running.push(-float(trace.top1[t, (exit_layer or N_LAYERS) - 1]))
    rows["trace"] = [running.value()]
    return rows


@pytest.mark.parametrize("index", range(6))
def test_replay_equals_acting_token_by_token(index: int) -> None:
    trace = make_trace(index, n_tokens=12)
    exits = np.random.default_rng(index).choice([0, *CANDIDATES], size=11)
    rollout, rows = replay(trace, exits, SETTINGS), act(trace, exits.tolist())
    np.testing.assert_allclose(rollout.observations, np.asarray(rows["observation"]), rtol=1e-6)
    np.testing.assert_allclose(rollout.rewards, np.asarray(rows["reward"]), rtol=1e-6)
    assert rollout.actions.tolist() == rows["action"]
    assert rollout.layer.tolist() == rows["layer"]
    assert rollout.token_index.tolist() == rows["t"]
    assert rollout.match.tolist() == rows["match"]
    assert rollout.exit_layer[rollout.token_end].tolist() == exits.tolist()
    assert rollout.exit_layer[~rollout.token_end].sum() == 0
    np.testing.assert_array_equal(np.diff(rollout.token_index) == 1, rollout.token_end[:-1])


def test_final_observation_is_the_next_position_or_the_last_row() -> None:
    exits = [1, 0, 4, 2]
    cut = make_trace(0, n_tokens=5, eos=False)
    (after,) = act(cut, exits)["trace"]
    expected = np.asarray([cut.closing_confidence[0], cut.closing_entropy[0], after, 1 / N_LAYERS], dtype=np.float32)
    np.testing.assert_allclose(replay(cut, exits, SETTINGS).final_observation, expected, rtol=1e-6)

    ended = replay(make_trace(0, n_tokens=5, eos=True), exits, SETTINGS)
    np.testing.assert_array_equal(ended.final_observation, ended.observations[-1])


def test_a_prompt_of_one_token_has_no_decision() -> None:
    trace = make_trace(0, n_tokens=1, eos=False)
    rollout = replay(trace, [], SETTINGS)
    assert rollout.n_rows == 0
    np.testing.assert_allclose(rollout.final_observation[2], min(trace.anchor, 50), rtol=1e-6)


def test_observations_are_clipped_to_their_bounds() -> None:
    trace = make_trace(1, n_tokens=3)
    trace = replace(trace, confidence=trace.confidence + 100, entropy=trace.entropy + 100, anchor=99.0)
    rollout = replay(trace, [1, 1], SETTINGS)
    np.testing.assert_allclose(rollout.observations[0], [50, np.log(VOCAB), 50, 1 / N_LAYERS], rtol=1e-6)


def test_decisions_that_do_not_fit_are_refused() -> None:
    trace = make_trace(0, n_tokens=3)
    with pytest.raises(ValueError, match=r"candidates \[1, 2, 4\] or 0 .* got \[3\]"):
        replay(trace, [3, 1], SETTINGS)
    with pytest.raises(ValueError, match="decides 2 tokens"):
        replay(trace, [1], SETTINGS)
    with pytest.raises(ValueError, match="has 6 layers, the settings say 7"):
        replay(trace, [1, 1], replace(SETTINGS, n_layers=7))


def test_sampled_matches_have_their_probability() -> None:
    trace = make_trace(0, n_tokens=4001, sampled=True)
    chance = np.tile([0.0, 0.25, 0.5, 1.0], 1000)
    trace = replace(trace, match=np.repeat(chance[:, None], N_LAYERS, axis=1))
    rollout = replay(trace, np.full(4000, 2), SETTINGS, np.random.default_rng(0))
    match = rollout.match[rollout.token_end]
    for p in (0.0, 0.25, 0.5, 1.0):
        assert abs(match[chance == p].mean() - p) <= 4 * np.sqrt(p * (1 - p) / 1000)
    bonus = (N_LAYERS - 2) / N_LAYERS
    np.testing.assert_allclose(rollout.rewards[rollout.token_end], np.where(match == 1, 1, -2) + bonus, rtol=1e-6)


def test_sampled_matches_are_by_default_those_of_the_live_environment() -> None:
    trace = make_trace(3, n_tokens=30, sampled=True)
    rollout = replay(trace, np.full(29, 4), replace(SETTINGS, seed=5))
    draws = [numpy_stream(5, Purpose.MATCHES, 3, t).random() for t in range(1, 30)]
    expected = np.asarray(draws) < trace.match[:, 3]
    assert rollout.match[rollout.token_end].tolist() == expected.tolist()


def test_uniform_draws_every_layer_and_none_equally() -> None:
    store = TraceStore(settings(), [make_trace(i, n_tokens=201) for i in range(20)])
    rollouts = synthesize(store, seed=1)
    exits = np.concatenate([r.exit_layer[r.token_end] for r in rollouts])
    counts = np.bincount(exits, minlength=5)[[0, *CANDIDATES]]
    assert counts.sum() == 4000
    assert np.all(np.abs(counts - 1000) < 4 * np.sqrt(4000 * 0.25 * 0.75))
    assert rollouts.settings.kind == "transitions"
    assert rollouts.settings.explore == "uniform"


def test_synthesis_depends_on_seed_and_prompt_alone() -> None:
    store = TraceStore(settings(seed=4), [make_trace(i, n_tokens=20) for i in range(6)])
    whole, part = synthesize(store), synthesize(store.select([4, 2]))
    by_index = {r.prompt_index: r for r in whole}
    for rollout in part:
        np.testing.assert_array_equal(rollout.actions, by_index[rollout.prompt_index].actions)
    np.testing.assert_array_equal(whole.arrays()["actions"], synthesize(store, seed=4).arrays()["actions"])
    other = synthesize(store, seed=5).arrays()["exit_layer"]
    assert not np.array_equal(whole.arrays()["exit_layer"], other)


def test_synthesis_takes_other_candidates_features_and_reward() -> None:
    store = TraceStore(settings(), [make_trace(0, n_tokens=30)])
    features, reward = FeatureConfig(names=("entropy", "depth")), RewardConfig(continue_cost=-0.5)
    other = synthesize(store, candidates=(3, 5), features=features, reward=reward)
    arrays = other.arrays()
    assert set(arrays["layer"].tolist()) == {3, 5}
    assert arrays["observations"].shape[1] == 2
    assert set(arrays["rewards"][arrays["actions"] == 0].tolist()) == {-0.5}
    with pytest.raises(ValueError, match="top_k 5, not 3"):
        synthesize(store, features=FeatureConfig(top_k=3))
    with pytest.raises(ValueError, match="must be 'uniform', got 'greedy'"):
        synthesize(store, behaviour="greedy")


def peaked(observations: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Exit where the trace is low or the entropy is: depends on past decisions."""
    return np.asarray((observations[:, 2] < 0.8) | (observations[:, 1] < 1)).astype(np.int64)


def test_play_shows_what_the_replay_shows() -> None:
    """Every feature that the text defines, in another order than the registry's."""
    features = FeatureConfig(("agreement", "depth", "margin", "trace", "surprisal"))
    traces = [make_trace(i, n_tokens=n) for i, n in enumerate((9, 3, 14))]
    shown: list[npt.NDArray[np.float32]] = []

    def doubtful(observations: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        shown.append(observations)
        return np.asarray(observations[:, 4] < 0.7).astype(np.int64)

    for rollout in play(traces, doubtful, replace(SETTINGS, features=features)):
        assert rollout.actions.tolist() == np.asarray(rollout.observations[:, 4] < 0.7).astype(int).tolist()
        assert set(map(tuple, rollout.observations.tolist())) <= set(map(tuple, np.concatenate(shown).tolist()))
        trace = traces[rollout.prompt_index]
        for row, layer, t in zip(rollout.observations, rollout.layer, rollout.token_index - 1, strict=True):
            assert row[4] == pytest.approx(-trace.top1[t, layer - 1])
            assert row[2] == pytest.approx(trace.top1[t, layer - 1] - trace.top2[t, layer - 1])
            below = {1: None, 2: 1, 4: 2}[int(layer)]
            same = below is not None and trace.token[t, layer - 1] == trace.token[t, below - 1]
            assert row[0] == (0 if below is None else 1 if same else -1)


def test_play_and_replay_refuse_features_of_rounds() -> None:
    odd = replace(SETTINGS, features=FeatureConfig(("entropy", "survival")))
    for attempt in (lambda: replay(make_trace(0, n_tokens=3), [1, 1], odd), lambda: play([], peaked, odd)):
        with pytest.raises(ValueError, match="playback decides token by token and does not define survival"):
            attempt()


def test_play_follows_the_policy_over_unequal_prompts() -> None:
    traces = [make_trace(i, n_tokens=n) for i, n in enumerate((1, 9, 3, 14))]
    for rollout in play(traces, peaked, SETTINGS):
        assert rollout.actions.tolist() == peaked(rollout.observations).tolist()
        assert rollout.token_end.sum() == rollout.token_ids.size - 1


def test_play_explores_a_share_of_the_tokens() -> None:
    traces = [make_trace(i, n_tokens=1001) for i in range(4)]

    def never(observations: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        return np.zeros(len(observations), dtype=np.int64)

    exits = np.concatenate([r.exit_layer[r.token_end] for r in play(traces, never, SETTINGS, epsilon=0.4)])
    counts = np.bincount(exits, minlength=5)[[0, *CANDIDATES]]
    expected = 4000 * np.asarray([0.7, 0.1, 0.1, 0.1])
    assert np.all(np.abs(counts - expected) < 4 * np.sqrt(expected))
    assert play([], never, SETTINGS) == []
