from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from lede.buffers import PromptRollout
from lede.collectors import Explorer, collect_rollout, collect_teacher
from lede.collectors.exploration import parse_epsilon, policy_digest
from lede.envs import Rules
from lede.policies import (
    DraftVerifyPolicy,
    LearnedPolicy,
    LookupPolicy,
    Policy,
    RandomPolicy,
    StaticPolicy,
    ThresholdPolicy,
)
from tests.tiny_models import prompt, tiny_model

MODEL = tiny_model("llama")
RULES = Rules((1, 2, 4), 20)
PROMPTS = [(i, prompt(i, 5)) for i in range(20)]


def collect(policy: Policy | None, epsilon: tuple[float, float] = (0, 0), **settings: Any) -> list[PromptRollout]:
    explorer = Explorer(MODEL, RULES, 0, policy, epsilon, len(PROMPTS))
    found = collect_rollout(MODEL, PROMPTS, RULES, explorer, **{"batch_size": 10, **settings})
    return sorted(found, key=lambda record: record.prompt_index)


def plans(rollouts: list[PromptRollout]) -> list[int]:
    """Exit layer, or 0, of every token."""
    return [int(layer) for r in rollouts for layer in r.exit_layer[r.token_end]]


def test_uniform_gives_every_exit_layer_and_none_the_same_share() -> None:
    counts = Counter(plans(collect(None)))
    assert set(counts) == {0, 1, 2, 4}
    expected = 20 * 19 / 4
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 16.3  # chi-squared, 3 degrees, 0.1 %


def test_prompts_explore_differently_and_seeds_too() -> None:
    rollouts = collect(None)
    assert plans(rollouts[:1]) != plans(rollouts[1:2])
    other = Explorer(MODEL, RULES, 1)
    assert plans(list(collect_rollout(MODEL, PROMPTS[:1], RULES, other))) != plans(rollouts[:1])


def test_a_policy_is_followed() -> None:
    """It exits at the first candidate that passes; `probability` compares C_1, which the rollout does not record."""
    traces = list(collect_teacher(MODEL, PROMPTS, RULES))
    for measure, threshold in (("entropy", 4.8447), ("probability", float(np.exp(-4.57)))):
        rollouts = collect(ThresholdPolicy(measure=measure, thresholds=threshold))
        assert set(plans(rollouts)) == {0, 1, 2, 4}
        for rollout, trace in zip(rollouts, traces, strict=True):
            at = rollout.token_index - 1, rollout.layer - 1
            sure = trace.entropy[at] < threshold if measure == "entropy" else np.exp(trace.top1[at]) > threshold
            np.testing.assert_array_equal(rollout.actions, sure)


def test_blind_plans_are_followed() -> None:
    assert set(plans(collect(StaticPolicy(exit_layer=2)))) == {2}


def test_epsilon_is_annealed_over_the_prompts() -> None:
    explorer = Explorer(MODEL, RULES, 0, StaticPolicy(exit_layer=2), (1.0, 0.0), 20)
    assert [explorer.epsilon_at(i) for i in (0, 19, 25)] == [1.0, 0.0, 0.0]
    assert explorer.epsilon_at(9) == pytest.approx(10 / 19)
    rollouts = collect(StaticPolicy(exit_layer=2), (1.0, 0.0))
    strayed = [np.mean([layer != 2 for layer in plans([r])]) for r in rollouts]
    assert np.mean(strayed[:5]) > 0.5
    assert strayed[-1] == 0
    halves = plans(collect(StaticPolicy(exit_layer=2), (0.5, 0.5)))
    assert np.mean([layer != 2 for layer in halves]) == pytest.approx(0.5 * 3 / 4, abs=0.08)


def test_a_policy_with_luck_does_not_depend_on_the_batch() -> None:
    policy = RandomPolicy(seed=4)
    together, alone = collect(policy, (0.2, 0.2)), collect(policy, (0.2, 0.2), batch_size=1)
    assert [plans([r]) for r in together] == [plans([r]) for r in alone]
    assert len({tuple(plans([r])) for r in together}) == 20  # and prompts don't repeat one another
    assert set(plans(together)) == {0, 1, 2, 4}


def test_a_policys_luck_comes_from_its_own_seed_and_the_rollouts() -> None:
    def played(policy_seed: int, seed: int) -> list[list[int]]:
        explorer = Explorer(MODEL, RULES, seed, RandomPolicy(seed=policy_seed))
        found = collect_rollout(MODEL, PROMPTS[:3], RULES, explorer, batch_size=1)
        return [plans([rollout]) for rollout in found]

    assert played(4, 0) == played(4, 0)
    assert played(4, 1) != played(4, 0)
    assert played(5, 0)[:2] != played(4, 0)[1:]  # a neighbouring seed is not the same luck one prompt later


def test_a_policy_is_told_how_it_fared() -> None:
    states = []

    class Watching(ThresholdPolicy):
        def pre_scan(self, state: Any) -> Any:
            states.append(state)
            return super().pre_scan(state)

    policy = Watching(measure="entropy", thresholds=4.8447)
    explorer = Explorer(MODEL, RULES, 0, policy, (0, 0), 1)
    states.clear()  # of the probe
    (rollout,) = collect_rollout(MODEL, PROMPTS[:1], RULES, explorer)
    ends = np.flatnonzero(rollout.token_end)
    matches: list[int] = []
    since = 0
    for state, end in zip(states, ends, strict=True):
        token_index = rollout.token_index[end]
        recent = matches[-8:]
        assert state.recent_acceptance == (pytest.approx(np.mean(recent)) if recent else None)
        assert (state.rounds_since_draft, state.remaining) == (since, 20 - token_index)
        assert state.n_tokens == 5 + token_index
        if rollout.actions[end] == 1:
            matches.append(rollout.match[end])
            since = 0
        else:
            since += 1
    assert 0 < len(matches) < len(states)


def test_policies_that_cannot_act_here_are_refused_at_once() -> None:
    def refused(policy: Policy, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Explorer(MODEL, RULES, 0, policy)

    refused(StaticPolicy(exit_layer=3), r"drafts at layer 3, which is none of the candidates \[1, 2, 4\]")
    gaps = RandomPolicy(skip_probability=0.0, blind_probability=0.0, gap_probability=1.0)
    refused(gaps, "drafts with gaps, which is no exit that a rollout could record")
    refused(LookupPolicy(), "drafts from the text, which is no exit that a rollout could record")
    refused(DraftVerifyPolicy(exit_layer=2), "the draft-verify policy learns from rounds that were verified")
    refused(ThresholdPolicy(candidates=(2, 5)), r"inspects layers \[5\]")
    refused(ThresholdPolicy(thresholds=(0.5, 0.6)), "2 thresholds for 3 candidates")
    refused(ThresholdPolicy(candidates=(2, 9)), r"within 1\.\.5")
    with pytest.raises(ValueError, match=r"epsilon must be two probabilities, got 0\.5:2"):
        Explorer(MODEL, RULES, 0, None, (0.5, 2))


def test_a_policy_of_fewer_candidates_is_asked_at_those_only() -> None:
    layers = {
        layer for layer in plans(collect(ThresholdPolicy(measure="entropy", thresholds=9, candidates=(2,)))) if layer
    }
    assert layers == {2}


def test_the_callers_policy_stays_as_it_is() -> None:
    policy = RandomPolicy(seed=4)
    state = policy._stream.bit_generator.state
    collect(policy)
    assert policy.config.candidates is None
    assert policy._stream.bit_generator.state == state


def test_epsilon_from_text() -> None:
    assert parse_epsilon("1.0:0.1") == (1.0, 0.1)
    assert parse_epsilon("0.3") == (0.3, 0.3)
    for text in ("a", "1:", "0.1:0.2:0.3"):
        with pytest.raises(ValueError, match=r"must look like 1\.0:0\.1"):
            parse_epsilon(text)
    with pytest.raises(ValueError, match=r"within 0\.\.1"):
        parse_epsilon("2:0")


def test_the_digest_tells_weights_apart() -> None:
    def learned(scale: float) -> LearnedPolicy:
        layers = [(np.full((2, 4), scale, dtype=np.float32), np.zeros(2, dtype=np.float32))]
        return LearnedPolicy.from_network(layers, candidates=(1, 2))

    assert policy_digest(learned(1.0)) == policy_digest(learned(1.0)) != policy_digest(learned(2.0))
