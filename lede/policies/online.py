"""Policies that learn from the text that they decode: only decoding, text by text, tells them what they go by."""

from __future__ import annotations

from lede.policies.base import Policy

_HOOKS = ("begin", "verified", "between_rounds")


def learns_online(policy: Policy) -> bool:
    """Whether a policy is told of texts and rounds, or reads layers where they were verified."""
    kind = type(policy)
    return any(getattr(kind, name) is not getattr(Policy, name) for name in _HOOKS) or bool(policy.shadow_layers)
