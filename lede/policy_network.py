"""The decision of a fitted policy as a torch module, for programs that are not lede.

Learned policies have a Q-network, survival policies logistic regressions; no other kind decides by weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lede.acceptance import DRAFTING, LEAST, SCANNING, UNVARYING, AcceptanceModel
from lede.acceptance import inputs as inputs_of
from lede.features import FeatureConfig
from lede.forecast import MOST_ODDS
from lede.policies import LearnedPolicy, Policy, SurvivalPolicy
from lede.policies.base import BLIND, ExitAt, Lookup, PreScan
from lede.policies.plan_numbers import numbered_plans

EXPORTABLE = (LearnedPolicy.kind, SurvivalPolicy.kind)
"""Kinds that decide by weights."""

Values = npt.NDArray[Any]


@dataclass(frozen=True)
class PolicyNetwork:
    """A policy's decision as a module, and what it is held to."""

    module: nn.Module
    """Takes raw observations `(batch, feature)`, float32."""
    output: str
    """What its output is called."""
    layout: str
    """Shape of the output in words."""
    features: FeatureConfig
    """The observation."""
    values: Callable[[Values], Values]
    """The policy's own numbers for observations `(n, feature)`, in the shape of the output."""
    options: Callable[[Values], Values]
    """Options `(n, decision, option)` of an output, the largest of which is taken."""
    tolerance: float
    """How far an output may be from the policy's own numbers, as a share of the largest of them."""


def policy_network(policy: Policy | None) -> PolicyNetwork:
    """The network of a policy; None is plain decoding.

    Raises:
        ValueError: It has none.
    """
    if isinstance(policy, LearnedPolicy):
        return _learned(policy)
    if isinstance(policy, SurvivalPolicy):
        return _survival(policy)
    kind = "plain" if policy is None else policy.kind
    hint = "; export the policy that it ablates" if kind == "ablated" else ""
    raise ValueError(f"a '{kind}' policy has no network to export; {' and '.join(EXPORTABLE)} ones have{hint}")


def _learned(policy: LearnedPolicy) -> PolicyNetwork:
    def options(values: Values) -> Values:
        if values.shape[-1] == BLIND:
            return values[:, None]
        scan = np.where(np.arange(values.shape[-1]) < BLIND, values, -np.inf)
        return np.stack([scan, values], axis=1)

    layers = policy.network.layers
    actions = ", ".join(["CONTINUE", "EXIT", *map(_named, _plans(policy))])
    modules: list[nn.Module] = []
    for weight, bias in layers:
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weight))
            linear.bias.copy_(torch.from_numpy(bias))
        modules += [linear, nn.ReLU()]
    return PolicyNetwork(
        module=nn.Sequential(*modules[:-1]).eval(),
        output="q_values",
        layout=f"(batch, action), actions {actions}",
        features=policy.features,
        values=policy.q_values,
        options=options,
        tolerance=1e-5,
    )


def _plans(policy: LearnedPolicy) -> tuple[PreScan | ExitAt | Lookup, ...]:
    """The plans that the network has values for, beside the first two."""
    config = policy.config
    if not policy.decides_pre_scan:
        return ()
    return numbered_plans(config.candidates or (), config.lookups, config.fixed_drafts)[BLIND:]


def _named(plan: PreScan | ExitAt | Lookup) -> str:
    """A plan in the words of the output's layout."""
    if isinstance(plan, Lookup):
        return f"COPY {plan.length}" + ("" if plan.prune_at is None else f" PRUNED {plan.prune_at}")
    if isinstance(plan, ExitAt):
        return f"BLIND {plan.exit_layer}" + ("" if plan.length is None else f" FIXED {plan.length}")
    return plan.name


def _survival(policy: SurvivalPolicy) -> PolicyNetwork:
    model, limits = policy.model, policy.limits

    def values(observations: Values) -> Values:
        weighed = inputs_of(observations, model.features)
        return np.asarray(np.einsum("ni,sci->nsc", weighed, model.weights))

    def options(log_odds: Values) -> Values:
        with np.errstate(divide="ignore"):  # a limit of 0 always exits, one of 1 or more never does
            wanted = np.where(limits < 1, np.log(limits) - np.log1p(-np.minimum(limits, 1)), np.inf)
        scanned = log_odds[:, SCANNING]
        return np.stack([np.broadcast_to(wanted, scanned.shape), scanned], axis=-1)

    stages = ["scan", "scan"]
    stages[DRAFTING] = "draft"
    return PolicyNetwork(
        module=AcceptanceModule(model).eval(),
        output="log_odds",
        layout=f"(batch, stage, candidate) of acceptance, stages {', '.join(stages)}",
        features=policy.features,
        values=values,
        options=options,
        tolerance=1e-9,
    )


def _odds_of_surprisal(value: torch.Tensor) -> torch.Tensor:
    return (-torch.log(torch.expm1(value.clamp_min(1e-12)))).clamp(-MOST_ODDS, MOST_ODDS)


_BENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "surprisal": _odds_of_surprisal,
    "margin": lambda value: torch.exp(-value),
    "entropy": torch.sqrt,
    "agreement": lambda value: (value != 0).double(),
    "drafted": torch.log1p,
    "survival": lambda value: torch.log(value.clamp_min(LEAST)),
    "certainty": lambda value: torch.log(value.clamp_min(LEAST)),
}
"""The second inputs of `lede.acceptance.inputs`."""


class AcceptanceModule(nn.Module):
    """The forecasts of a survival policy, float64 inside as in the policy.

    Args:
        model: The forecasts.
    """

    weights: torch.Tensor

    def __init__(self, model: AcceptanceModel) -> None:
        super().__init__()
        self.names = model.features.names
        self.shape = model.weights.shape[:2]
        self.register_buffer("weights", torch.from_numpy(model.weights.reshape(-1, model.weights.shape[-1]).T.copy()))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Log-odds of acceptance `(batch, stage, candidate)` of raw observations `(batch, feature)`."""
        seen = observations.double()
        columns = []
        for place, name in enumerate(self.names):
            if name not in UNVARYING:
                columns.append(seen[:, place])
                if name in _BENT:
                    columns.append(_BENT[name](seen[:, place]))
        columns.append(torch.ones_like(seen[:, 0]))
        return (torch.stack(columns, dim=1) @ self.weights).reshape(-1, *self.shape)
