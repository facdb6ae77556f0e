"""The threshold policy: exit at the first candidate that is sure enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from lede.features import FeatureConfig, parse_candidates
from lede.policies.base import LayerState, Policy, PolicyConfig

if TYPE_CHECKING:
    from lede.models import EarlyExitModel

Measure = Literal["probability", "entropy"]

# a limit on the probability is one on its negative logarithm
_FEATURES = {
    "probability": FeatureConfig(names=("surprisal",)),
    "entropy": FeatureConfig(names=("entropy",)),
}


@dataclass(frozen=True)
class ThresholdConfig(PolicyConfig):
    """Settings of a threshold policy."""

    measure: Measure = "probability"
    """What is compared: "probability" of the likeliest token (sure means above), or "entropy" in nats (below)."""
    thresholds: float | tuple[float, ...] = 0.8
    """One threshold for every candidate, or one for each, in the order of the candidates."""
    draft_threshold: float | None = None
    """Threshold for drafting on; None for the one of the exit layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measure not in _FEATURES:
            raise ValueError(f"measure must be one of {', '.join(_FEATURES)}, got '{self.measure}'")
        given = self.thresholds if isinstance(self.thresholds, tuple) else (self.thresholds,)
        if not given:
            raise ValueError("thresholds must be one number or one for each candidate, got none")
        highest = 1.0 if self.measure == "probability" else math.inf
        for value in given if self.draft_threshold is None else (*given, self.draft_threshold):
            if not 0 <= value <= highest:
                raise ValueError(f"a threshold on {self.measure} must be within 0..{highest:g}, got {value}")


class ThresholdPolicy(Policy):
    """Exits at the first candidate whose measure passes its threshold, and drafts on while it still passes.

    A measure exactly at its threshold does not pass: probability 1 and entropy 0 never draft.

    Source: LITE (arXiv 2310.18581), token-level exit by a confidence threshold for each layer.
    Departs from the paper: there the exit's token is final; here it is a draft that all layers verify, and the same
    rule ends the draft. The thresholds of the paper are tuned per model; 0.8 is ours.
    """

    kind: ClassVar[str] = "threshold"
    config_class: ClassVar[type[PolicyConfig]] = ThresholdConfig
    config: ThresholdConfig

    _limits: dict[int, float] | None = None  # by layer, on the feature

    @property
    def features(self) -> FeatureConfig:
        """The one feature that is compared."""
        return _FEATURES[self.config.measure]

    def check_model(self, model: EarlyExitModel) -> None:
        """Settle the threshold of each candidate on this model.

        Raises:
            ValueError: A candidate is outside 1..L-1, or there is not one threshold for each candidate.
        """
        self._limits = self._settle(self.candidates_for(model.n_layers))

    def scan(self, state: LayerState) -> bool:
        """Exit when the measure passes the candidate's threshold."""
        return float(state.observation[0]) < self._limit(state.layer)

    def draft(self, state: LayerState) -> bool:
        """Draft on while the measure passes."""
        threshold = self.config.draft_threshold
        limit = self._limit(state.layer) if threshold is None else self._on_feature(threshold)
        return float(state.observation[0]) < limit

    def _limit(self, layer: int) -> float:
        thresholds = self.config.thresholds
        if not isinstance(thresholds, tuple) or len(thresholds) == 1:
            return self._on_feature(thresholds[0] if isinstance(thresholds, tuple) else thresholds)
        if self._limits is None:
            if self.config.candidates is None:
                raise ValueError("thresholds belong to candidates, which depend on the model; call check_model first")
            n_layers = self.config.candidates[-1] + 1  # the fewest that they fit
            self._limits = self._settle(parse_candidates(self.config.candidates, n_layers))
        if layer not in self._limits:
            raise ValueError(f"layer {layer} has no threshold; candidates are {sorted(self._limits)}")
        return self._limits[layer]

    def _settle(self, candidates: tuple[int, ...]) -> dict[int, float]:
        thresholds = self.config.thresholds
        each = thresholds if isinstance(thresholds, tuple) else (thresholds,)
        if len(each) == 1:
            each = each * len(candidates)
        if len(each) != len(candidates):
            raise ValueError(
                f"{len(each)} thresholds for {len(candidates)} candidates {list(candidates)}; give 1 or all"
            )
        return {layer: self._on_feature(value) for layer, value in zip(candidates, each, strict=True)}

    def _on_feature(self, threshold: float) -> float:
        """The upper limit of the feature that a threshold stands for."""
        if self.config.measure == "entropy":
            return threshold
        return -math.log(threshold) if threshold > 0 else math.inf
