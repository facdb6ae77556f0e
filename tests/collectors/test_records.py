"""Rollouts and traces tell one story, and batching doesn't change it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lede.buffers import PromptRollout, PromptTrace, StoreSettings, replay
from lede.collectors import Explorer, collect_rollout, collect_teacher, head_table
from lede.envs import LayerExitEnv, Rules
from lede.features import TEXT_FEATURES, FeatureConfig
from lede.policies import LearnedPolicy
from lede.rewards import RewardConfig
from lede.verification import Warp
from tests.ending_models import ending_model, layer_logits, model_that_ends
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, VOCAB_SIZE, plain_generate, prompt, tiny_model

PROMPTS = [prompt(i, 4 + 3 * (i % 3)) for i in range(6)]
RULES = Rules((1, 2, 4), 12, reward=RewardConfig(final_reward=0.25))
SAMPLED = Rules((1, 2, 4), 12, warp=Warp(0.8, top_k=40))


def rollouts(model: Any, rules: Rules = RULES, batch_size: int = 4, order: Any = range(6)) -> list[PromptRollout]:
    explorer = Explorer(model, rules, seed=3)
    found = collect_rollout(model, [(i, PROMPTS[i]) for i in order], rules, explorer, 3, batch_size)
    return sorted(found, key=lambda record: record.prompt_index)


def traces(model: Any, rules: Rules = RULES, batch_size: int = 4, order: Any = range(6)) -> list[PromptTrace]:
    found = collect_teacher(model, [(i, PROMPTS[i]) for i in order], rules, 3, batch_size)
    return sorted(found, key=lambda record: record.prompt_index)


def exit_layers(rollout: PromptRollout) -> np.ndarray[Any, Any]:
    layers = np.zeros(len(rollout.token_ids) - 1, dtype=int)
    layers[rollout.token_index - 1] = rollout.exit_layer  # the last decision of a token comes last
    return layers


def assert_equal(a: PromptTrace | PromptRollout, b: PromptTrace | PromptRollout) -> None:
    """Whole numbers and rewards identical, float features within 1e-4."""
    for name, value in vars(a).items():
        other = getattr(b, name)
        if name == "rewards" or np.asarray(value).dtype.kind != "f":
            np.testing.assert_array_equal(value, other, err_msg=name)
        else:
            np.testing.assert_allclose(value, other, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("rules", [RULES, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_rollout_replayed_on_the_teachers_traces_is_the_same(family: str, rules: Rules) -> None:
    model = tiny_model(family)
    settings = StoreSettings(
        kind="transitions",
        model=family,
        n_layers=N_LAYERS,
        vocab_size=VOCAB_SIZE,
        candidates=rules.candidates,
        reward=rules.reward,
        seed=3,
    )
    for rollout, trace in zip(rollouts(model, rules), traces(model, rules), strict=True):
        assert_equal(rollout, replay(trace, exit_layers(rollout), settings))


@pytest.mark.parametrize("rules", [RULES, SAMPLED], ids=["greedy", "sampled"])
def test_every_feature_of_the_text_is_the_same_live_and_replayed(rules: Rules) -> None:
    model, features = tiny_model("gpt2"), FeatureConfig(TEXT_FEATURES, top_k=3)
    settings = StoreSettings(
        kind="transitions", model="", n_layers=N_LAYERS, vocab_size=VOCAB_SIZE, candidates=(1, 2, 4), features=features
    )
    named = replace(rules, features=features)
    likeliest = [TEXT_FEATURES.index(name) for name in ("surprisal", "margin")]
    agreements = set()
    for rollout, trace in zip(rollouts(model, named), traces(model, named), strict=True):
        replayed = replay(trace, exit_layers(rollout), settings)
        np.testing.assert_allclose(rollout.observations, replayed.observations, atol=1e-4)
        np.testing.assert_allclose(rollout.final_observation, replayed.final_observation, atol=1e-4)
        assert (rollout.observations[:, likeliest] > 0).all()
        assert (rollout.final_observation[likeliest] > 0).all()
        agreement = rollout.observations[:, TEXT_FEATURES.index("agreement")]
        assert not agreement[rollout.layer == 1].any()
        agreements |= set(agreement[rollout.layer > 1].tolist())
    assert agreements == {-1.0, 1.0}


def test_features_of_rounds_are_refused_where_tokens_are_decided_one_by_one() -> None:
    features = FeatureConfig(("entropy", "acceptance", "in_scan"))
    with pytest.raises(ValueError, match="the live exit process decides token by token and does not define acceptance"):
        replace(RULES, features=features)
    policy = LearnedPolicy.from_network([(np.ones((2, 3)), np.ones(2))], features=features, candidates=(1, 2, 4))
    with pytest.raises(ValueError, match="a rollout decides token by token and does not define acceptance, in_scan"):
        Explorer(tiny_model("gpt2"), RULES, seed=3, policy=policy)
    features = FeatureConfig(("agreement",))
    policy = LearnedPolicy.from_network([(np.ones((2, 1)), np.ones(2))], features=features, candidates=(1, 4))
    with pytest.raises(ValueError, match=r"among its candidates \[1, 4\]; those of the rollout are \[1, 2, 4\]"):
        Explorer(tiny_model("gpt2"), RULES, seed=3, policy=policy)


def test_a_rollout_replayed_after_eos() -> None:
    model, n_tokens = model_that_ends(PROMPTS[0], 5)
    settings = StoreSettings(
        kind="transitions",
        model="",
        n_layers=N_LAYERS,
        vocab_size=VOCAB_SIZE,
        candidates=(1, 2, 4),
        reward=RULES.reward,
    )
    recorded, full = rollouts(model), traces(model)
    assert recorded[0].ended_by_eos
    assert len(recorded[0].token_ids) == n_tokens
    np.testing.assert_array_equal(recorded[0].final_observation, recorded[0].observations[-1])
    for name in ("confidence", "entropy", "top1", "top2", "token"):
        assert not getattr(full[0], f"closing_{name}").any()
    assert {r.ended_by_eos for r in recorded} == {True, False}
    for rollout, trace in zip(recorded, full, strict=True):
        assert_equal(rollout, replay(trace, exit_layers(rollout), settings))


def test_a_text_that_ends_at_once_has_no_decisions() -> None:
    model = ending_model(plain_generate(tiny_model("llama"), PROMPTS[0], 1)[0])
    recorded, full = rollouts(model)[0], traces(model)[0]
    assert recorded.n_rows == full.n_rows == 0
    assert recorded.ended_by_eos
    assert full.ended_by_eos
    assert recorded.token_ids.tolist() == full.token_ids.tolist() == [model.eos_token_ids[0]]
    assert recorded.observations.shape == (0, 4)


@pytest.mark.parametrize("rules", [RULES, SAMPLED], ids=["greedy", "sampled"])
def test_content_depends_on_neither_batch_nor_order(rules: Rules) -> None:
    model = tiny_model("mistral")
    collectors: tuple[Any, ...] = (rollouts, traces)
    for collect in collectors:
        alone = collect(model, rules, 1)
        for others in (collect(model, rules, 4), collect(model, rules, 3, range(5, -1, -1))):
            for a, b in zip(alone, others, strict=True):
                assert_equal(a, b)


def test_rollouts_are_what_the_environment_gives() -> None:
    model = tiny_model("qwen3")
    env = LayerExitEnv(model, PROMPTS, (1, 2, 4), 12, "prompt", reward=RULES.reward, order="sequential")
    for rollout in rollouts(model):
        observation, _ = env.reset()
        for i, action in enumerate(rollout.actions):
            np.testing.assert_allclose(rollout.observations[i], observation, atol=1e-6)
            observation, reward, terminated, truncated, info = env.step(int(action))
            assert (rollout.rewards[i], rollout.match[i]) == (reward, info["match"])
            assert rollout.token_end[i] == (info["target_token"] >= 0)
        assert (terminated, truncated) == (False, True)
        np.testing.assert_allclose(rollout.final_observation, observation, atol=1e-6)


def test_traces_hold_every_layers_primitives() -> None:
    """Against transformers' hidden states, for every decided token and layer, and the closing position."""
    model = tiny_model("llama")
    for trace, ids in zip(traces(model), PROMPTS, strict=True):
        new = plain_generate(model, ids, 12)
        assert trace.token_ids.tolist() == new
        log_p = torch.log_softmax(layer_logits(model, [*ids, *new]), dim=-1)
        top = log_p.topk(5, dim=-1).values.transpose(0, 1).numpy()  # (position, layer, k)
        entropy = -(log_p.exp() * log_p).sum(-1).T.numpy()
        token = log_p.argmax(-1).T.numpy()
        decided = slice(len(ids), len(ids) + 11)
        np.testing.assert_allclose(trace.anchor, -top[len(ids) - 1, -1, 0], rtol=1e-5)
        np.testing.assert_allclose(trace.confidence, -top[decided].mean(-1), rtol=1e-5)
        np.testing.assert_allclose(trace.entropy, entropy[decided], rtol=1e-5)
        np.testing.assert_allclose(trace.top1, top[decided, :, 0], rtol=1e-5)
        np.testing.assert_allclose(trace.top2, top[decided, :, 1], rtol=1e-5)
        np.testing.assert_array_equal(trace.token, token[decided])
        np.testing.assert_array_equal(trace.match, token[decided] == np.array(new[1:])[:, None])
        np.testing.assert_allclose(trace.closing_confidence, -top[-1].mean(-1), rtol=1e-5)
        np.testing.assert_allclose(trace.closing_entropy, entropy[-1], rtol=1e-5)
        np.testing.assert_allclose(trace.closing_top1, top[-1, :, 0], rtol=1e-5)
        np.testing.assert_allclose(trace.closing_top2, top[-1, :, 1], rtol=1e-5)
        np.testing.assert_array_equal(trace.closing_token, token[-1])


def test_match_of_sampled_traces_is_the_acceptance_probability() -> None:
    model = tiny_model("llama")
    for trace, ids in zip(traces(model, SAMPLED), PROMPTS, strict=True):
        p = SAMPLED.warp.probabilities(layer_logits(model, [*ids, *trace.token_ids]))[:, len(ids) : len(ids) + 11]
        beta = torch.minimum(p, p[-1:]).sum(-1).T.numpy()
        np.testing.assert_allclose(trace.match, beta, atol=1e-5)
        assert trace.match.max() <= 1


def test_head_reads_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt2")
    whole = traces(model)
    monkeypatch.setitem(head_table.LOGITS_AT_ONCE, "cpu", 3 * N_LAYERS * VOCAB_SIZE)
    monkeypatch.setattr("lede.collectors.head_table.ROWS_AT_ONCE", 1)
    for a, b in zip(whole, traces(model), strict=True):
        assert_equal(a, b)


def test_rows_share_their_forward_passes() -> None:
    model = ending_model(VOCAB_SIZE)
    ran: list[int] = []
    for i, layer in enumerate(model.hf_model.model.layers, start=1):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    rollouts(model, batch_size=6)
    counts = [ran.count(i) for i in range(1, 7)]
    # prefill and 11 decided tokens; the closing position's first candidate; twice at most among the candidates
    assert counts[0] == 13
    assert counts[4:] == [12, 12]
    assert all(12 < n <= 23 for n in counts[1:4])


def test_every_new_token_is_counted() -> None:
    model, _ = model_that_ends(PROMPTS[0], 5)
    numbered = list(enumerate(PROMPTS))
    for batch_size in (1, 4):
        counted: list[int] = []
        records: list[Any] = list(
            collect_rollout(model, numbered, RULES, Explorer(model, RULES, 0), 0, batch_size, counted.append)
        )
        assert sum(counted) == sum(len(record.token_ids) for record in records)
        counted.clear()
        records = list(collect_teacher(model, numbered, RULES, 0, batch_size, counted.append))
        assert sum(counted) == sum(len(record.token_ids) for record in records)
