"""The source-value policy: round by round the source whose draft is worth most, then thresholds in scan and draft."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from lede.acceptance import AcceptanceModel
from lede.copy_forecast import COPY_FEATURES, CopyForecast
from lede.features import FeatureConfig
from lede.forecast import FORECAST_INPUTS
from lede.lookup import LookupConfig
from lede.observation_parts import before_round, of_copies, of_layers
from lede.plan_values import PlanValues
from lede.policies.base import ExitAt, LayerState, Lookup, Policy, PolicyConfig, PreScan, PreScanState
from lede.policies.draft_survival import DraftSurvival, check_thresholds
from lede.policies.plan_numbers import numbered_plans

if TYPE_CHECKING:
    from lede.models import EarlyExitModel
    from lede.phrases import PhraseMemory

SOURCE_FEATURES = (
    *FORECAST_INPUTS,
    *COPY_FEATURES,
    "acceptance",
    "since_draft",
    "lookup_acceptance",
    "since_lookup",
)
"""What it looks at unless told otherwise: of layers what the forecasts weigh, before a round all that is known."""


def source_features(memory: bool) -> tuple[str, ...]:
    """The same, and where there is a memory of other texts, whether the match is in it."""
    return (*SOURCE_FEATURES, "match_remembered") if memory else SOURCE_FEATURES


_TENSORS = ("blind", "copies", "values", "weights")


@dataclass(frozen=True)
class SourceValueConfig(PolicyConfig):
    """Settings of a source-value policy."""

    features: FeatureConfig = field(default_factory=lambda: FeatureConfig(names=SOURCE_FEATURES))
    """The observation that forecasts and values were fitted on."""
    lookup: LookupConfig = field(default_factory=LookupConfig)
    """How the text is searched."""
    lookups: tuple[Lookup, ...] = (Lookup(2), Lookup(4), Lookup(8), Lookup(16))
    """Drafts from the text to choose from."""
    thresholds: tuple[float, ...] = (0.8,)
    """Least probability of acceptance to exit with in the scan, one for all candidates or one for each; above 1 never
    exits."""
    survival: float = 0.6
    """Least probability that the draft is accepted up to and with the next token, to draft it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lookups or len(set(self.lookups)) != len(self.lookups):
            raise ValueError(f"lookups must be distinct, and at least one, got {list(self.lookups)}")
        check_thresholds(self.thresholds, self.survival)


class _Models(NamedTuple):
    """What was fitted, and where observations hold what it looks at."""

    survival: DraftSurvival
    values: PlanValues
    layer_places: list[int]
    pre_scan_places: list[int]
    plans: tuple[PreScan | ExitAt | Lookup, ...]


class SourceValuePolicy(Policy):
    """Before a round it takes the plan that saves most time: none, a scan, a draft at a layer, or one from the text.

    What plans save is forecast from what is known before the round (`lede.plan_values`). In the scan it exits where
    acceptance is likely enough, and drafts on while the whole draft is likely enough to survive, as the survival policy
    does. All of it is fitted on traces (`lede.reference_sources`). Made by `from_models` or loaded from a folder;
    without its models it refuses to run.

    It remembers the draft of the round that it decides in, so each text of a batch gets one of its own (`for_text`).
    """

    kind: ClassVar[str] = "source-value"
    config_class: ClassVar[type[PolicyConfig]] = SourceValueConfig
    config: SourceValueConfig

    _held: _Models | None = None

    @classmethod
    def from_models(
        cls,
        acceptance: AcceptanceModel,
        values: PlanValues,
        config: SourceValueConfig | None = None,
        *,
        fingerprint: dict[str, Any] | None = None,
        memory: PhraseMemory | None = None,
        **settings: Any,
    ) -> Self:
        """A policy from fitted models.

        Args:
            acceptance: Forecasts of acceptance at each candidate.
            values: What plans save.
            config: Settings; `settings` are laid over them.
            fingerprint: Of the base model; binds the policy.
            memory: Of other texts, that the models were fitted with.
            **settings: Fields of `SourceValueConfig`; the candidates must be given here or there.

        Raises:
            ValueError: Features, candidates, lookups, thresholds and models do not fit together.
        """
        policy = cls(config, **settings)
        policy._take(acceptance, values)
        policy.fingerprint = fingerprint
        policy.memory = memory
        return policy

    @property
    def features(self) -> FeatureConfig:
        """The observation of all models."""
        return self.config.features

    @property
    def decides_pre_scan(self) -> bool:
        """It does."""
        return True

    @property
    def lookup(self) -> LookupConfig:
        """How the text is searched."""
        return self.config.lookup

    @property
    def acceptance(self) -> AcceptanceModel:
        """The forecasts of acceptance.

        Raises:
            ValueError: The policy was made without them.
        """
        return self._models.survival.model

    @property
    def copies(self) -> CopyForecast:
        """The forecast of copied tokens."""
        return self._models.values.copies

    @property
    def limits(self) -> npt.NDArray[np.float64]:
        """Least probability to exit with at each candidate, `(candidate,)`."""
        return self._models.survival.limits

    @property
    def layer_places(self) -> list[int]:
        """Places in the observation of what the forecasts of acceptance look at."""
        return self._models.layer_places

    def check_model(self, model: EarlyExitModel) -> None:
        """Raise ValueError when a layer that drafts or prunes is outside 1..L-1, or the policy has no models."""
        super().check_model(model)
        for plan in self.config.lookups:
            plan.check(model.n_layers)
        _ = self._models

    def for_text(self) -> Self:
        """One with a draft of its own."""
        other, held = copy(self), self._held
        other._held = None if held is None else held._replace(survival=copy(held.survival))
        return other

    def reset(self) -> None:
        """Forget the draft."""
        if self._held is not None:
            self._held.survival.reset()

    def values(self, observations: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """What each action of the pre-scan saves against a plain pass, in tokens' worth of time, `(n, action)`."""
        models = self._models
        return models.values(observations[:, models.pre_scan_places], len(self.config.lookups))

    def decide(self, observations: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Actions of the pre-scan, `(n,)`: 0 skips, 1 scans, 2 + k drafts at candidate k, 2 + K + j copies."""
        return np.asarray(self.values(observations).argmax(axis=1), dtype=np.int64)

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt | Lookup:
        """The plan that saves most; of equals, the first."""
        models = self._models
        models.survival.reset()
        plan = models.plans[int(self.decide(state.observation[None])[0])]
        if isinstance(plan, ExitAt):
            models.survival.begin_blind(plan.exit_layer)
        return plan

    def scan(self, state: LayerState) -> bool:
        """Exit when acceptance is at least as likely as the candidate's threshold."""
        models = self._models
        return models.survival.exits(state.layer, state.observation[models.layer_places])

    def draft(self, state: LayerState) -> bool:
        """Draft on while the draft would survive with at least the probability asked for."""
        models = self._models
        return models.survival.goes_on(state.layer, state.observation[models.layer_places])

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """`weights` `(stage, candidate, input)` and `blind` `(candidate,)`, `copies` `(group, input)`, `values`."""
        acceptance, values = self.acceptance, self._models.values
        return {
            "weights": acceptance.weights,
            "blind": acceptance.blind,
            "copies": values.copies.weights,
            "values": values.weights,
        }

    def load_tensors(self, tensors: dict[str, npt.NDArray[Any]]) -> None:
        """Take the models from named tensors.

        Raises:
            ValueError: A tensor is missing, unknown or of the wrong shape.
        """
        if sorted(tensors) != sorted(_TENSORS):
            raise ValueError(f"the tensors of a source-value policy are {', '.join(_TENSORS)}, got {sorted(tensors)}")
        before = before_round(self.config.features)
        copies = CopyForecast(of_copies(before), tensors["copies"])
        acceptance = AcceptanceModel(of_layers(self.config.features), tensors["weights"], tensors["blind"])
        self._take(acceptance, PlanValues(before, copies, tensors["values"]))

    @property
    def _models(self) -> _Models:
        if self._held is None:
            raise ValueError("this source-value policy has no models; load it from its folder or use from_models")
        return self._held

    def _take(self, acceptance: AcceptanceModel, values: PlanValues) -> None:
        config, n = self.config, acceptance.blind.size
        survival = DraftSurvival(acceptance, config.candidates, config.thresholds, config.survival)
        plans = 1 + n + len(config.lookups)
        if len(values.weights) != plans:
            raise ValueError(
                f"there are {plans} plans beside the plain pass (a scan, {n} layers, {len(config.lookups)} lookups), "
                f"and values of {len(values.weights)}"
            )
        wanted = (of_layers(config.features), before_round(config.features), of_copies(config.features))
        if (acceptance.features, values.features, values.copies.features) != wanted:
            raise ValueError(f"the models were fitted on other features than {list(config.features.names)}")
        names = config.features.names
        self._held = _Models(
            survival,
            values,
            layer_places=[names.index(name) for name in acceptance.features.names],
            pre_scan_places=[names.index(name) for name in values.features.names],
            plans=numbered_plans(survival.candidates, config.lookups),
        )
