"""A probe without a model: it answers what a test tells it to, and writes down every question."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from lede.policies import LayerSkippingPolicy, PreScan, PreScanState, RoundReport, SkipSublayers

BEFORE = PreScanState(0.0, None, 0, remaining=50, n_tokens=60)


class FakeProbe:
    """Stands in for `lede.text_probe.TextProbe`.

    Args:
        confidence: The answer to `sublayer_confidence`, `(layer, 2)`; a list gives one for each question.
        matchness: The answer to `matchness`, given the plan.
        n_new: New tokens of the text.
    """

    n_prompt = 10

    def __init__(
        self,
        confidence: Any = None,
        matchness: Callable[[SkipSublayers], float] = lambda plan: 0.0,
        n_new: int = 1000,
    ) -> None:
        self.n_new = n_new
        self.calls: list[tuple[Any, ...]] = []
        self._confidence = confidence
        self._matchness = matchness

    def sublayer_confidence(self, n_tokens: int, measure: str, probe_tokens: int | None = None) -> np.ndarray:
        self.calls.append((n_tokens, measure, probe_tokens))
        answer = self._confidence.pop(0) if isinstance(self._confidence, list) else self._confidence
        return np.asarray(answer, dtype=np.float32)

    def matchness(self, plan: SkipSublayers, first: int, n_tokens: int) -> float:
        self.calls.append((plan, first, n_tokens))
        return self._matchness(plan)


def model_of(n_layers: int) -> Any:
    """As much of a model as `check_model` looks at."""
    return SimpleNamespace(n_layers=n_layers, check_sublayers=lambda: None)


def plan_now(policy: LayerSkippingPolicy) -> SkipSublayers | None:
    """What the policy would draft with; None when it would not."""
    choice = policy.pre_scan(BEFORE)
    assert choice is PreScan.SKIP or isinstance(choice, SkipSublayers)
    return choice if isinstance(choice, SkipSublayers) else None


def searching(policy: LayerSkippingPolicy) -> bool:
    """Whether it searches now; a call, since mypy takes a property to stay what an assertion found."""
    return policy.searches


def play(policy: LayerSkippingPolicy, probe: FakeProbe, accepted: int, drafted: int = 5, rounds: int = 1) -> None:
    """Rounds as the decoder plays them: the plan, the report, then the probe while the policy searches."""
    for _ in range(rounds):
        plan = plan_now(policy)
        a, d = (accepted, drafted) if plan is not None else (0, 0)
        policy.verified(RoundReport(plan, d, a, capped=False, shadow=None))
        if policy.searches:
            policy.between_rounds(probe)  # type: ignore[arg-type]  # a stand-in for one


def both(*layers: int) -> SkipSublayers:
    """Whole layers."""
    return SkipSublayers(frozenset(layers), frozenset(layers))
