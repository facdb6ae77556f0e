"""Ablated policies: what is held fixed is, everything else is the base's, and the text is the plain one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lede.acceptance import AcceptanceModel
from lede.checkpoint import load_policy
from lede.features import FeatureConfig
from lede.generation import GenerateOutput, generate
from lede.policies import (
    AblatedPolicy,
    DraftVerifyPolicy,
    DynamicExitLayerPolicy,
    ExitAt,
    LayerState,
    LearnedPolicy,
    Policy,
    PreScan,
    PreScanState,
    StaticPolicy,
    SurvivalPolicy,
    SwiftPolicy,
    parse_policy,
)
from tests.exactness import is_exact
from tests.forecasts import made_up_survival
from tests.tiny_models import FAMILY_NAMES, plain_generate, prompt, tiny_model

CANDIDATES = (1, 2, 3)
IDS = prompt(3, 9)


def learned(names: tuple[str, ...] = ("confidence", "entropy", "trace", "depth"), outputs: int = 2) -> LearnedPolicy:
    """Random weights, large enough that both answers occur."""
    rng = np.random.default_rng(1)
    sizes = [len(names), 16, outputs]
    layers = [(rng.normal(size=(b, a)), rng.normal(size=b)) for a, b in pairwise(sizes)]
    mean = np.full(len(names), 2.0)
    return LearnedPolicy.from_network(
        layers, mean=mean, features=FeatureConfig(names=names), candidates=CANDIDATES, max_draft=6
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    learned().save_pretrained(str(tmp_path / "base"))
    return tmp_path / "base"


def run(policy: object, family: str = "llama", budget: int = 40) -> GenerateOutput:
    return generate(tiny_model(family), input_ids=IDS, policy=policy, max_new_tokens=budget)


def test_a_fixed_length_leaves_the_layers_to_the_base(base: Path) -> None:
    whole, held = run(load_policy(base)), run(AblatedPolicy.of(base, draft_length=2))
    assert {r.drafted for r in held.rounds[:-2] if r.drafted} == {2}
    assert {r.drafted for r in whole.rounds if r.drafted} != {2}
    assert len({r.exit_layer for r in held.rounds}) > 1
    # the first round of both stands at the same place of the same text
    assert held.rounds[0].exit_layer == whole.rounds[0].exit_layer


def test_a_fixed_layer_leaves_the_length_to_the_base(base: Path) -> None:
    held = run(AblatedPolicy.of(base, exit_layer=2))
    assert {r.exit_layer for r in held.rounds[:-1]} == {2}  # the last round may have no room for a draft
    assert len({r.drafted for r in held.rounds}) > 1


def test_a_fixed_draft_of_the_base_gets_the_fixed_length(tmp_path: Path) -> None:
    base = made_up_survival(2, CANDIDATES)
    SurvivalPolicy.from_model(base.model, replace(base.config, blind=2, fixed_length=4)).save_pretrained(str(tmp_path))
    whole, held = run(load_policy(tmp_path)), run(AblatedPolicy.of(tmp_path, draft_length=2))
    assert {r.drafted for r in whole.rounds[:-3]} == {4}
    assert {r.drafted for r in held.rounds[:-3]} == {2}


def test_decisions_by_hand(base: Path) -> None:
    fixed = AblatedPolicy.of(base, draft_length=3)
    state = LayerState(2, 0, np.zeros(4, dtype=np.float32))
    assert fixed.scan(state) == fixed.base.scan(state)
    assert [fixed.draft(LayerState(2, n, state.observation)) for n in range(1, 5)] == [True, True, False, False]
    at = AblatedPolicy.of(base, exit_layer=3)
    before = PreScanState(0.0, None, 0, 10, 10)
    assert at.pre_scan(before) == ExitAt(3)
    assert fixed.pre_scan(before) is PreScan.SCAN
    assert at.draft(state) == at.base.draft(state)
    assert at.config.max_draft == fixed.config.max_draft == 6
    assert at.config.candidates == CANDIDATES


def test_a_base_that_decides_the_pre_scan_goes_on_deciding_it_unless_the_layer_is_fixed(tmp_path: Path) -> None:
    names = ("entropy", "trace", "depth", "in_scan", "in_draft")
    learned(names, outputs=2 + len(CANDIDATES)).save_pretrained(str(tmp_path))
    length, layer = AblatedPolicy.of(tmp_path, draft_length=2), AblatedPolicy.of(tmp_path, exit_layer=1)
    assert length.decides_pre_scan
    assert not layer.decides_pre_scan
    state = PreScanState(1.0, None, 0, 10, 10, np.ones(5, dtype=np.float32))
    assert length.pre_scan(state) == length.base.pre_scan(state)
    assert {r.exit_layer for r in run(layer).rounds[:-1]} == {1}


def test_a_survival_policy_counts_the_blind_token_of_the_fixed_layer(tmp_path: Path) -> None:
    """Its product begins with the forecast of a draft without a look, as where the layer is its own setting."""
    features = FeatureConfig(names=("entropy", "surprisal", "margin", "drafted"))
    rng = np.random.default_rng(0)
    weights = rng.normal(scale=0.5, size=(2, len(CANDIDATES), 9))
    model = AcceptanceModel(features, weights, np.array([0.5, 1.0, 1.5]))
    survival = SurvivalPolicy.from_model(model, candidates=CANDIDATES, survival=0.3)
    survival.save_pretrained(str(tmp_path))
    blind = SurvivalPolicy.from_model(model, candidates=CANDIDATES, survival=0.3, blind=2)
    held = AblatedPolicy.of(tmp_path, exit_layer=2)
    assert run(held).rounds == run(blind).rounds
    rows = [IDS, IDS[:3], IDS[2:]]  # each of a batch with a product of its own
    made_up_survival(2, CANDIDATES).save_pretrained(str(tmp_path / "long"))
    settings: dict[str, Any] = {"policy": AblatedPolicy.of(tmp_path / "long", exit_layer=2), "max_new_tokens": 24}
    together = generate(tiny_model("llama"), input_ids=rows, **settings)
    alone = [generate(tiny_model("llama"), input_ids=row, **settings) for row in rows]
    assert [out.rounds for out in together] == [out.rounds for out in alone]
    assert len({r.drafted for out in alone for r in out.rounds}) > 1
    with pytest.raises(ValueError, match="layer 5, which is none of"):
        AblatedPolicy.of(tmp_path, exit_layer=5)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_text_is_the_plain_one(family: str, base: Path) -> None:
    model = tiny_model(family, torch.float64)
    wanted = plain_generate(model, IDS, 40)
    for policy in (AblatedPolicy.of(base, draft_length=4), AblatedPolicy.of(base, exit_layer=2)):
        out = run(policy, family)
        assert is_exact(model, IDS, out.sequences[0, len(IDS) :].tolist(), wanted)
        assert out.stats.drafted > 0


def test_saved_loaded_and_parsed_alike(base: Path, tmp_path: Path) -> None:
    policy = AblatedPolicy.of(base, exit_layer=2)
    policy.save_pretrained(str(tmp_path / "ablated"))
    texts = (str(tmp_path / "ablated"), f"ablated:base={base};exit_layer=2")
    for text in texts:
        again = parse_policy(text)
        assert isinstance(again, AblatedPolicy)
        assert again.config == policy.config
        assert run(again).rounds == run(policy).rounds
    bound = learned().bind(tiny_model("llama"))
    bound.save_pretrained(str(base))
    assert AblatedPolicy.of(base, exit_layer=2).fingerprint == bound.fingerprint
    with pytest.raises(ValueError, match="belongs to model"):
        AblatedPolicy.of(base, exit_layer=2).bind(tiny_model("gpt2"))


def test_what_makes_no_ablation_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs the folder of its base"):
        AblatedPolicy(draft_length=2)
    for held in ({}, {"draft_length": 2, "exit_layer": 2}):
        with pytest.raises(ValueError, match="either draft_length or exit_layer"):
            AblatedPolicy.of(base, **held)
    with pytest.raises(ValueError, match="the base of the ablated policy: there is no folder"):
        AblatedPolicy.of(tmp_path / "nothing", draft_length=2)
    with pytest.raises(ValueError, match="max_draft = 6, got 7"):
        AblatedPolicy.of(base, draft_length=7)
    with pytest.raises(ValueError, match="exit_layer must be at least 1"):
        AblatedPolicy.of(base, exit_layer=0)
    with pytest.raises(ValueError, match="exit layer 9 is outside"):
        run(AblatedPolicy.of(base, exit_layer=9))


def test_only_bases_with_two_decisions_of_their_own_are_taken(base: Path, tmp_path: Path) -> None:
    """Others plan gaps, which have no exit layer, or learn from rounds that an ablated policy would not report."""
    others: list[Policy] = [
        AblatedPolicy.of(base, exit_layer=2),
        StaticPolicy(exit_layer=2),
        DraftVerifyPolicy(exit_layer=2),
        DynamicExitLayerPolicy(),
        SwiftPolicy.from_sets(frozenset({2}), frozenset()),
    ]
    for policy in others:
        folder = tmp_path / policy.kind
        policy.save_pretrained(str(folder))
        with pytest.raises(ValueError, match=f"holds a '{policy.kind}' policy; only a 'learned' or 'survival' one"):
            AblatedPolicy.of(folder, draft_length=2)
