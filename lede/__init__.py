"""lede: early-exit self-speculative decoding of large language models with learned policies.

Names are imported when they are first used, so that `import lede` and `lede --help` are instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lede.bridge import custom_generate
    from lede.checkpoint import load_policy
    from lede.generation import GenerateConfig, GenerateOutput, generate
    from lede.models import EarlyExitModel, UnsupportedModelError, load_model
    from lede.policies import (
        ConfLayersPolicy,
        DraftVerifyPolicy,
        DynamicExitLayerPolicy,
        LearnedPolicy,
        LookupPolicy,
        Policy,
        RandomPolicy,
        StaticPolicy,
        SwiftPolicy,
        ThresholdPolicy,
        parse_policy,
    )
    from lede.statistics import DecodingStats

__version__ = "0.1.0"

_HOMES = {
    "custom_generate": "lede.bridge",
    "load_policy": "lede.checkpoint",
    "GenerateConfig": "lede.generation",
    "GenerateOutput": "lede.generation",
    "generate": "lede.generation",
    "EarlyExitModel": "lede.models",
    "UnsupportedModelError": "lede.models",
    "load_model": "lede.models",
    "ConfLayersPolicy": "lede.policies",
    "DraftVerifyPolicy": "lede.policies",
    "DynamicExitLayerPolicy": "lede.policies",
    "LearnedPolicy": "lede.policies",
    "LookupPolicy": "lede.policies",
    "Policy": "lede.policies",
    "RandomPolicy": "lede.policies",
    "StaticPolicy": "lede.policies",
    "SwiftPolicy": "lede.policies",
    "ThresholdPolicy": "lede.policies",
    "parse_policy": "lede.policies",
    "DecodingStats": "lede.statistics",
}

__all__ = [
    "ConfLayersPolicy",
    "DecodingStats",
    "DraftVerifyPolicy",
    "DynamicExitLayerPolicy",
    "EarlyExitModel",
    "GenerateConfig",
    "GenerateOutput",
    "LearnedPolicy",
    "LookupPolicy",
    "Policy",
    "RandomPolicy",
    "StaticPolicy",
    "SwiftPolicy",
    "ThresholdPolicy",
    "UnsupportedModelError",
    "__version__",
    "custom_generate",
    "generate",
    "load_model",
    "load_policy",
    "parse_policy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lede' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
