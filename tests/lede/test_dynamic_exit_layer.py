"""DEL: tokens per layer, shadow tokens and the dynamic threshold with worked values, and exact on every family."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lede.generation import generate
from lede.models import EarlyExitModel, load_model
from lede.policies.base import ExitAt, LayerState, PreScan, PreScanState, RoundReport, Shadow
from lede.policies.dynamic_exit_layer import DynamicExitLayerPolicy, tokens_per_layer
from lede.policies.shadow_counts import ShadowCounts
from tests.exactness import is_exact
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, plain_generate, prompt, tiny_hf_model, tiny_model

torch.set_num_threads(1)

BEFORE = PreScanState(trace=0.0, recent_acceptance=None, rounds_since_draft=0, remaining=20, n_tokens=5)
LAYERS = (1, 3)
TABLE = Shadow(  # layer 1 is right at the first position, layer 3 at the first three
    layers=LAYERS,
    tokens=np.array([[5, 1, 2, 3], [5, 6, 7, 3]]),
    probabilities=np.array([[0.9, 0.6, 0.3, 0.3], [0.8, 0.7, 0.9, 0.2]], dtype=np.float32),
    targets=np.array([5, 6, 7, 8]),
)


def state(probability: float, n_drafted: int = 1, layer: int = 3) -> LayerState:
    return LayerState(layer, n_drafted, np.array([-math.log(probability)], dtype=np.float32))


def a_round(shadow: Shadow | None) -> RoundReport:
    return RoundReport(ExitAt(3), 4, 3, capped=False, shadow=shadow)


def a_policy(right: tuple[float, ...], wrong: tuple[float, ...], **settings: Any) -> DynamicExitLayerPolicy:
    """On a model of 6 layers, with the given counts at candidates 1 and 3; sure of 0.8 and 0.4."""
    policy = DynamicExitLayerPolicy(**{"candidates": LAYERS, **settings})
    policy.check_model(tiny_model("llama"))
    sure_right, sure_wrong = ([share * n for n in counts] for share, counts in ((0.8, right), (0.4, wrong)))
    columns = {"right": list(right), "wrong": list(wrong), "sure_right": sure_right, "sure_wrong": sure_wrong}
    policy.restore({"layers": list(LAYERS), "prior": 0.0, **columns})
    return policy


def test_tokens_per_layer_as_worked_out_by_hand() -> None:
    found = tokens_per_layer([0.5, 1.0, 0.0], [2, 2, 4], n_layers=8, max_draft=3)
    half = [1 / 8, 1.5 / 10, 1.75 / 12, 1.875 / 14]
    always = [1 / 8, 2 / 10, 3 / 12, 4 / 14]
    never = [1 / 8, 1 / 12, 1 / 16, 1 / 20]
    np.testing.assert_allclose(found, [half, always, never], rtol=1e-15)


def test_tokens_per_layer_is_the_formula_of_the_paper() -> None:
    acceptance = np.linspace(0, 0.99, 34)
    found = tokens_per_layer(acceptance, np.arange(1, 35), n_layers=40, max_draft=18)
    for (place, d), value in np.ndenumerate(found):
        a, layer = acceptance[place], place + 1
        assert value == pytest.approx((1 - a ** (d + 1)) / (1 - a) / (d * layer + 40))


def test_tokens_per_layer_can_charge_head_reads() -> None:
    found = tokens_per_layer([0.5], [2], n_layers=8, max_draft=2, head_cost=3.0)
    np.testing.assert_allclose(found, [[1 / 11, 1.5 / 16, 1.75 / 21]])


def test_shadow_counts_as_worked_out_by_hand() -> None:
    counts = ShadowCounts(LAYERS, decay=0.5, prior=2.0)
    np.testing.assert_allclose(counts.acceptance(), [0.5, 0.5])
    counts.add(TABLE)  # the prior is down to 1 position, half of it right
    np.testing.assert_allclose(counts.acceptance(), [1.5 / 5, 3.5 / 5])
    assert counts.threshold(1) == pytest.approx((0.9 + (0.6 + 0.3 + 0.3) / 3) / 2)
    assert counts.threshold(3) == pytest.approx(((0.8 + 0.7 + 0.9) / 3 + 0.2) / 2)
    one = Shadow(LAYERS, np.array([[4], [9]]), np.array([[0.5], [0.6]], dtype=np.float32), np.array([4]))
    counts.add(one)
    # layer 1: right 0.5 1 + 1, wrong 0.5 3; layer 3: right 0.5 3, wrong 0.5 1 + 1; prior 0.5
    np.testing.assert_allclose(counts.acceptance(), [(1.5 + 0.25) / 3.5, (1.5 + 0.25) / 3.5])
    right, wrong = (0.5 * 0.9 + 0.5) / 1.5, 0.5 * 1.2 / 1.5
    assert counts.threshold(1) == pytest.approx((right + wrong) / 2)
    right, wrong = 0.5 * 2.4 / 1.5, (0.5 * 0.2 + 0.6) / 1.5
    assert counts.threshold(3) == pytest.approx((right + wrong) / 2)


def test_without_a_wrong_token_there_is_no_threshold() -> None:
    counts = ShadowCounts(LAYERS, decay=1.0, prior=0.0)
    np.testing.assert_array_equal(counts.acceptance(), [0.0, 0.0])
    counts.add(Shadow(LAYERS, np.array([[4], [9]]), np.full((2, 1), 0.5, dtype=np.float32), np.array([4])))
    np.testing.assert_array_equal(counts.acceptance(), [1.0, 0.0])
    assert [counts.threshold(layer) for layer in LAYERS] == [0.0, 0.0]


def test_counts_refuse_other_layers() -> None:
    with pytest.raises(ValueError, match=r"of layers \[1, 3\], wanted \[1, 2\]"):
        ShadowCounts((1, 2), 0.95, 1.0).add(TABLE)


def test_policy_drafts_where_and_as_far_as_pays() -> None:
    # acceptance 0.3 and 0.9; 1 layer: best 1.3 / 7 (length 1); 3 layers: 1 + 0.9 + 0.81 + ... over 3 d + 6
    policy = a_policy(right=(3.0, 9.0), wrong=(7.0, 1.0))
    # is 2.71 / 12, 3.439 / 15 and 4.0951 / 18 at lengths 2, 3 and 4
    assert max(1.3 / 7, 2.71 / 12, 4.0951 / 18) < 3.439 / 15
    assert policy.choose() == (3, 3)
    assert policy.pre_scan(BEFORE) == ExitAt(3)
    assert [policy.draft(state(0.99, n)) for n in (1, 2, 3, 4)] == [True, True, False, False]
    assert [policy.scan(state(0.1, layer=layer)) for layer in LAYERS] == [False, True]


def test_policy_passes_plainly_where_nothing_pays() -> None:
    policy = a_policy(right=(0.0, 1.0), wrong=(10.0, 9.0))
    assert policy.choose()[1] == 0
    assert policy.pre_scan(BEFORE) is PreScan.SKIP
    assert not policy.scan(state(0.9))


def test_charging_heads_shortens_drafts() -> None:
    counts: dict[str, Any] = {"right": (8.0, 8.0), "wrong": (2.0, 2.0)}
    assert a_policy(**counts).choose() == (1, 4)  # 3.3616 / 10, before 2.952 / 9 and 3.68928 / 11
    assert a_policy(**counts, head_cost=2.0).choose() == (1, 2)  # 2.44 / 14, before 1.8 / 11 and 2.952 / 17


@pytest.mark.parametrize(
    ("stop", "wanted"),
    [
        # the threshold is halfway between 0.8 and 0.4, the length 3
        ("both", [True, False, False]),
        ("length", [True, True, False]),
        ("confidence", [True, False, True]),
    ],
)
def test_what_ends_a_draft(stop: Any, wanted: list[bool]) -> None:
    policy = a_policy(right=(3.0, 9.0), wrong=(7.0, 1.0), stop=stop)
    assert policy.pre_scan(BEFORE) == ExitAt(3)
    assert policy.counts.threshold(3) == pytest.approx(0.6)
    assert [policy.draft(each) for each in (state(0.61, 2), state(0.59, 2), state(0.61, 3))] == wanted
    assert (policy.features is None) == (stop == "length")


def test_confidence_alone_ends_no_draft_before_it_is_known() -> None:
    policy = a_policy(right=(9.0, 9.0), wrong=(0.0, 0.0), stop="confidence")
    policy.pre_scan(BEFORE)
    assert policy.draft(state(1e-6, 11))
    assert not policy.draft(state(1e-6, 12))


def test_policy_counts_what_rounds_report() -> None:
    policy = DynamicExitLayerPolicy(candidates=LAYERS, decay=0.5, prior=2.0)
    policy.check_model(tiny_model("llama"))
    assert policy.shadow_layers == LAYERS
    policy.verified(a_round(TABLE))
    np.testing.assert_allclose(policy.counts.acceptance(), [1.5 / 5, 3.5 / 5])
    before = policy.state()
    policy.verified(a_round(None))
    assert policy.state() == before


def test_layers_come_from_the_model() -> None:
    policy = DynamicExitLayerPolicy()
    with pytest.raises(ValueError, match="call check_model"):
        _ = policy.shadow_layers
    policy.check_model(tiny_model("llama"))
    assert policy.shadow_layers == (1, 2, 3)
    every = DynamicExitLayerPolicy(every_layer=True).bind(tiny_model("llama"))
    every.check_model(tiny_model("llama"))
    assert every.shadow_layers == every.config.candidates == (1, 2, 3, 4, 5)


def test_state_goes_on_elsewhere_and_reset_forgets_it() -> None:
    policy = a_policy(right=(3.0, 5.0), wrong=(4.0, 2.0))
    kept = json.loads(json.dumps(policy.state()))
    late = DynamicExitLayerPolicy(candidates=LAYERS)
    late.restore(kept)  # before any model
    assert late.state() == kept
    late.check_model(tiny_model("llama"))
    for each in (policy, late):
        each.verified(a_round(TABLE))
    assert late.state() == policy.state() != kept
    assert late.choose() == policy.choose()
    fresh = DynamicExitLayerPolicy(candidates=LAYERS)
    fresh.check_model(tiny_model("llama"))
    policy.reset()
    assert policy.state() == fresh.state()
    late.restore({})
    assert late.state() == fresh.state()


@pytest.mark.parametrize("carry", [True, False])
def test_texts_go_on_from_one_another_if_wanted(carry: bool) -> None:
    policy = a_policy(right=(3.0, 5.0), wrong=(4.0, 2.0), carry=carry)
    before = policy.state()
    policy.begin(7)
    assert (policy.state() == before) == carry


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [1, 2]}, r"state is of layers \[1, 2\], the policy drafts at \[1, 3\]"),
        ({"layers": 2}, "layers in the state .* must be a list, got 2"),
        ({"right": [1.0]}, r"right in the state .* must be 2 numbers from 0 up, got \[1.0\]"),
        ({"wrong": [1.0, -1.0]}, "wrong in the state .* from 0 up"),
        ({"sure_right": 3}, "sure_right in the state .* got 3"),
        ({"sure_wrong": [math.nan, 0.0]}, "sure_wrong in the state .* from 0 up"),
        ({"prior": "much"}, "prior in the state .* at least 0, got 'much'"),
        ({"luck": 1}, "state of shadow tokens has layers, prior, right, wrong, sure_right, sure_wrong"),
    ],
)
def test_foreign_states_are_refused(changes: dict[str, Any], message: str) -> None:
    policy = a_policy(right=(3.0, 5.0), wrong=(4.0, 2.0))
    before = policy.state()
    with pytest.raises(ValueError, match=message):
        policy.restore({**before, **changes})
    assert policy.state() == before


def test_counts_are_forgotten_on_a_model_of_another_depth() -> None:
    """The same layers of a deeper model are other layers."""
    policy = a_policy(right=(3.0, 5.0), wrong=(4.0, 2.0))
    counted = policy.state()
    policy.check_model(tiny_model("llama"))
    assert policy.state() == counted
    deeper: Any = SimpleNamespace(n_layers=N_LAYERS + 2)
    policy.check_model(deeper)
    fresh = DynamicExitLayerPolicy(candidates=LAYERS)
    fresh.check_model(deeper)
    assert policy.state() == fresh.state() != counted


def test_restored_state_of_other_layers_is_refused_by_the_model() -> None:
    policy = DynamicExitLayerPolicy(candidates=(1, 2))
    policy.restore(a_policy(right=(3.0, 5.0), wrong=(4.0, 2.0)).state())
    with pytest.raises(ValueError, match=r"state is of layers \[1, 3\], the policy drafts at \[1, 2\]"):
        policy.check_model(tiny_model("llama"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": "never"}, "stop must be one of both, length, confidence, got 'never'"),
        ({"decay": 1.1}, r"decay must be within 0..1, got 1.1"),
        ({"prior": -1.0}, "prior must be at least 0, got -1.0"),
        ({"head_cost": math.inf}, "head_cost must be at least 0, got inf"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicExitLayerPolicy(**settings)


def test_saved_policy_comes_back(tmp_path: Path) -> None:
    policy = DynamicExitLayerPolicy(every_layer=True, stop="confidence", decay=0.9, prior=0.5, head_cost=1.5)
    policy.save_pretrained(str(tmp_path))
    assert DynamicExitLayerPolicy.from_pretrained(str(tmp_path)).config == policy.config


@pytest.mark.parametrize("settings", [{}, {"every_layer": True, "stop": "confidence"}, {"stop": "length"}], ids=str)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_gives_the_plain_text_and_learns(family: str, settings: dict[str, Any]) -> None:
    ties = 0
    for dtype, seed, length in ((torch.float64, 0, 5), (torch.float64, 1, 17), (torch.float32, 1, 17)):
        model, ids = tiny_model(family, dtype), prompt(seed, length)
        policy = DynamicExitLayerPolicy(max_draft=6, **settings)
        wanted = plain_generate(model, ids, 48)
        for budget in (1, 2, 48):
            out = generate(model, input_ids=ids, policy=policy, max_new_tokens=budget)
            ties += not is_exact(model, ids, out.sequences[0, length:].tolist(), wanted[:budget])
        assert out.stats.drafted > 0
        counted = policy.state()
        assert sum(counted["right"]) > 0
        assert sum(counted["wrong"]) > 0
    assert ties <= 1


def right_from(layer: int) -> EarlyExitModel:
    """A model whose layers beyond `layer` change nothing, so that this one is right everywhere."""
    hf_model = tiny_hf_model("llama")
    with torch.no_grad():
        for idle in hf_model.model.layers[layer:]:
            idle.self_attn.o_proj.weight.zero_()
            idle.mlp.down_proj.weight.zero_()
    return load_model((hf_model, None))


@pytest.mark.parametrize("layer", [2, 4])
def test_finds_the_layer_that_is_always_right(layer: int) -> None:
    model, policy = right_from(layer), DynamicExitLayerPolicy(every_layer=True, max_draft=6)
    out = generate(model, input_ids=prompt(3, 9), policy=policy, max_new_tokens=120)
    assert out.sequences[0, 9:].tolist() == plain_generate(model, prompt(3, 9), 120)
    acceptance = dict(zip(policy.shadow_layers, policy.counts.acceptance().tolist(), strict=True))
    assert all(acceptance[deep] > 0.95 for deep in range(layer, N_LAYERS))
    late = [done.exit_layer for done in out.rounds[len(out.rounds) // 2 :]]
    assert len(late) > 5
    assert late.count(layer) > len(late) / 2  # deeper ones are always right too, and cost more


def test_counts_are_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new token but the first is a position whose shadows are counted once."""
    positions: list[int] = []
    add = ShadowCounts.add

    def counted(self: ShadowCounts, shadow: Shadow) -> None:
        positions.extend(shadow.targets.tolist())
        add(self, shadow)

    monkeypatch.setattr(ShadowCounts, "add", counted)
    policy = DynamicExitLayerPolicy(decay=1.0, prior=0.0)
    out = generate(tiny_model("llama"), input_ids=prompt(0, 9), policy=policy, max_new_tokens=40)
    assert positions == out.sequences[0, 10:].tolist()
    totals = np.add(policy.state()["right"], policy.state()["wrong"])
    np.testing.assert_array_equal(totals, np.full(3, 39.0))
