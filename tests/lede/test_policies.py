"""Static, threshold and random policies: worked decisions at every stage."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from lede.features import primitives
from lede.generation import generate
from lede.policies import (
    ExitAt,
    LayerState,
    Policy,
    PreScan,
    PreScanState,
    RandomPolicy,
    StaticPolicy,
    ThresholdPolicy,
)
from tests.tiny_models import N_LAYERS, plain_generate, prompt, tiny_model

torch.set_num_threads(1)

BEFORE = PreScanState(trace=1.0, recent_acceptance=None, rounds_since_draft=0, remaining=20, n_tokens=5)


def state(layer: int, *values: float, n_drafted: int = 0) -> LayerState:
    return LayerState(layer, n_drafted, np.array(values, dtype=np.float32))


def test_static_drafts_blind_and_stops_at_its_length() -> None:
    policy = StaticPolicy(exit_layer=3, draft_length=2)
    assert policy.pre_scan(BEFORE) == ExitAt(3)
    assert [policy.draft(state(3, n_drafted=n)) for n in (1, 2, 3)] == [True, False, False]
    assert [policy.scan(state(layer)) for layer in (2, 3, 4)] == [False, True, False]
    assert policy.features is None


def test_static_takes_a_quarter_of_the_layers_when_none_is_given() -> None:
    policy = StaticPolicy()
    with pytest.raises(ValueError, match="call check_model"):
        policy.pre_scan(BEFORE)
    policy.check_model(tiny_model("llama"))
    assert policy.pre_scan(BEFORE) == ExitAt(N_LAYERS // 4)


@pytest.mark.parametrize("layer", [N_LAYERS, N_LAYERS + 3])
def test_static_refuses_layers_the_model_cannot_leave_at(layer: int) -> None:
    with pytest.raises(ValueError, match=rf"exit layer {layer} is outside 1..{N_LAYERS - 1}"):
        StaticPolicy(exit_layer=layer).check_model(tiny_model("llama"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exit_layer": 0}, "exit_layer must be at least 1, got 0"),
        ({"draft_length": 0}, "draft_length must be within 1..max_draft = 12, got 0"),
        ({"draft_length": 13}, "draft_length must be within 1..max_draft = 12, got 13"),
    ],
)
def test_static_refuses_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StaticPolicy(**settings)


def test_static_settings_are_checked_together() -> None:
    assert StaticPolicy(draft_length=20, max_draft=24).draft(state(1, n_drafted=19))


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_threshold_on_probability_is_the_rule_on_top1(threshold: float) -> None:
    policy = ThresholdPolicy(thresholds=threshold)
    logits = torch.randn(200, 16, generator=torch.Generator().manual_seed(0)) * torch.linspace(0, 8, 200)[:, None]
    observations = policy.features.observe({"surprisal": -primitives(logits).top1}, N_LAYERS, 16)
    decisions = [policy.scan(state(2, *row)) for row in observations]
    wanted = (torch.softmax(logits, -1).amax(-1) > threshold).tolist()
    assert decisions == wanted
    assert decisions == [policy.draft(state(2, *row, n_drafted=1)) for row in observations]


def test_threshold_on_entropy_exits_below() -> None:
    policy = ThresholdPolicy(measure="entropy", thresholds=1.5)
    assert policy.features.names == ("entropy",)
    assert [policy.scan(state(2, h)) for h in (1.4, 1.5, 1.6)] == [True, False, False]


def test_threshold_of_each_candidate_and_of_the_draft() -> None:
    policy = ThresholdPolicy(candidates=(1, 3), thresholds=(0.9, 0.5), draft_threshold=0.25)
    sure = -math.log(0.7)
    assert [policy.scan(state(layer, sure)) for layer in (1, 3)] == [False, True]
    unsure = -math.log(0.3)
    assert not policy.scan(state(3, unsure))
    assert policy.draft(state(3, unsure, n_drafted=1))
    with pytest.raises(ValueError, match=r"layer 2 has no threshold; candidates are \[1, 3\]"):
        policy.scan(state(2, sure))


def test_threshold_of_each_candidate_follows_the_model() -> None:
    policy = ThresholdPolicy(thresholds=(0.9, 0.5, 0.1))  # default candidates of 6 layers are 1, 2, 3
    with pytest.raises(ValueError, match="call check_model"):
        policy.scan(state(2, 0.1))
    policy.check_model(tiny_model("gpt2"))
    assert [policy.scan(state(layer, -math.log(0.7))) for layer in (1, 2, 3)] == [False, True, True]
    with pytest.raises(ValueError, match="2 thresholds for 3 candidates"):
        ThresholdPolicy(thresholds=(0.9, 0.5)).check_model(tiny_model("gpt2"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"thresholds": 1.5}, r"probability must be within 0..1, got 1.5"),
        ({"thresholds": (0.5, math.nan)}, r"within 0..1, got nan"),
        ({"thresholds": ()}, "got none"),
        ({"measure": "entropy", "thresholds": -0.1}, r"entropy must be within 0..inf, got -0.1"),
        ({"draft_threshold": 2.0}, "got 2.0"),
        ({"measure": "margin"}, "measure must be one of probability, entropy, got 'margin'"),
    ],
)
def test_threshold_refuses_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThresholdPolicy(**settings)


def decisions_of(policy: RandomPolicy, n: int) -> list[object]:
    return [
        decide for _ in range(n) for decide in (policy.pre_scan(BEFORE), policy.scan(state(1)), policy.draft(state(1)))
    ]


def test_random_restarts_its_stream_and_differs_by_seed() -> None:
    policy = RandomPolicy(seed=3, candidates=(1, 2, 4))
    first = decisions_of(policy, 50)
    assert decisions_of(policy, 50) != first
    policy.reset()
    assert decisions_of(policy, 50) == first
    assert decisions_of(RandomPolicy(seed=4, candidates=(1, 2, 4)), 50) != first


def test_random_reaches_every_stage_as_often_as_it_says() -> None:
    settings: dict[str, Any] = {
        "skip_probability": 0.2,
        "blind_probability": 0.3,
        "exit_probability": 0.6,
        "draft_probability": 0.9,
    }
    policy = RandomPolicy(candidates=(1, 2, 4), **settings)
    n = 6000
    stages = Counter(policy.pre_scan(BEFORE) for _ in range(n))
    # five standard deviations of a fraction are under 0.033 here
    assert stages[PreScan.SKIP] / n == pytest.approx(0.2, abs=0.033)
    assert stages[PreScan.SCAN] / n == pytest.approx(0.5, abs=0.033)
    assert [stages[ExitAt(layer)] / n for layer in (1, 2, 4)] == pytest.approx([0.1] * 3, abs=0.033)
    assert sum(policy.scan(state(1)) for _ in range(n)) / n == pytest.approx(0.6, abs=0.033)
    assert sum(policy.draft(state(1)) for _ in range(n)) / n == pytest.approx(0.9, abs=0.033)


def test_random_draws_blind_layers_from_the_model_it_runs_on() -> None:
    policy = RandomPolicy(skip_probability=0.0, blind_probability=1.0)
    with pytest.raises(ValueError, match="call check_model"):
        policy.pre_scan(BEFORE)
    policy.check_model(tiny_model("llama"))
    assert {policy.pre_scan(BEFORE) for _ in range(100)} == {ExitAt(1), ExitAt(2), ExitAt(3)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exit_probability": 1.1}, "exit_probability must be within 0..1, got 1.1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"skip_probability": 0.7, "blind_probability": 0.7}, "must not add up to more than 1"),
        ({"max_draft": 0}, "max_draft must be at least 1, got 0"),
    ],
)
def test_random_refuses_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RandomPolicy(**settings)


@pytest.mark.parametrize(
    "policy",
    [
        StaticPolicy(exit_layer=2, draft_length=3),
        # the tiny models are close to uniform over 128 tokens: probability 1 / 128, entropy 4.852
        ThresholdPolicy(thresholds=0.0103),
        ThresholdPolicy(measure="entropy", thresholds=(4.8455, 4.8456, 4.846)),
        RandomPolicy(seed=1),
    ],
    ids=["static", "probability", "entropy", "random"],
)
def test_decoding_under_a_policy_drafts_and_gives_the_plain_text(policy: Policy) -> None:
    model, ids = tiny_model("llama"), prompt(0, 9)
    out = generate(model, input_ids=ids, policy=policy, max_new_tokens=40)
    assert out.sequences[0, len(ids) :].tolist() == plain_generate(model, ids, 40)
    assert out.stats.drafted > 0
    if isinstance(policy, StaticPolicy):
        left = 39  # the budget may cut the last rounds short
        for done in out.rounds:
            assert (done.exit_layer, done.drafted) == ((2, min(3, left - 1)) if left > 1 else (None, 0))
            left -= len(done.tokens)
    else:
        assert len({done.drafted for done in out.rounds}) > 1


@pytest.mark.parametrize("policy_class", [ThresholdPolicy, RandomPolicy, StaticPolicy])
def test_candidates_outside_the_model_are_refused(policy_class: type[Policy]) -> None:
    with pytest.raises(ValueError, match=rf"candidates \[2, {N_LAYERS}\] must be ascending layers within 1..5"):
        policy_class(candidates=(2, N_LAYERS)).check_model(tiny_model("llama"))
