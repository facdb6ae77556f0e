"""Policies: who decides when to exit. One file a policy, one protocol (`lede.policies.base`)."""

from __future__ import annotations

from pathlib import Path

from lede.policies.ablated import AblatedConfig, AblatedPolicy
from lede.policies.base import (
    ExitAt,
    LayerState,
    Lookup,
    Policy,
    PolicyConfig,
    PreScan,
    PreScanState,
    RoundReport,
    Shadow,
    SkipSublayers,
)
from lede.policies.conflayers import ConfLayersConfig, ConfLayersPolicy
from lede.policies.draft_verify import DraftVerifyConfig, DraftVerifyPolicy
from lede.policies.dynamic_exit_layer import DynamicExitLayerConfig, DynamicExitLayerPolicy
from lede.policies.layer_skipping import LayerSkippingPolicy
from lede.policies.learned import LearnedConfig, LearnedPolicy
from lede.policies.lookup import LookupPolicy, LookupPolicyConfig
from lede.policies.lookup_value import LookupValueConfig, LookupValuePolicy
from lede.policies.random import RandomConfig, RandomPolicy
from lede.policies.settings import settings_from_text
from lede.policies.skip_search import SearchStep
from lede.policies.source_value import SourceValueConfig, SourceValuePolicy
from lede.policies.static import StaticConfig, StaticPolicy
from lede.policies.survival import SurvivalConfig, SurvivalPolicy
from lede.policies.swift import SwiftConfig, SwiftPolicy
from lede.policies.threshold import ThresholdConfig, ThresholdPolicy

__all__ = [
    "POLICIES",
    "AblatedConfig",
    "AblatedPolicy",
    "ConfLayersConfig",
    "ConfLayersPolicy",
    "DraftVerifyConfig",
    "DraftVerifyPolicy",
    "DynamicExitLayerConfig",
    "DynamicExitLayerPolicy",
    "ExitAt",
    "LayerSkippingPolicy",
    "LayerState",
    "LearnedConfig",
    "LearnedPolicy",
    "Lookup",
    "LookupPolicy",
    "LookupPolicyConfig",
    "LookupValueConfig",
    "LookupValuePolicy",
    "Policy",
    "PolicyConfig",
    "PreScan",
    "PreScanState",
    "RandomConfig",
    "RandomPolicy",
    "RoundReport",
    "SearchStep",
    "Shadow",
    "SkipSublayers",
    "SourceValueConfig",
    "SourceValuePolicy",
    "StaticConfig",
    "StaticPolicy",
    "SurvivalConfig",
    "SurvivalPolicy",
    "SwiftConfig",
    "SwiftPolicy",
    "ThresholdConfig",
    "ThresholdPolicy",
    "parse_policy",
]

POLICIES: dict[str, type[Policy]] = {
    policy.kind: policy
    for policy in (
        StaticPolicy,
        LookupPolicy,
        ThresholdPolicy,
        DraftVerifyPolicy,
        DynamicExitLayerPolicy,
        SwiftPolicy,
        ConfLayersPolicy,
        RandomPolicy,
        LearnedPolicy,
        SurvivalPolicy,
        LookupValuePolicy,
        SourceValuePolicy,
        AblatedPolicy,
    )
}
"""Every policy by its kind."""

_FITTED = (LearnedPolicy.kind, SurvivalPolicy.kind, LookupValuePolicy.kind, SourceValuePolicy.kind)


def parse_policy(text: str) -> Policy | None:
    """The policy that a command line names.

    Args:
        text: A folder of `save_pretrained`, or `NAME`, or `NAME:key=value;key=value` with keys of the policy's config.
            A name goes before a folder of that name; write `./static` for the folder. "plain" is decoding without a
            policy.

    Returns:
        The policy; None for "plain".

    Raises:
        ValueError: It is neither a name nor a folder, a setting is unusable, or the folder holds no sound policy.
    """
    name, _, settings = text.partition(":")
    if name == "plain":
        if settings:
            raise ValueError(f"plain decoding has no settings, got '{settings}'")
        return None
    if name in _FITTED:
        raise ValueError(f"a {name} policy has weights; give the folder that it was saved to instead of its name")
    if name in POLICIES:
        try:
            return POLICIES[name](settings_from_text(POLICIES[name].config_class, settings))
        except ValueError as error:
            raise ValueError(f"policy '{name}': {error}") from None
    if text and Path(text).is_dir():
        from lede.checkpoint import load_policy

        return load_policy(text)
    names = ["plain", *(kind for kind in POLICIES if kind not in _FITTED)]
    raise ValueError(f"policy '{text}' is neither a folder nor one of {', '.join(names)}")
