"""The static lookup policy: what it answers, what it refuses, and its rounds on texts written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lede.checkpoint import load_policy
from lede.generation import generate
from lede.lookup import LookupConfig
from lede.policies import LayerState, Lookup, LookupPolicy, PreScanState
from lede.policies.base import NOTHING_OBSERVED
from tests.naive_lookup import naive_proposal
from tests.tiny_models import N_LAYERS, plain_generate, prompt, tiny_model

BEFORE = PreScanState(trace=0.0, recent_acceptance=None, rounds_since_draft=0, remaining=20, n_tokens=5)
AT_A_LAYER = LayerState(layer=2, n_drafted=0, observation=NOTHING_OBSERVED)


def test_every_round_copies_and_nothing_else_is_asked() -> None:
    policy = LookupPolicy(draft_length=4, max_suffix=5, min_suffix=2, continuation="frequent", prune_at=3)
    assert policy.pre_scan(BEFORE) == policy.plan == Lookup(4, 3)
    assert policy.lookup == LookupConfig(5, 2, "frequent")
    assert not policy.scan(AT_A_LAYER)
    assert not policy.draft(AT_A_LAYER)
    assert (policy.features, policy.uses_trace, policy.decides_pre_scan) == (None, False, False)
    assert policy.candidates_for(N_LAYERS) == ()


def test_the_defaults_are_those_of_prompt_lookup() -> None:
    assert LookupPolicy().plan == Lookup(10)
    assert LookupPolicy().lookup == LookupConfig(max_suffix=3, min_suffix=1, continuation="recent")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_length": 0}, "draft_length must be at least 1, got 0"),
        ({"prune_at": 0}, "prune_at must be at least 1, got 0"),
        ({"min_suffix": 0}, "min_suffix 0 and max_suffix 3"),
        ({"max_suffix": 33}, "min_suffix 1 and max_suffix 33"),
        ({"continuation": "first"}, "continuation must be recent or frequent, got 'first'"),
        ({"max_draft": 0}, "max_draft must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LookupPolicy(**settings)


def test_drafts_are_cut_at_layers_that_the_model_has() -> None:
    model = tiny_model("llama")
    LookupPolicy(prune_at=N_LAYERS - 1).check_model(model)
    with pytest.raises(ValueError, match=rf"pruned at layers 1..{N_LAYERS - 1} of a model with {N_LAYERS} layers"):
        generate(model, input_ids=[1, 2, 1], policy=LookupPolicy(prune_at=N_LAYERS), max_new_tokens=4)


def test_it_is_saved_bound_or_not(tmp_path: Path) -> None:
    model = tiny_model("llama")
    policy = LookupPolicy(draft_length=6, min_suffix=2, prune_at=4)
    policy.save_pretrained(str(tmp_path / "free"))
    policy.bind(model).save_pretrained(str(tmp_path / "bound"))
    free, bound = load_policy(tmp_path / "free"), load_policy(tmp_path / "bound", model)
    assert (free.config, free.bound) == (policy.config, False)
    assert isinstance(bound, LookupPolicy)
    assert (bound.plan, bound.lookup, bound.bound) == (policy.plan, policy.lookup, True)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("settings", [{"draft_length": 2}, {"draft_length": 16, "max_suffix": 4, "min_suffix": 2}])
def test_its_rounds_are_those_of_a_search_of_the_text(family: str, settings: dict[str, Any]) -> None:
    """An account of its own: what a naive search proposes before each round, held against the plain text."""
    model, ids, policy = tiny_model(family), prompt(3, 9), LookupPolicy(**settings)
    text = [*ids, *plain_generate(model, ids, 60)]
    out = generate(model, input_ids=ids, policy=policy, max_new_tokens=60)
    assert out.sequences[0].tolist() == text
    at, wanted = len(ids) + 1, []
    while at < len(text):
        copied = naive_proposal(text[:at], policy.lookup, min(policy.plan.length, len(text) - at - 1))
        right = next((i for i, token in enumerate(copied) if token != text[at + i]), len(copied))
        wanted.append((len(copied), right, right + 1))
        at += right + 1
    assert [(r.drafted, r.accepted, len(r.tokens)) for r in out.rounds] == wanted
    assert {r.source for r in out.rounds} == {"lookup", None}
    assert out.stats.acceptance_rate is not None
    assert out.stats.acceptance_rate > 0
    assert (out.stats.head_reads, out.stats.mean_exit_layer) == (0, None)


def test_a_longer_shortest_suffix_drafts_less_and_better() -> None:
    """Over the texts of four prompts."""
    model = tiny_model("llama")
    found = []
    for shortest in (1, 3):
        policy = LookupPolicy(draft_length=4, min_suffix=shortest)
        rounds = [
            r
            for n in range(4)
            for r in generate(model, input_ids=prompt(n, 12), policy=policy, max_new_tokens=60).rounds
            if r.drafted
        ]
        found.append((len(rounds), sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds)))
    (often, worse), (seldom, better) = found
    assert often > seldom > 0
    assert worse < better
