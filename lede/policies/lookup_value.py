"""The lookup-value policy: as many tokens copied from the text as are worth their verification."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lede.copy_forecast import COPY_FEATURES, CopyForecast
from lede.features import FeatureConfig
from lede.lookup import LookupConfig
from lede.policies.base import BLIND, LayerState, Lookup, Policy, PolicyConfig, PreScan, PreScanState
from lede.rewards import CONTINUE

if TYPE_CHECKING:
    from lede.models import EarlyExitModel
    from lede.phrases import PhraseMemory


@dataclass(frozen=True)
class LookupValueConfig(PolicyConfig):
    """Settings of a lookup-value policy; `candidates` and `max_draft` have nothing to act on."""

    features: FeatureConfig = field(default_factory=lambda: FeatureConfig(names=COPY_FEATURES))
    """The observation that the forecast was fitted on."""
    lookup: LookupConfig = field(default_factory=LookupConfig)
    """How the text is searched."""
    lookups: tuple[Lookup, ...] = (Lookup(2), Lookup(4), Lookup(8), Lookup(16))
    """Drafts that are chosen from, none of them pruned."""
    prices: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    """What verifying each of them costs more than a plain pass, in tokens that could be decoded meanwhile."""

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = [plan.length for plan in self.lookups]
        if not lengths or lengths != sorted(set(lengths)) or any(plan.prune_at for plan in self.lookups):
            raise ValueError(f"lookups must be unpruned, of ascending lengths, got {list(self.lookups)}")
        if len(self.prices) != len(self.lookups):
            raise ValueError(f"{len(self.lookups)} lookups have a price each, got {list(self.prices)}")


class LookupValuePolicy(Policy):
    """Copies the draft with the most expected tokens less its price; none where no draft is worth its price.

    Expected tokens are sums of survivals by a calibrated forecast (`lede.copy_forecast`), fitted on traces; the prices
    follow from a cost profile (`lede.reference_lookups`). Made by `from_forecast` or loaded from a folder; without a
    forecast it refuses to run. No head is ever read to decide.
    """

    kind: ClassVar[str] = "lookup-value"
    config_class: ClassVar[type[PolicyConfig]] = LookupValueConfig
    config: LookupValueConfig

    _forecast: CopyForecast | None = None

    @classmethod
    def from_forecast(
        cls,
        forecast: CopyForecast,
        config: LookupValueConfig | None = None,
        *,
        fingerprint: dict[str, Any] | None = None,
        memory: PhraseMemory | None = None,
        **settings: Any,
    ) -> Self:
        """A policy from a fitted forecast.

        Args:
            forecast: The forecast, whose observation the policy takes over.
            config: Settings; `settings` are laid over them.
            fingerprint: Of the base model; binds the policy.
            memory: Of other texts, that the forecast was fitted with.
            **settings: Fields of `LookupValueConfig`.
        """
        policy = cls(config, **{**settings, "features": forecast.features})
        policy._forecast = forecast
        policy.fingerprint = fingerprint
        policy.memory = memory
        return policy

    @property
    def features(self) -> FeatureConfig:
        """The observation of the forecast."""
        return self.config.features

    @property
    def decides_pre_scan(self) -> bool:
        """It decides nothing else."""
        return True

    @property
    def lookup(self) -> LookupConfig:
        """How the text is searched."""
        return self.config.lookup

    @property
    def forecast(self) -> CopyForecast:
        """The forecast.

        Raises:
            ValueError: The policy was made without it.
        """
        if self._forecast is None:
            raise ValueError("this lookup-value policy has no forecast; load it from its folder or use from_forecast")
        return self._forecast

    def candidates_for(self, n_layers: int) -> tuple[int, ...]:
        """No layer drafts."""
        return ()

    def check_model(self, model: EarlyExitModel) -> None:
        """Raise ValueError when the policy has no forecast, or remembers in token ids that are not the model's."""
        _ = self.forecast
        self.check_memory(model)

    def values(self, observations: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Expected tokens beyond the one of a plain pass less its price, of no draft and each draft, `(n, 1 + J)`."""
        lengths = [plan.length for plan in self.config.lookups]
        gained = self.forecast.expected(observations, lengths) - np.asarray(self.config.prices)
        return np.concatenate((np.zeros((len(gained), 1)), gained), axis=1)

    def decide(self, observations: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Actions of the pre-scan without candidates, `(n,)`: 0 skips, 2 + j drafts by lookup j."""
        best = self.values(observations).argmax(axis=1)
        return np.where(best == 0, CONTINUE, BLIND + best - 1).astype(np.int64)

    def pre_scan(self, state: PreScanState) -> PreScan | Lookup:
        """The draft that is worth most, or none."""
        best = int(self.values(state.observation[None])[0].argmax())
        return self.config.lookups[best - 1] if best else PreScan.SKIP

    def scan(self, state: LayerState) -> bool:
        """Never exit; asked only where a caller scans in spite of `pre_scan`."""
        return False

    def draft(self, state: LayerState) -> bool:
        """No further token; copies are drafted as a whole, unasked."""
        return False

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """`weights` `(group, input)` of the forecast."""
        return {"weights": self.forecast.weights}

    def load_tensors(self, tensors: dict[str, npt.NDArray[Any]]) -> None:
        """Take the forecast from named tensors.

        Raises:
            ValueError: A tensor is missing, unknown or of the wrong shape.
        """
        if sorted(tensors) != ["weights"]:
            raise ValueError(f"the only tensor of a lookup-value policy is weights, got {sorted(tensors)}")
        self._forecast = CopyForecast(self.config.features, tensors["weights"])
