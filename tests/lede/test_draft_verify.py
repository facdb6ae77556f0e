"""Draft & Verify: the stop threshold step by step, both plans, and the plain text on every family."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lede.families import UnsupportedModelError
from lede.generation import GenerateOutput, generate
from lede.head_reading import Reading
from lede.models import EarlyExitModel, load_model
from lede.observer import Observer
from lede.policies.base import ExitAt, LayerState, PreScanState, RoundReport, SkipSublayers
from lede.policies.draft_verify import DraftVerifyPolicy
from tests.exactness import is_exact
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, plain_generate, prompt, tiny_hf_model, tiny_model

torch.set_num_threads(1)

BEFORE = PreScanState(trace=0.0, recent_acceptance=None, rounds_since_draft=0, remaining=20, n_tokens=5)
TINY: dict[str, Any] = {"threshold": 0.0103, "step": 1e-3}  # tiny models are close to uniform over 128 tokens


def state(probability: float, layer: int = 3, n_drafted: int = 1) -> LayerState:
    return LayerState(layer, n_drafted, np.array([-math.log(probability)], dtype=np.float32))


def a_round(drafted: int, accepted: int, capped: bool = False) -> RoundReport:
    plan = ExitAt(3) if drafted else None
    return RoundReport(plan, drafted, accepted, capped, shadow=None)


def test_threshold_moves_as_worked_out_by_hand() -> None:
    policy = DraftVerifyPolicy(exit_layer=3, acceptance_weight=0.5, threshold_weight=0.9, step=0.01, target=0.7)
    # acceptance 0.5 0 + 0.5 1 = 0.5 < 0.7: up, by (1 - 0.9) 0.01
    policy.verified(a_round(4, 4))
    assert (policy.acceptance, policy.threshold) == pytest.approx((0.5, 0.601))
    # 0.5 0.5 + 0.5 1 = 0.75: down
    policy.verified(a_round(4, 4))
    assert (policy.acceptance, policy.threshold) == pytest.approx((0.75, 0.6))
    # 0.5 0.75 + 0.5 0.25 = 0.5: up
    policy.verified(a_round(4, 1))
    assert (policy.acceptance, policy.threshold) == pytest.approx((0.5, 0.601))


def test_settings_as_published() -> None:
    config = DraftVerifyPolicy().config
    published = (config.threshold, config.target, config.acceptance_weight, config.threshold_weight, config.step)
    assert published == (0.6, 0.9, 0.5, 0.9, 0.01)


@pytest.mark.parametrize(("capped", "wanted"), [(False, 0.599), (True, 0.6)])
def test_longest_draft_does_not_lower_the_threshold(capped: bool, wanted: float) -> None:
    policy = DraftVerifyPolicy(max_draft=8, acceptance_weight=0.0)
    policy.verified(a_round(3, 3, capped))  # the budget or the end of the text may bound it below max_draft
    assert policy.threshold == pytest.approx(wanted)


def test_longest_draft_raises_the_threshold_all_the_same() -> None:
    policy = DraftVerifyPolicy(max_draft=8, acceptance_weight=0.0)
    policy.verified(a_round(8, 2, capped=True))
    assert policy.threshold == pytest.approx(0.601)


def test_plain_pass_says_nothing() -> None:
    policy = DraftVerifyPolicy()
    policy.verified(a_round(0, 0))
    assert policy.state() == DraftVerifyPolicy().state()


def test_threshold_stays_a_probability() -> None:
    policy = DraftVerifyPolicy(threshold_weight=0.0, acceptance_weight=0.0, step=0.7)
    policy.verified(a_round(4, 0))
    assert policy.threshold == 1.0
    assert not policy.draft(state(0.999))
    for _ in range(2):
        policy.verified(a_round(4, 4))
    assert policy.threshold == 0.0
    assert policy.draft(state(1e-9))


def test_drafts_on_from_the_threshold_up() -> None:
    policy = DraftVerifyPolicy(threshold=0.5, threshold_weight=0.0, acceptance_weight=0.0, step=0.1)
    assert [policy.draft(state(p)) for p in (0.51, 0.49)] == [True, False]
    policy.verified(a_round(4, 0))  # 0.6 now
    assert [policy.draft(state(p)) for p in (0.61, 0.59)] == [True, False]


@pytest.mark.parametrize("target", [0.5, 0.8])
def test_threshold_settles_where_acceptance_is_the_target(target: float) -> None:
    """Where acceptance grows with the threshold, here as the threshold itself, the loop comes to rest at the target."""
    policy = DraftVerifyPolicy(max_draft=200, target=target)
    seen = []
    for _ in range(600):
        policy.verified(a_round(100, round(100 * policy.threshold)))
        seen.append(policy.threshold)
    assert seen[-100:] == pytest.approx([target] * 100, abs=0.015)
    assert seen[0] == pytest.approx(0.601)


def test_plan_is_a_fixed_exit_layer() -> None:
    policy = DraftVerifyPolicy(exit_layer=3)
    assert policy.pre_scan(BEFORE) == ExitAt(3)
    assert [policy.scan(state(0.1, layer)) for layer in (2, 3, 4)] == [False, True, False]
    assert policy.candidates_for(N_LAYERS) == (3,)


def test_plan_takes_a_quarter_of_the_layers_when_none_is_given() -> None:
    policy = DraftVerifyPolicy()
    with pytest.raises(ValueError, match="call check_model"):
        policy.pre_scan(BEFORE)
    policy.check_model(tiny_model("llama"))
    assert policy.pre_scan(BEFORE) == ExitAt(N_LAYERS // 4)
    assert policy.candidates_for(16) == (4,)


def test_plan_can_leave_out_sublayers() -> None:
    policy = DraftVerifyPolicy(attention=(2, 4), mlp=(4,))
    policy.check_model(tiny_model("llama"))
    assert policy.pre_scan(BEFORE) == SkipSublayers(frozenset({2, 4}), frozenset({4}))
    assert not policy.scan(state(0.1, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exit_layer": N_LAYERS}, rf"exit layer {N_LAYERS} is outside 1..{N_LAYERS - 1}"),
        ({"attention": (1, 3)}, r"sublayers of layers \[1, 3\] can't be left out"),
        ({"mlp": (N_LAYERS,)}, rf"allows 2..{N_LAYERS - 1}"),
        ({"candidates": (2, N_LAYERS)}, rf"candidates \[2, {N_LAYERS}\] must be"),
    ],
)
def test_layers_the_model_cannot_do_without_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftVerifyPolicy(**settings).check_model(tiny_model("llama"))


def test_layers_that_cannot_be_run_in_part_are_refused_before_decoding() -> None:
    hf_model = tiny_hf_model("llama")
    hf_model.model.layers[2]._hf_hook = object()  # what accelerate leaves on modules that it moves
    model = load_model((hf_model, None))
    with pytest.raises(UnsupportedModelError, match="with accelerate hooks"):
        DraftVerifyPolicy(attention=(2,)).check_model(model)
    DraftVerifyPolicy(exit_layer=2).check_model(model)


def test_a_blind_first_token_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drafted whatever its probability is, so nobody reads more of it than the token."""
    n_read = 0
    read = Observer.read

    def counting(self: Observer, logits: torch.Tensor) -> Reading:
        nonlocal n_read
        n_read += 1
        return read(self, logits)

    monkeypatch.setattr(Observer, "read", counting)
    policy = DraftVerifyPolicy(exit_layer=4, threshold=1.0, step=0.0)  # no second token is ever likely enough
    out = decoded(tiny_model("llama"), policy, 20)
    asked = [done for done in out.rounds if done.drafted and done is not out.rounds[-1]]
    assert {done.drafted for done in asked} == {1}
    assert len(asked) <= n_read <= len(asked) + 1  # one position a round: the one that stops the draft


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exit_layer": 0}, "exit_layer must be at least 1, got 0"),
        ({"exit_layer": 2, "mlp": (3,)}, "give one or the other"),
        ({"threshold": 1.5}, r"threshold must be within 0..1, got 1.5"),
        ({"target": -0.1}, r"target must be within 0..1, got -0.1"),
        ({"acceptance_weight": math.nan}, "acceptance_weight must be within 0..1, got nan"),
        ({"threshold_weight": 2.0}, "threshold_weight must be within 0..1, got 2.0"),
        ({"step": -0.01}, r"step must be within 0..1, got -0.01"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftVerifyPolicy(**settings)


def test_state_goes_on_elsewhere_and_reset_forgets_it() -> None:
    policy = DraftVerifyPolicy()
    for accepted in (4, 0, 3):
        policy.verified(a_round(4, accepted))
    other = DraftVerifyPolicy()
    other.restore(json.loads(json.dumps(policy.state())))
    for each in (policy, other):
        each.verified(a_round(5, 5))
    assert other.state() == policy.state() != DraftVerifyPolicy().state()
    policy.reset()
    assert policy.state() == {"threshold": 0.6, "acceptance": 0.0}
    assert policy.draft(state(0.6001))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"threshold": 0.5}, r"is threshold and acceptance, got \['threshold'\]"),
        ({"threshold": 1.5, "acceptance": 0.5}, "threshold in the state .* within 0..1, got 1.5"),
        ({"threshold": 0.5, "acceptance": "high"}, "acceptance in the state .* got 'high'"),
    ],
)
def test_foreign_states_are_refused(state: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftVerifyPolicy().restore(state)


def test_saved_policy_comes_back(tmp_path: Path) -> None:
    policy = DraftVerifyPolicy(attention=(2,), mlp=(2, 5), threshold=0.3)
    policy.save_pretrained(str(tmp_path))
    loaded = DraftVerifyPolicy.from_pretrained(str(tmp_path))
    assert loaded.config == policy.config
    assert loaded.pre_scan(BEFORE) == policy.pre_scan(BEFORE)
    assert loaded.threshold == 0.3


def decoded(model: EarlyExitModel, policy: DraftVerifyPolicy, budget: int, **settings: Any) -> GenerateOutput:
    return generate(model, input_ids=prompt(1, 17), policy=policy, max_new_tokens=budget, **settings)


@pytest.mark.parametrize("plan", [{"exit_layer": 4}, {"attention": (3, 4), "mlp": (2, 4)}], ids=["exit", "gaps"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_gives_the_plain_text_and_learns(family: str, plan: dict[str, Any]) -> None:
    ties = 0
    for dtype in (torch.float64, torch.float32):
        model = tiny_model(family, dtype)
        wanted = plain_generate(model, prompt(1, 17), 48)
        for budget in (1, 2, 48):
            policy = DraftVerifyPolicy(**plan, **TINY, max_draft=6)
            out = decoded(model, policy, budget)
            ties += not is_exact(model, prompt(1, 17), out.sequences[0, 17:].tolist(), wanted[:budget])
        again = DraftVerifyPolicy(**plan, **TINY, max_draft=6)
        left = 47
        for done in out.rounds:
            capped = done.drafted > 0 and done.drafted == min(6, left - 1)
            again.verified(a_round(done.drafted, done.accepted, capped))
            left -= len(done.tokens)
        assert again.state() == policy.state() != DraftVerifyPolicy(**TINY).state()
        assert 0 < out.stats.accepted < out.stats.drafted
        assert len({done.drafted for done in out.rounds}) > 1
    assert ties <= 1


def test_sampled_text_is_the_same_whoever_was_decoded_before() -> None:
    """A new object and a reset one draw the same text; the law itself is the engine's."""
    model, policy = tiny_model("llama"), DraftVerifyPolicy(exit_layer=4, **TINY)
    first = decoded(model, policy, 30, temperature=0.8, seed=3)
    policy.reset()
    second = decoded(model, policy, 30, temperature=0.8, seed=3)
    assert torch.equal(first.sequences, second.sequences)
    assert [r.drafted for r in first.rounds] == [r.drafted for r in second.rounds]
