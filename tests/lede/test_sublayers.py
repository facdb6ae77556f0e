"""Plans with gaps as objects, and layers run in part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lede.families import UnsupportedModelError
from lede.models import load_model
from lede.policies import RandomPolicy, SkipSublayers
from lede.policies.base import PreScanState
from lede.sublayers import PLANS_KEPT
from tests.cut_models import run_skipping, without
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, prompt, tiny_hf_model, tiny_model

BEFORE = PreScanState(trace=0.0, recent_acceptance=None, rounds_since_draft=0, remaining=9, n_tokens=5)


def plan(attention: set[int], mlp: set[int]) -> SkipSublayers:
    return SkipSublayers(frozenset(attention), frozenset(mlp))


@pytest.mark.parametrize(
    ("attention", "mlp", "prefix", "share"),
    [({3}, set(), 2, 1 / 12), (set(), {2}, 1, 1 / 12), ({4, 5}, {3, 5}, 2, 4 / 12), ({2, 3, 4, 5}, {5}, 1, 5 / 12)],
)
def test_prefix_and_share(attention: set[int], mlp: set[int], prefix: int, share: float) -> None:
    gaps = plan(attention, mlp)
    gaps.check(N_LAYERS)
    assert gaps.prefix == prefix
    assert gaps.skipped_share(N_LAYERS) == pytest.approx(share)


@pytest.mark.parametrize(
    ("attention", "mlp", "message"),
    [
        (set(), set(), "must leave out at least one sublayer"),
        ({1, 3}, {2}, r"layers \[1, 2, 3\] can't be left out; a model with 6 layers allows 2\.\.5"),
        (set(), {6}, r"layers \[6\] can't be left out"),
        ({0}, set(), r"layers \[0\] can't be left out"),
    ],
)
def test_sets_outside_the_inner_layers_are_refused(attention: set[int], mlp: set[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(attention, mlp).check(N_LAYERS)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("gaps", [plan({3}, set()), plan(set(), {3}), plan({2, 4}, {4, 5})], ids=["attn", "mlp", "all"])
def test_a_draft_is_what_a_model_without_the_sublayers_says(family: str, gaps: SkipSublayers) -> None:
    """Longer than the windows, and the live model is as it was."""
    hf_model = tiny_hf_model(family)
    model, ids = load_model((hf_model, None)), prompt(0, 20)
    modules = {name: id(module) for name, module in hf_model.named_modules()}
    with torch.inference_mode():
        wanted = without(hf_model, gaps)(torch.tensor([ids])).logits[0]
        plain = hf_model(torch.tensor([ids])).logits
        torch.testing.assert_close(run_skipping(model, ids, gaps), wanted, rtol=0, atol=1e-12)
        assert torch.equal(hf_model(torch.tensor([ids])).logits, plain)
    assert {name: id(module) for name, module in hf_model.named_modules()} == modules


def test_plans_take_turns() -> None:
    """The steps of the last plan are kept; another plan must not get them."""
    model, ids = tiny_model("llama"), prompt(1, 9)
    one, other = plan({3}, set()), plan(set(), {4})
    alone = [run_skipping(load_model((model.hf_model, None)), ids, gaps) for gaps in (one, other)]
    for gaps, wanted in ((one, alone[0]), (other, alone[1]), (one, alone[0])):
        assert torch.equal(run_skipping(model, ids, gaps), wanted)


def test_the_last_few_plans_are_kept() -> None:
    """By what they leave out, not by which object says so; the oldest goes when there are too many."""
    layers = load_model((tiny_hf_model("llama"), None)).sublayers  # one that no other test has asked
    steps = layers.skipping(plan({3}, set()))
    assert layers.skipping(plan({3}, set())) is steps
    for layer in (2, 3, 4):
        layers.skipping(plan(set(), {layer}))
    assert layers.skipping(plan({3}, set())) is steps
    layers.skipping(plan({2}, {2}))
    assert layers.skipping(plan({3}, set())) is not steps
    assert len(layers._recent) == PLANS_KEPT


def test_a_forward_of_the_class_left_on_the_object_is_no_replacement() -> None:
    """As transformers 5.0 leaves it after it collected hidden states: a copy must not run the original."""
    hf_model, ids, gaps = tiny_hf_model("llama"), prompt(2, 9), plan({3}, {2, 4})
    wanted = run_skipping(load_model((hf_model, None)), ids, gaps)
    for layer in hf_model.model.layers:
        layer.forward = layer.forward
    model = load_model((hf_model, None))
    model.check_sublayers()
    assert torch.equal(run_skipping(model, ids, gaps), wanted)
    assert all("forward" in vars(layer) for layer in hf_model.model.layers)  # the live model is as it was


def test_models_that_a_copy_would_misread_are_refused() -> None:
    hooked = tiny_hf_model("llama")
    hooked.model.layers[2]._hf_hook = object()  # what accelerate leaves on modules that it moves
    with pytest.raises(UnsupportedModelError, match="LlamaDecoderLayer with accelerate hooks"):
        load_model((hooked, None)).check_sublayers()
    patched = tiny_hf_model("llama")
    original = patched.model.layers[2].forward
    patched.model.layers[2].forward = lambda *args, **kwargs: original(*args, **kwargs)
    with pytest.raises(UnsupportedModelError, match="whose forward was replaced"):
        run_skipping(load_model((patched, None)), prompt(0, 3), plan({3}, set()))
    wrapped = tiny_hf_model("gpt2")
    wrapped.transformer.h[1] = nn.Sequential(wrapped.transformer.h[1])
    with pytest.raises(UnsupportedModelError, match="a Sequential without ln_1, attn, ln_2, mlp"):
        RandomPolicy(gap_probability=0.5).check_model(load_model((wrapped, None)))


def test_random_gaps_are_sound_and_leave_other_draws_alone() -> None:
    with pytest.raises(ValueError, match="call check_model"):
        RandomPolicy(skip_probability=0.0, blind_probability=0.0, gap_probability=1.0).pre_scan(BEFORE)
    policy = RandomPolicy(seed=1, skip_probability=0.2, blind_probability=0.2, gap_probability=0.4)
    policy.check_model(tiny_model("llama"))
    plans = [p for p in (policy.pre_scan(BEFORE) for _ in range(2000)) if isinstance(p, SkipSublayers)]
    assert len(plans) / 2000 == pytest.approx(0.4, abs=0.06)  # five standard deviations
    for gaps in plans:
        gaps.check(N_LAYERS)
    assert {layer for gaps in plans for layer in gaps.attention} == set(range(2, N_LAYERS))
    assert {len(gaps.attention) + len(gaps.mlp) for gaps in plans} == set(range(1, 2 * (N_LAYERS - 2) + 1))
    with pytest.raises(ValueError, match="must not add up to more than 1"):
        RandomPolicy(skip_probability=0.3, blind_probability=0.3, gap_probability=0.5)


def test_random_gaps_need_inner_layers() -> None:
    hf_model = tiny_hf_model("llama")
    hf_model.model.layers = hf_model.model.layers[:2]
    with pytest.raises(ValueError, match="at least 3 layers, got 2"):
        RandomPolicy(gap_probability=0.5).check_model(load_model((hf_model, None)))
