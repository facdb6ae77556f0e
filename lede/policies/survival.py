"""The survival policy: thresholds on a calibrated probability of acceptance and on the survival of the draft."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lede.acceptance import AcceptanceModel
from lede.features import FeatureConfig
from lede.policies.base import ExitAt, LayerState, Policy, PolicyConfig, PreScan, PreScanState
from lede.policies.draft_survival import DraftSurvival, check_thresholds

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
    fixed_length: int | None = None
    """Tokens drafted there in every round, which are not asked about; None asks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_thresholds(self.thresholds, self.survival)
        if self.fixed_length is not None and (self.blind is None or not 1 <= self.fixed_length <= self.max_draft):
            raise ValueError(
                f"a fixed length must be within 1..max_draft = {self.max_draft} and needs a layer to draft blind at, "
                f"got {self.fixed_length} at {self.blind}"
            )


class SurvivalPolicy(Policy):
    """Exits where acceptance is likely enough, and drafts on while the whole draft is likely enough to survive.

    The survival of a draft is the product of the forecasts at its positions. Forecasts are logistic regressions on the
    observation (`lede.acceptance`), fitted on traces; the thresholds are searched on the simulator
    (`lede.reference_thresholds`). Made by `from_model` or loaded from a folder; without forecasts it refuses to run.

    It remembers the draft of the round that it decides in, so each text of a batch gets one of its own (`for_text`).
    """

    kind: ClassVar[str] = "survival"
    config_class: ClassVar[type[PolicyConfig]] = SurvivalConfig
    config: SurvivalConfig

    _held: DraftSurvival | None = None

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
        return self._survival.model

    @property
    def limits(self) -> npt.NDArray[np.float64]:
        """Least probability to exit with at each candidate, `(candidate,)`."""
        return self._survival.limits

    def check_model(self, model: EarlyExitModel) -> None:
        """Raise ValueError when a candidate is outside 1..L-1 or the policy has no forecasts."""
        super().check_model(model)
        _ = self._survival

    def for_text(self) -> Self:
        """One with a draft of its own."""
        other = copy(self)
        other._held = copy(self._held)
        return other

    def reset(self) -> None:
        """Forget the draft."""
        if self._held is not None:
            self._held.reset()

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt:
        """Scan, or draft blind where that is set, as many tokens as are set."""
        self.reset()
        if self.config.blind is None:
            return PreScan.SCAN
        self._survival.begin_blind(self.config.blind)
        return ExitAt(self.config.blind, self.config.fixed_length)

    def scan(self, state: LayerState) -> bool:
        """Exit when acceptance is at least as likely as the candidate's threshold."""
        return self._survival.exits(state.layer, state.observation)

    def draft(self, state: LayerState) -> bool:
        """Draft on while the draft would survive with at least the probability asked for."""
        return self._survival.goes_on(state.layer, state.observation)

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

    @property
    def _survival(self) -> DraftSurvival:
        if self._held is None:
            raise ValueError("this survival policy has no forecasts; load it from its folder or use from_model")
        return self._held

    def _take(self, model: AcceptanceModel) -> None:
        config = self.config
        held = DraftSurvival(model, config.candidates, config.thresholds, config.survival)
        if config.blind is not None and config.blind not in held.candidates:
            raise ValueError(f"blind drafts at layer {config.blind}, which is none of {list(held.candidates)}")
        self._held = held
