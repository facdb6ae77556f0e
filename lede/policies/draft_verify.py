"""The draft-and-verify policy: one fixed draft, and a stop threshold that is steered to a rate of acceptance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lede.features import FeatureConfig
from lede.policies.base import (
    ExitAt,
    LayerState,
    Policy,
    PolicyConfig,
    PreScan,
    PreScanState,
    RoundReport,
    SkipSublayers,
)

if TYPE_CHECKING:
    from lede.models import EarlyExitModel

_FEATURES = FeatureConfig(names=("surprisal",))  # a limit on the probability is one on its negative logarithm


@dataclass(frozen=True)
class DraftVerifyConfig(PolicyConfig):
    """Settings of a draft-and-verify policy."""

    exit_layer: int | None = None
    """Layers that a drafted token goes through; None for a quarter of the model's layers."""
    attention: tuple[int, ...] = ()
    """Layers whose attention the draft leaves out; with these or `mlp` the whole stack drafts but for what is left out,
    and there is no exit layer."""
    mlp: tuple[int, ...] = ()
    """Layers whose MLP the draft leaves out."""
    threshold: float = 0.6
    """Probability of the likeliest token, below which a draft ends, as long as nothing has been learned."""
    target: float = 0.9
    """Acceptance rate that the threshold is steered to."""
    acceptance_weight: float = 0.5
    """Weight of the past in the moving average of the acceptance (beta1)."""
    threshold_weight: float = 0.9
    """Weight of the past in the threshold (beta2)."""
    step: float = 0.01
    """What the threshold moves by before it is smoothed (epsilon); 0 holds it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit_layer is not None and self.exit_layer < 1:
            raise ValueError(f"exit_layer must be at least 1, got {self.exit_layer}")
        if self.exit_layer is not None and (self.attention or self.mlp):
            raise ValueError("a draft that leaves out attention or mlp has no exit layer; give one or the other")
        for name in ("threshold", "target", "acceptance_weight", "threshold_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be within 0..1, got {getattr(self, name)}")
        if not 0 <= self.step <= 1:
            raise ValueError(f"step must be within 0..1, got {self.step}")


class DraftVerifyPolicy(Policy):
    """Drafts with one fixed plan while the likeliest token is likely enough; each round moves what is enough.

    After a round that drafted, with a the share of its tokens that were accepted:

        acceptance <- beta1 acceptance + (1 - beta1) a
        wanted = threshold + epsilon where acceptance < target, else threshold - epsilon
        threshold <- beta2 threshold + (1 - beta2) wanted

    A round whose draft was as long as it could be does not lower the threshold: it would not have been longer. What
    bounds it is `max_draft`, the budget, or a token that ends the text.

    Source: Draft & Verify (arXiv 2309.08168), the adaptive draft-exiting mechanism; target, weights, epsilon, the
    average that starts from 0, and the exception for the longest drafts are those of the authors' code; the threshold
    of 0.6 is that of their scripts. Their drafts have at most 8 tokens, here `max_draft`.
    Departs from the paper: there, sublayers found by a Bayesian search before deployment are left out of the draft.
    Here a quarter of the layers drafts, or the sublayers that the settings name are left out; there is no search. In a
    draft from an exit layer the first token that is not likely enough is not drafted: its position is at the exit layer
    already, so it joins verification and yields the token after the draft. The moving average goes on from one text to
    the next, where the paper's starts again; `reset` starts both again. The threshold is held within 0..1, which is
    ours. Where drafts are sampled, the probability of the likeliest token decides, not that of the token that was
    drawn: a stop that depends on the draw changes the law of the text.
    """

    kind: ClassVar[str] = "draft-verify"
    config_class: ClassVar[type[PolicyConfig]] = DraftVerifyConfig
    config: DraftVerifyConfig

    _threshold: float
    _acceptance: float
    _limit: float  # the threshold on the feature

    def __init__(self, config: PolicyConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        given = self.config
        self._plan: ExitAt | SkipSublayers | None = None
        if given.attention or given.mlp:
            self._plan = SkipSublayers(frozenset(given.attention), frozenset(given.mlp))
        elif given.exit_layer is not None:
            self._plan = ExitAt(given.exit_layer)
        self.reset()

    @property
    def features(self) -> FeatureConfig:
        """The one feature that is compared."""
        return _FEATURES

    @property
    def threshold(self) -> float:
        """Probability of the likeliest token, below which a draft ends now."""
        return self._threshold

    @property
    def acceptance(self) -> float:
        """The moving average of the acceptance."""
        return self._acceptance

    def candidates_for(self, n_layers: int) -> tuple[int, ...]:
        """The exit layer alone; the candidates where the draft has none.

        Raises:
            ValueError: A candidate is outside 1..L-1.
        """
        candidates = super().candidates_for(n_layers)
        return candidates if isinstance(self._plan, SkipSublayers) else (self._exit_layer(n_layers),)

    def check_model(self, model: EarlyExitModel) -> None:
        """Settle the plan on this model.

        Raises:
            ValueError: The exit layer or a layer that the draft leaves out is none that the model can do without, or
                its layers can't be run in part.
        """
        super().check_model(model)
        if isinstance(self._plan, SkipSublayers):
            self._plan.check(model.n_layers)
            model.check_sublayers()
        else:
            layer = self._exit_layer(model.n_layers)
            model.check_exit_layer(layer)
            self._plan = ExitAt(layer)

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt | SkipSublayers:
        """Draft by the plan."""
        if self._plan is None:
            raise ValueError(
                "this draft-verify policy takes its exit layer from the model; call check_model(model) first"
            )
        return self._plan

    def scan(self, state: LayerState) -> bool:
        """Exit at the exit layer; asked only where a caller scans in spite of `pre_scan`."""
        return isinstance(self._plan, ExitAt) and state.layer == self._plan.exit_layer

    def draft(self, state: LayerState) -> bool:
        """Draft on while the likeliest token is at least as likely as the threshold."""
        return float(state.observation[0]) <= self._limit

    def verified(self, report: RoundReport) -> None:
        """Move the threshold by what verification said."""
        if not report.drafted:
            return
        config = self.config
        share, weight = report.accepted / report.drafted, config.acceptance_weight
        self._acceptance = weight * self._acceptance + (1 - weight) * share
        if self._acceptance < config.target:
            wanted = self._threshold + config.step
        elif not report.capped:
            wanted = self._threshold - config.step
        else:
            wanted = self._threshold
        moved = config.threshold_weight * self._threshold + (1 - config.threshold_weight) * wanted
        self._set(min(max(moved, 0.0), 1.0))

    def state(self) -> dict[str, Any]:
        """The threshold and the moving average."""
        return {"threshold": self._threshold, "acceptance": self._acceptance}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a threshold and a moving average.

        Raises:
            ValueError: They are not what `state` gave.
        """
        if sorted(state) != ["acceptance", "threshold"]:
            raise ValueError(f"the state of a draft-verify policy is threshold and acceptance, got {sorted(state)}")
        for name, value in state.items():
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ValueError(f"{name} in the state of a draft-verify policy must be within 0..1, got {value!r}")
        self._acceptance = float(state["acceptance"])
        self._set(float(state["threshold"]))

    def reset(self) -> None:
        """Back to the threshold of the settings."""
        self._acceptance = 0.0
        self._set(self.config.threshold)

    def _exit_layer(self, n_layers: int) -> int:
        given = self.config.exit_layer
        return given if given is not None else max(1, n_layers // 4)

    def _set(self, threshold: float) -> None:
        self._threshold = threshold
        self._limit = -math.log(threshold) if threshold > 0 else math.inf
