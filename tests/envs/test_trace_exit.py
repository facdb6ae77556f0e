"""The environment on traces is the live one, step for step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from lede.buffers import PromptTrace, StoreWriter, TraceStore, TransitionStore
from lede.collectors import collect_teacher
from lede.envs import LayerExitEnv, Rules, TraceExitEnv
from lede.features import TEXT_FEATURES, FeatureConfig
from lede.rewards import RewardConfig
from lede.verification import Warp
from tests.buffers.samples import make_trace, settings
from tests.ending_models import ending_model, model_that_ends
from tests.tiny_models import VOCAB_SIZE, plain_generate, prompt, tiny_model

PROMPTS = [prompt(i, 5 + i) for i in range(4)]
CANDIDATES = (1, 2, 4)
BUDGET = 8
SEED = 3


def teach(model: Any, warp: Warp | None = None) -> list[PromptTrace]:
    rules = Rules(CANDIDATES, BUDGET, warp=warp or Warp())
    found = collect_teacher(model, list(enumerate(PROMPTS)), rules, SEED, len(PROMPTS))
    return sorted(found, key=lambda trace: trace.prompt_index)


def make(traces: Any, **changes: Any) -> TraceExitEnv:
    env = gymnasium.make("lede/TraceExit-v0", traces=traces, **{"candidates": CANDIDATES, **changes}).unwrapped
    assert isinstance(env, TraceExitEnv)
    return env


def assert_alike(live: LayerExitEnv, played: TraceExitEnv, n_steps: int, leave: float = 0.1) -> int:
    """Play both by the same random decisions and compare all that they tell; returns the number of episodes.

    Args:
        live: Runs the model.
        played: Plays the traces.
        n_steps: Steps.
        leave: Share of the steps after which an episode is left though it goes on.
    """
    rng = np.random.default_rng(0)
    episodes, results = 1, (live.reset(seed=SEED), played.reset(seed=SEED))
    for _ in range(n_steps):
        (seen, info), (seen_played, info_played) = results
        np.testing.assert_allclose(seen_played, seen, atol=1e-6)
        assert info == info_played
        action = int(rng.random() < 0.4)
        one, other = live.step(action), played.step(action)
        assert one[1:] == other[1:]  # rewards exact
        np.testing.assert_allclose(other[0], one[0], atol=1e-6)
        results = ((one[0], one[4]), (other[0], other[4]))
        if one[2] or one[3] or rng.random() < leave:
            results, episodes = (live.reset(), played.reset()), episodes + 1
    return episodes


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
@pytest.mark.parametrize("episode", ["token", "prompt"])
def test_step_for_step_the_live_environment(episode: Any, order: Any) -> None:
    model = tiny_model("llama")
    shared: dict[str, Any] = {
        "episode": episode,
        "order": order,
        "features": FeatureConfig(TEXT_FEATURES, window=3),
        "reward": RewardConfig(final_reward=0.25),
    }
    live = LayerExitEnv(model, PROMPTS, CANDIDATES, BUDGET, **shared)
    played = make(teach(model), vocab_size=VOCAB_SIZE, **shared)
    assert assert_alike(live, played, 150) > 8  # more than a pass over the prompts


@pytest.mark.parametrize("episode", ["token", "prompt"])
def test_step_for_step_after_eos(episode: Any) -> None:
    model, _ = model_that_ends(PROMPTS[1], 4)
    live = LayerExitEnv(model, PROMPTS, CANDIDATES, BUDGET, episode)
    traces = teach(model)
    assert {trace.ended_by_eos for trace in traces} == {True, False}
    assert_alike(live, make(traces, vocab_size=VOCAB_SIZE, episode=episode), 100)


@pytest.mark.parametrize("episode", ["token", "prompt"])
def test_step_for_step_when_sampling(episode: Any) -> None:
    """In the first pass, after which the live environment draws new texts."""
    model = tiny_model("llama")
    live = LayerExitEnv(model, PROMPTS, CANDIDATES, BUDGET, episode, temperature=0.8, order="sequential")
    traces = teach(model, Warp(0.8))
    uncertain = [((trace.match > 0) & (trace.match < 1)).any() for trace in traces]
    assert all(uncertain)
    played = make(traces, vocab_size=VOCAB_SIZE, episode=episode, order="sequential")
    # 4 prompts of 7 decided tokens, some of which take several steps
    assert_alike(live, played, 28, leave=0)


def test_later_passes_draw_matches_anew() -> None:
    trace = make_trace(0, 12, eos=False, sampled=True)
    env = make([trace], vocab_size=50, episode="prompt", candidates=(1,))
    passes = []
    for seed in (5, None, None, 5):
        env.reset(seed=seed)
        passes.append([env.step(1)[4]["match"] for _ in range(11)])
    assert passes[0] == passes[3]
    assert passes[0] != passes[1] != passes[2]


def test_a_prompt_that_ends_at_once_is_passed_over() -> None:
    first = [plain_generate(tiny_model("llama"), ids, 1)[0] for ids in PROMPTS]
    env = make(teach(ending_model(first[1])), vocab_size=VOCAB_SIZE, order="sequential", episode="prompt")
    visited = [env.reset()[1]["prompt_index"] for _ in range(6)]
    assert visited == ([i for i in range(4) if first[i] != first[1]] * 6)[:6]


def test_the_checker_has_nothing_to_say() -> None:
    for sampled in (False, True):
        traces = [make_trace(i, 6, sampled=sampled) for i in range(3)]
        for episode in ("token", "prompt"):
            check_env(make(traces, vocab_size=50, episode=episode))  # warnings are errors


def test_settings_come_from_the_store(tmp_path: Path) -> None:
    features, reward = FeatureConfig(("entropy", "margin"), top_k=3), RewardConfig(final_reward=0.5)
    stored = settings(features=features, reward=reward, max_new_tokens=12)
    with StoreWriter.open(tmp_path / "store", stored) as writer:
        for i in range(3):
            writer.add(make_trace(i, 4))
    env = gymnasium.make("lede/TraceExit-v0", traces=tmp_path / "store").unwrapped
    assert isinstance(env, TraceExitEnv)
    used = env.lanes.settings
    assert (used.candidates, used.features, used.reward) == (stored.candidates, features, reward)
    np.testing.assert_allclose(env.observation_space.high, [np.log(50), 50], rtol=1e-6)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="top_k 3, not 5"):
        TraceExitEnv(tmp_path / "store", features=FeatureConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episode": "page"}, "one of token, prompt, got 'page'"),
        ({"order": "random"}, "one of shuffled, sequential"),
        ({"candidates": (3, 6)}, r"within 1\.\.5"),
        ({"features": FeatureConfig(("survival",))}, "does not define survival"),
        ({"vocab_size": None}, "give vocab_size, or a store"),
        ({"traces": []}, "give at least one"),
        ({"traces": [make_trace(0, 1, eos=True)]}, "no decided token"),
        ({"traces": TransitionStore(settings("transitions"))}, "collect with the collector 'teacher'"),
        ({"traces": TraceStore(settings())}, "no decided token"),
        ({"render_mode": "human"}, "leave out render_mode"),
    ],
)
def test_unusable_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TraceExitEnv(**{"traces": [make_trace(0, 4)], "vocab_size": 50, **changes})


def test_steps_out_of_turn_are_refused() -> None:
    env = TraceExitEnv([make_trace(0, 4)], vocab_size=50)
    with pytest.raises(ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"0 \(continue\) or 1 \(exit\), got 2"):
        env.step(2)
    env.step(1)
    with pytest.raises(ResetNeeded):
        env.step(0)
