"""Policies as text: `NAME`, `NAME:key=value;key=value`, or a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lede.policies import (
    POLICIES,
    LearnedPolicy,
    LookupPolicyConfig,
    RandomConfig,
    StaticConfig,
    StaticPolicy,
    ThresholdConfig,
    parse_policy,
)


def test_plain_is_no_policy() -> None:
    assert parse_policy("plain") is None
    with pytest.raises(ValueError, match="plain decoding has no settings"):
        parse_policy("plain:seed=1")


def test_every_kind_is_registered_under_its_name() -> None:
    assert {kind: policy.kind for kind, policy in POLICIES.items()} == {k: k for k in POLICIES}
    assert list(POLICIES) == [
        "static",
        "lookup",
        "threshold",
        "draft-verify",
        "del",
        "swift",
        "conflayers",
        "random",
        "learned",
        "survival",
        "lookup-value",
        "source-value",
        "ablated",
    ]


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("static", StaticConfig()),
        ("static:", StaticConfig()),
        ("static:exit_layer=4;draft_length=6", StaticConfig(exit_layer=4, draft_length=6)),
        ("static: exit_layer = none ; max_draft = 4", StaticConfig(exit_layer=None, max_draft=4)),
        ("random:seed=7;candidates=2,4, 8", RandomConfig(seed=7, candidates=(2, 4, 8))),
        ("random:draft_probability=1", RandomConfig(draft_probability=1.0)),
        ("threshold:thresholds=0.5", ThresholdConfig(thresholds=0.5)),
        ("threshold:thresholds=0.5,0.25;candidates=1,2", ThresholdConfig(thresholds=(0.5, 0.25), candidates=(1, 2))),
        ("lookup", LookupPolicyConfig()),
        (
            "lookup:draft_length=6;max_suffix=4;min_suffix=2;continuation=frequent;prune_at=none",
            LookupPolicyConfig(draft_length=6, max_suffix=4, min_suffix=2, continuation="frequent"),
        ),
        ("threshold:measure=entropy;draft_threshold=2", ThresholdConfig(measure="entropy", draft_threshold=2.0)),
    ],
)
def test_settings_are_read_by_type(text: str, config: object) -> None:
    policy = parse_policy(text)
    assert policy is not None
    assert policy.config == config
    assert [type(value) for value in vars(policy.config).values()] == [type(value) for value in vars(config).values()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "statik",
            "policy 'statik' is neither a folder nor one of plain, static, lookup, threshold, draft-verify, del, swift",
        ),
        ("runs/none/policy", "policy 'runs/none/policy' is neither a folder nor one of"),
        ("", "policy '' is neither"),
        (
            "static:layer=4",
            "policy 'static': there is no setting 'layer'; settings are candidates, max_draft, trained_temperature, "
            "exit_layer, draft_length",
        ),
        ("static:exit_layer", "policy 'static': 'exit_layer' is no setting; settings look like key=value;key=value"),
        ("static:exit_layer=4;exit_layer=5", "policy 'static': setting 'exit_layer' is given twice"),
        ("static:exit_layer=four", "policy 'static': setting 'exit_layer' must be a whole number or none, got 'four'"),
        ("static:exit_layer=4.5", "policy 'static': setting 'exit_layer' must be a whole number or none, got '4.5'"),
        (
            "random:candidates=2,x",
            "policy 'random': setting 'candidates' must be a whole number each, comma-separated or none, got '2,x'",
        ),
        (
            "threshold:measure=margin",
            "policy 'threshold': setting 'measure' must be probability or entropy, got 'margin'",
        ),
        (
            "lookup:continuation=first",
            "policy 'lookup': setting 'continuation' must be recent or frequent, got 'first'",
        ),
        ("lookup:min_suffix=4", "policy 'lookup': a suffix must have 1 <= min_suffix <= max_suffix <= 32 tokens, got"),
        ("threshold:thresholds=2", "policy 'threshold': a threshold on probability must be within 0..1, got 2.0"),
        ("learned", "a learned policy has weights; give the folder that it was saved to instead of its name"),
    ],
)
def test_errors_are_one_line_that_names_what_is_valid(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_policy(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_folder_is_loaded_and_a_name_goes_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = LearnedPolicy.from_network([(np.zeros((2, 4)), np.array([0.0, 1.0]))])
    learned.save_pretrained(str(tmp_path / "static"))
    assert isinstance(parse_policy(str(tmp_path / "static")), LearnedPolicy)
    monkeypatch.chdir(tmp_path)
    assert isinstance(parse_policy("static"), StaticPolicy)
    assert isinstance(parse_policy("./static"), LearnedPolicy)
