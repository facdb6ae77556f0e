"""The survival policy: thresholds on a calibrated probability of acceptance and on the survival of the draft."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lede.acceptance import DRAFTING, SCANNING, AcceptanceModel, log_sigmoid
from lede.features import FeatureConfig, parse_candidates
from lede.policies.base import ExitAt, LayerState, Policy, PolicyConfig, PreScan, PreScanState

if TYPE_CHECKING:
    from lede.models import EarlyExitModel

SURVIVAL_FEATURES = ("entropy", "surprisal", "margin", "drafted")
"""What the forecasts look at unless told otherwise: all of it told by the text, none by what was decided before."""


@dataclass(frozen=True)
class SurvivalConfig(PolicyConfig):
    """Settings of a survival policy."""

    features: FeatureConfig = field(default_factory=lambda: FeatureConfig(names=SURVIVAL_FEATURES))
    """The observation that the forecasts were fitted on."""
    thresholds: tuple[float, ...] = (0.8,)
    """Least probability of acceptance to exit with, one for all candidates or one for each; above 1 never exits."""
    survival: float = 0.6
    """Least probability that the draft is accepted up to and with the next token, to draft it."""
    blind: int | None = None
    """Layer to draft at in every round without a scan; None scans."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.thresholds or min(*self.thresholds, self.survival) < 0:
            raise ValueError(
                f"thresholds and survival must not be negative, and there is at least one threshold; got "
                f"{list(self.thresholds)} and {self.survival}"
            )


class SurvivalPolicy(Policy):
    """Exits where acceptance is likely enough, and drafts on while the whole draft is likely enough to survive.

    The survival of a draft is the product of the forecasts at its positions. Forecasts are logistic regressions on the
    observation (`lede.acceptance`), fitted on traces; the thresholds are searched on the simulator
    (`lede.reference_thresholds`). Made by `from_model` or loaded from a folder; without forecasts it refuses to run.

    It remembers the draft of the round that it decides in, so it decodes one text at a time.
    """

    kind: ClassVar[str] = "survival"
    config_class: ClassVar[type[PolicyConfig]] = SurvivalConfig
    config: SurvivalConfig

    _model: AcceptanceModel | None = None
    _places: dict[int, int] | None = None  # of layers among the candidates
    _so_far = 0.0  # logarithm of the survival
    _least = 0.0  # its limit

    @classmethod
    def from_model(
        cls,
        model: AcceptanceModel,
        config: SurvivalConfig | None = None,
        *,
        fingerprint: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Self:
        """A policy from fitted forecasts.

        Args:
            model: Forecasts, whose observation the policy takes over.
            config: Settings; `settings` are laid over them.
            fingerprint: Of the base model; binds the policy.
            **settings: Fields of `SurvivalConfig`; the candidates must be given here or there.

        Raises:
            ValueError: Candidates, thresholds and forecasts do not fit together.
        """
        policy = cls(config, **{**settings, "features": model.features})
        policy._take(model)
        policy.fingerprint = fingerprint
        return policy

    @property
    def features(self) -> FeatureConfig:
        """The observation of the forecasts."""
        return self.config.features

    @property
    def model(self) -> AcceptanceModel:
        """The forecasts.

        Raises:
            ValueError: The policy was made without them.
        """
        if self._model is None:
            raise ValueError("this survival policy has no forecasts; load it from its folder or use from_model")
        return self._model

    @property
    def limits(self) -> npt.NDArray[np.float64]:
        """Least probability to exit with at each candidate, `(candidate,)`."""
        return np.broadcast_to(np.asarray(self.config.thresholds, dtype=np.float64), self.model.blind.shape)

    def check_model(self, model: EarlyExitModel) -> None:
        """Raise ValueError when a candidate is outside 1..L-1 or the policy has no forecasts."""
        super().check_model(model)
        _ = self.model

    def reset(self) -> None:
        """Forget the draft."""
        self._so_far = 0.0

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt:
        """Scan, or draft blind where that is set."""
        self._so_far = 0.0
        if self.config.blind is None:
            return PreScan.SCAN
        self._so_far = log_sigmoid(float(self.model.blind[self._place(self.config.blind)]))
        return ExitAt(self.config.blind)

    def scan(self, state: LayerState) -> bool:
        """Exit when acceptance is at least as likely as the candidate's threshold."""
        place = self._place(state.layer)
        self._so_far = self.model.log_chance(state.observation, SCANNING, place)
        return self._so_far >= self._log_limits[place]

    def draft(self, state: LayerState) -> bool:
        """Draft on while the draft would survive with at least the probability asked for."""
        self._so_far += self.model.log_chance(state.observation, DRAFTING, self._place(state.layer))
        return self._so_far >= self._least

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """`weights` `(stage, candidate, input)` and `blind` `(candidate,)` of the forecasts."""
        return {"weights": self.model.weights, "blind": self.model.blind}

    def load_tensors(self, tensors: dict[str, npt.NDArray[Any]]) -> None:
        """Take the forecasts from named tensors.

        Raises:
            ValueError: A tensor is missing, unknown or of the wrong shape.
        """
        if sorted(tensors) != ["blind", "weights"]:
            raise ValueError(f"the tensors of a survival policy are blind and weights, got {sorted(tensors)}")
        self._take(AcceptanceModel(self.config.features, tensors["weights"], tensors["blind"]))

    def _place(self, layer: int) -> int:
        assert self._places is not None  # or `model` would have refused
        return self._places[layer]

    def _take(self, model: AcceptanceModel) -> None:
        candidates, n = self.config.candidates, model.blind.size
        if candidates is None or len(candidates) != n:
            given = "none are given" if candidates is None else f"they are {list(candidates)}"
            raise ValueError(f"the forecasts are for {n} candidates, but {given}")
        if len(self.config.thresholds) not in (1, n):
            raise ValueError(f"{len(self.config.thresholds)} thresholds for {n} candidates; give 1 or {n}")
        candidates = parse_candidates(candidates, candidates[-1] + 1)
        if self.config.blind is not None and self.config.blind not in candidates:
            raise ValueError(f"blind drafts at layer {self.config.blind}, which is none of {list(candidates)}")
        self._model = model
        self._places = {layer: place for place, layer in enumerate(candidates)}
        self._log_limits = [_log(float(limit)) for limit in self.limits]
        self._least = _log(self.config.survival)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
