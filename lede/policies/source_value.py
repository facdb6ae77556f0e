"""The source-value policy: round by round the source whose draft is worth most, then thresholds in scan and draft."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lede.acceptance import DRAFTING, SCANNING, AcceptanceModel, log_sigmoid
from lede.copy_forecast import COPY_FEATURES, CopyForecast
from lede.features import FeatureConfig, parse_candidates
from lede.forecast import FORECAST_INPUTS
from lede.lookup import LookupConfig
from lede.observation_parts import before_round, of_copies, of_layers
from lede.plan_values import PlanValues
from lede.policies.base import BLIND, ExitAt, LayerState, Lookup, Policy, PolicyConfig, PreScan, PreScanState
from lede.rewards import EXIT

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
        if not self.thresholds or min(*self.thresholds, self.survival) < 0:
            raise ValueError(
                f"thresholds and survival must not be negative, and there is at least one threshold; got "
                f"{list(self.thresholds)} and {self.survival}"
            )


class SourceValuePolicy(Policy):
    """Before a round it takes the plan that saves most time: none, a scan, a draft at a layer, or one from the text.

    What plans save is forecast from what is known before the round (`lede.plan_values`). In the scan it exits where
    acceptance is likely enough, and drafts on while the whole draft is likely enough to survive, as the survival policy
    does. All of it is fitted on traces (`lede.reference_sources`). Made by `from_models` or loaded from a folder;
    without its models it refuses to run.

    It remembers the draft of the round that it decides in, so it decodes one text at a time.
    """

    kind: ClassVar[str] = "source-value"
    config_class: ClassVar[type[PolicyConfig]] = SourceValueConfig
    config: SourceValueConfig

    _acceptance: AcceptanceModel | None = None
    _values: PlanValues | None = None
    _so_far = 0.0  # logarithm of the survival
    _least = 0.0  # its limit
    _layer_places: list[int]
    _pre_scan_places: list[int]

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
        if self._acceptance is None:
            raise ValueError("this source-value policy has no models; load it from its folder or use from_models")
        return self._acceptance

    @property
    def copies(self) -> CopyForecast:
        """The forecast of copied tokens."""
        _ = self.acceptance
        assert self._values is not None  # taken together with the forecasts of acceptance
        return self._values.copies

    @property
    def limits(self) -> npt.NDArray[np.float64]:
        """Least probability to exit with at each candidate, `(candidate,)`."""
        return np.broadcast_to(np.asarray(self.config.thresholds, dtype=np.float64), self.acceptance.blind.shape)

    @property
    def layer_places(self) -> list[int]:
        """Places in the observation of what the forecasts of acceptance look at."""
        return self._layer_places

    def check_model(self, model: EarlyExitModel) -> None:
        """Raise ValueError when a layer that drafts or prunes is outside 1..L-1, or the policy has no models."""
        super().check_model(model)
        for plan in self.config.lookups:
            plan.check(model.n_layers)
        _ = self.acceptance

    def reset(self) -> None:
        """Forget the draft."""
        self._so_far = 0.0

    def values(self, observations: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """What each action of the pre-scan saves against a plain pass, in tokens' worth of time, `(n, action)`."""
        _ = self.acceptance
        assert self._values is not None  # taken together with the forecasts
        return self._values(observations[:, self._pre_scan_places], len(self.config.lookups))

    def decide(self, observations: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Actions of the pre-scan, `(n,)`: 0 skips, 1 scans, 2 + k drafts at candidate k, 2 + K + j copies."""
        return np.asarray(self.values(observations).argmax(axis=1), dtype=np.int64)

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt | Lookup:
        """The plan that saves most; of equals, the first."""
        self._so_far = 0.0
        action = int(self.decide(state.observation[None])[0])
        if action < BLIND:
            return PreScan.SCAN if action == EXIT else PreScan.SKIP
        candidates = self.config.candidates
        assert candidates is not None  # or the models would have been refused
        if action < BLIND + len(candidates):
            self._so_far = log_sigmoid(float(self.acceptance.blind[action - BLIND]))
            return ExitAt(candidates[action - BLIND])
        return self.config.lookups[action - BLIND - len(candidates)]

    def scan(self, state: LayerState) -> bool:
        """Exit when acceptance is at least as likely as the candidate's threshold."""
        place = self._layers[state.layer]
        self._so_far = self.acceptance.log_chance(state.observation[self._layer_places], SCANNING, place)
        return self._so_far >= self._log_limits[place]

    def draft(self, state: LayerState) -> bool:
        """Draft on while the draft would survive with at least the probability asked for."""
        seen = state.observation[self._layer_places]
        self._so_far += self.acceptance.log_chance(seen, DRAFTING, self._layers[state.layer])
        return self._so_far >= self._least

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """`weights` `(stage, candidate, input)` and `blind` `(candidate,)`, `copies` `(group, input)`, `values`."""
        acceptance = self.acceptance
        assert self._values is not None
        return {
            "weights": acceptance.weights,
            "blind": acceptance.blind,
            "copies": self._values.copies.weights,
            "values": self._values.weights,
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

    def _take(self, acceptance: AcceptanceModel, values: PlanValues) -> None:
        config, n = self.config, acceptance.blind.size
        if config.candidates is None or len(config.candidates) != n:
            given = "none are given" if config.candidates is None else f"they are {list(config.candidates)}"
            raise ValueError(f"the forecasts are for {n} candidates, but {given}")
        if len(config.thresholds) not in (1, n):
            raise ValueError(f"{len(config.thresholds)} thresholds for {n} candidates; give 1 or {n}")
        plans = 1 + n + len(config.lookups)
        if len(values.weights) != plans:
            raise ValueError(
                f"there are {plans} plans beside the plain pass (a scan, {n} layers, {len(config.lookups)} lookups), "
                f"and values of {len(values.weights)}"
            )
        wanted = (of_layers(config.features), before_round(config.features), of_copies(config.features))
        if (acceptance.features, values.features, values.copies.features) != wanted:
            raise ValueError(f"the models were fitted on other features than {list(config.features.names)}")
        candidates = parse_candidates(config.candidates, config.candidates[-1] + 1)
        self._acceptance, self._values = acceptance, values
        self._layers = {layer: place for place, layer in enumerate(candidates)}
        names = config.features.names
        self._layer_places = [names.index(name) for name in acceptance.features.names]
        self._pre_scan_places = [names.index(name) for name in values.features.names]
        self._log_limits = [_log(float(limit)) for limit in self.limits]
        self._least = _log(config.survival)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
