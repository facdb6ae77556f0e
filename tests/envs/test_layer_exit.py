from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

import lede.envs
from lede.envs import LayerExitEnv
from lede.rewards import RewardConfig
from lede.seeding import Purpose, numpy_stream
from lede.verification import Warp
from tests.ending_models import ending_model, layer_logits, model_that_ends
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, VOCAB_SIZE, plain_generate, prompt, tiny_model

PROMPTS = [prompt(i, 5 + i) for i in range(4)]
CANDIDATES = (1, 2, 4)


def make(**settings: Any) -> LayerExitEnv:
    defaults = {"model": tiny_model("llama"), "prompts": PROMPTS, "candidates": CANDIDATES, "max_new_tokens": 8}
    env = gymnasium.make("lede/LayerExit-v0", **{**defaults, **settings}).unwrapped
    assert isinstance(env, LayerExitEnv)
    return env


def play_prompt(env: LayerExitEnv, policy: Any) -> list[dict[str, Any]]:
    """All steps of the prompt that the env is at the start of, in prompt episodes."""
    steps = []
    observation, info = env.reset()
    while True:
        action = policy(info)
        following, reward, terminated, truncated, after = env.step(action)
        steps.append({"observation": observation, "action": action, "reward": reward, "before": info, "after": after})
        steps[-1].update(terminated=terminated, truncated=truncated, following=following)
        observation, info = following, after
        if terminated or truncated:
            return steps


@pytest.mark.parametrize("episode", ["token", "prompt"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_checker_has_nothing_to_say(family: str, episode: str) -> None:
    check_env(make(model=tiny_model(family), episode=episode))  # warnings are errors


def test_the_checker_has_nothing_to_say_about_sampling() -> None:
    check_env(make(temperature=1.0, top_k=20, top_p=0.9))


def test_registered_under_its_module() -> None:
    env = gymnasium.make("lede.envs:lede/LayerExit-v0", model=tiny_model("llama"), prompts=PROMPTS)
    assert env.action_space == gymnasium.spaces.Discrete(2)
    env.reset(seed=0)
    assert env.step(env.action_space.sample())[0] in env.observation_space  # through gymnasium's own checks
    gymnasium.register_envs(lede.envs)


def test_bundled_model_by_default() -> None:
    env = LayerExitEnv(max_new_tokens=3)
    observation, info = env.reset(seed=0)
    assert observation in env.observation_space
    assert info["layer"] == env.episodes.rules.candidates[0]
    assert env.step(1)[4]["match"] in (0, 1)


def test_observations_follow_the_formulas() -> None:
    """Against transformers' hidden states: C_5, H, depth, and the mean surprisal where positions were left."""
    rng = np.random.default_rng(0)
    env = make(
        episode="prompt", max_new_tokens=14, order="sequential", features=lede.envs.Rules(CANDIDATES, 2).features
    )
    steps = play_prompt(env, lambda info: int(rng.random() < 0.4))
    text = [*PROMPTS[0], *plain_generate(env.episodes.model, PROMPTS[0], 14)]
    log_p = torch.log_softmax(layer_logits(env.episodes.model, text), dim=-1).numpy()
    surprisal = -log_p.max(-1)  # (layer, position)
    anchor = surprisal[-1, len(PROMPTS[0]) - 1]
    left: list[float] = []
    seen_layers = set()
    for step in steps:
        layer, token_index = step["before"]["layer"], step["before"]["token_index"]
        position = len(PROMPTS[0]) + token_index - 1
        at = log_p[layer - 1, position]
        trace = np.mean(left[-8:]) if left else anchor
        expected = [-np.sort(at)[-5:].mean(), -(np.exp(at) * at).sum(), trace, layer / N_LAYERS]
        np.testing.assert_allclose(step["observation"], expected, rtol=1e-5)
        if step["action"] == 1 or layer == CANDIDATES[-1]:
            left.append(surprisal[(layer if step["action"] == 1 else N_LAYERS) - 1, position])
        seen_layers.add((layer, step["action"]))
    assert seen_layers == {(layer, action) for layer in CANDIDATES for action in (0, 1)}
    closing = log_p[CANDIDATES[0] - 1, len(text) - 1]
    expected = [-np.sort(closing)[-5:].mean(), -(np.exp(closing) * closing).sum(), np.mean(left[-8:]), 1 / N_LAYERS]
    np.testing.assert_allclose(steps[-1]["following"], expected, rtol=1e-5)


def test_bounds_are_the_documented_ones() -> None:
    space = make().observation_space
    assert isinstance(space, gymnasium.spaces.Box)
    np.testing.assert_array_equal(space.low, [0, 0, 0, 0])
    np.testing.assert_allclose(space.high, [50, np.log(VOCAB_SIZE), 50, 1], rtol=1e-6)


def test_the_text_is_the_targets_whatever_is_done() -> None:
    rng = np.random.default_rng(1)
    env = make(episode="prompt", order="sequential", max_new_tokens=20)
    for ids in PROMPTS:
        steps = play_prompt(env, lambda info: int(rng.integers(2)))
        told = [s["after"]["target_token"] for s in steps if s["after"]["target_token"] >= 0]
        assert told == plain_generate(env.episodes.model, ids, 20)[1:]


def test_rewards() -> None:
    env = make(episode="prompt", max_new_tokens=40, reward=RewardConfig(final_reward=0.5))
    rng = np.random.default_rng(2)
    seen = set()
    for step in [s for _ in range(3) for s in play_prompt(env, lambda info: int(rng.integers(2)))]:
        layer, match = step["before"]["layer"], step["after"]["match"]
        if step["action"] == 1:
            expected = (1 if match else -2) + (N_LAYERS - layer) / N_LAYERS
            assert step["after"]["exit_layer"] == layer
        else:
            expected = -0.01 + (0.5 if layer == CANDIDATES[-1] else 0)
            assert (match, step["after"]["exit_layer"]) == (-1, 0)
        assert step["reward"] == pytest.approx(expected, abs=1e-6)
        seen.add((layer, step["action"], match))
    assert len(seen) == 3 * len(CANDIDATES)  # continue, and an exit of either luck, at every candidate


def test_match_is_agreement_with_the_target() -> None:
    env = make(episode="prompt", order="sequential", max_new_tokens=30, candidates=(2,))
    steps = play_prompt(env, lambda info: 1)
    text = [*PROMPTS[0], *plain_generate(env.episodes.model, PROMPTS[0], 30)]
    drafted = layer_logits(env.episodes.model, text)[1].argmax(-1)
    expected = [int(drafted[p] == text[p + 1]) for p in range(len(PROMPTS[0]), len(text) - 1)]
    assert [s["after"]["match"] for s in steps] == expected
    assert 0 < sum(expected) < len(expected)


def test_a_step_runs_no_layer_more_than_it_needs() -> None:
    model = ending_model(VOCAB_SIZE)
    ran: list[int] = []
    for i, layer in enumerate(model.hf_model.model.layers, start=1):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    env = LayerExitEnv(model, PROMPTS, CANDIDATES, max_new_tokens=8)
    env.reset(seed=0)
    assert ran == [1, 2, 3, 4, 5, 6, 1]  # prefill, then up to the first candidate
    for call, layers in ((env.step, [2]), (env.step, [3, 4]), (env.step, [5, 6])):
        ran.clear()
        assert call(0)[2] == (layers == [5, 6])
        assert ran == layers
    ran.clear()
    env.reset()
    assert ran == [1]
    ran.clear()
    env.step(1)
    assert ran == [2, 3, 4, 5, 6]


def test_token_episodes_end_at_the_exit_or_the_last_continue() -> None:
    env = make(order="sequential", max_new_tokens=3)
    visited = []
    for number in range(2 * len(PROMPTS)):
        _, info = env.reset(seed=0) if number == 0 else env.reset()
        visited.append((info["prompt_index"], info["token_index"]))
        steps = [env.step(0)[2:4] for _ in CANDIDATES] if number % 2 else [env.step(1)[2:4]]
        assert steps == [*[(False, False)] * (len(steps) - 1), (True, False)]
    assert visited == [(p, t) for p in range(4) for t in (1, 2)]


def test_prompt_episodes_end_truncated_at_the_budget() -> None:
    env = make(episode="prompt", max_new_tokens=5)
    steps = play_prompt(env, lambda info: 1)
    assert len(steps) == 4
    assert [s["truncated"] for s in steps] == [False, False, False, True]
    assert not any(s["terminated"] for s in steps)
    assert steps[-1]["after"]["token_index"] == 5  # the first candidate of the next position


def test_prompt_episodes_end_terminated_at_eos() -> None:
    model, n_tokens = model_that_ends(PROMPTS[0], 4)
    env = make(model=model, prompts=PROMPTS[:1], episode="prompt", max_new_tokens=n_tokens)
    steps = play_prompt(env, lambda info: 1)
    assert len(steps) == n_tokens - 1
    assert (steps[-1]["terminated"], steps[-1]["truncated"]) == (True, False)
    np.testing.assert_array_equal(steps[-1]["following"], steps[-1]["observation"])


def test_a_prompt_that_ends_at_once_is_passed_over() -> None:
    first = [plain_generate(tiny_model("llama"), ids, 1)[0] for ids in PROMPTS]
    env = make(model=ending_model(first[1]), order="sequential", episode="prompt")
    visited = [env.reset()[1]["prompt_index"] for _ in range(6)]
    expected = [i for i in range(4) if first[i] != first[1]]
    assert visited == (expected * 6)[:6]
    with pytest.raises(ValueError, match="ends every prompt at once"):
        make(model=ending_model(first[1]), prompts=[PROMPTS[1]]).reset()


def test_reset_within_a_token_leaves_it_without_an_exit() -> None:
    env = make(order="sequential", max_new_tokens=4)
    env.reset(seed=0)
    env.step(0)
    assert [env.reset()[1]["token_index"] for _ in range(2)] == [2, 3]
    after = env.step(1)[4]
    assert after["target_token"] == plain_generate(env.episodes.model, PROMPTS[0], 4)[3]


def test_a_seed_starts_over_and_every_pass_has_its_own_order() -> None:
    env = make(episode="prompt")
    runs = [[env.reset(seed=7)[1]["prompt_index"], *(env.reset()[1]["prompt_index"] for _ in range(11))] for _ in "ab"]
    assert runs[0] == runs[1]
    passes = [runs[0][i : i + 4] for i in (0, 4, 8)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in passes)
    assert len({tuple(order) for order in passes}) > 1


def test_sampled_matches_have_the_acceptance_probability() -> None:
    """The documented stream and beta = sum_v min(p, q), recomputed from transformers' logits."""
    env = make(temperature=0.7, episode="prompt", order="sequential", max_new_tokens=30)
    env.reset(seed=3)
    rng = np.random.default_rng(0)
    steps, info, over = [], env.episodes.info(0), False
    while not over:
        action = int(rng.integers(2))
        _, _, terminated, truncated, after = env.step(action)
        steps.append((action, info, after))
        info, over = after, terminated or truncated
    row = env.episodes._started().row(0)
    p = Warp(0.7).probabilities(layer_logits(env.episodes.model, [*PROMPTS[0], *row.token_ids]))
    matches = []
    for _, before, after in [s for s in steps if s[0] == 1]:
        position = len(PROMPTS[0]) + before["token_index"] - 1
        beta = float(torch.minimum(p[-1, position], p[before["layer"] - 1, position]).sum())
        luck = numpy_stream(3, Purpose.MATCHES, 0, before["token_index"]).random()
        assert after["match"] == int(luck < beta)
        matches.append(after["match"])
    assert set(matches) == {0, 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 1}, "at least 2, got 1"),
        ({"max_new_tokens": 300}, "prompt 1 has 5 tokens, which with 300 new ones exceeds the model's 256 positions"),
        ({"episode": "page"}, "one of token, prompt, got 'page'"),
        ({"order": "random"}, "one of shuffled, sequential"),
        ({"candidates": (3, 6)}, r"within 1\.\.5"),
        ({"prompts": ["text"]}, "no tokenizer"),
        ({"prompts": []}, "at least one"),
        ({"top_k": 5}, "temperature above 0"),
        ({"render_mode": "human"}, "leave out render_mode"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    defaults = {"model": tiny_model("llama"), "prompts": PROMPTS, "candidates": CANDIDATES, "max_new_tokens": 8}
    with pytest.raises(ValueError, match=message):
        LayerExitEnv(**{**defaults, **settings})


def test_steps_out_of_turn_are_refused() -> None:
    env = make()
    with pytest.raises(ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"0 \(continue\) or 1 \(exit\), got 2"):
        env.step(2)
    env.step(1)
    with pytest.raises(ResetNeeded):
        env.step(0)
