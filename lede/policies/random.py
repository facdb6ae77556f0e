"""The random policy: every decision is a coin flip, so that every path through a round gets exercised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lede.lookup import LookupConfig
from lede.policies.base import (
    ExitAt,
    LayerState,
    Lookup,
    Plan,
    Policy,
    PolicyConfig,
    PreScan,
    PreScanState,
    SkipSublayers,
)
from lede.seeding import Purpose, numpy_stream

if TYPE_CHECKING:
    from lede.models import EarlyExitModel


@dataclass(frozen=True)
class RandomConfig(PolicyConfig):
    """Settings of a random policy."""

    seed: int = 0
    """Seed of its own random stream."""
    skip_probability: float = 0.1
    """Probability that a round is a plain pass."""
    blind_probability: float = 0.2
    """Probability that a round drafts at a random candidate without looking at it."""
    fixed_probability: float = 0.0
    """Probability that such a draft has a random length of up to 8 and is not asked about."""
    exit_probability: float = 0.5
    """Probability of an exit at each candidate of a scan."""
    draft_probability: float = 0.7
    """Probability of drafting one more token."""
    gap_probability: float = 0.0
    """Probability that a round drafts through the whole stack without a random set of sublayers."""
    lookup_probability: float = 0.0
    """Probability that a round copies up to 16 tokens from the text; half the time a random candidate prunes them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        for name in (
            "skip_probability",
            "blind_probability",
            "fixed_probability",
            "exit_probability",
            "draft_probability",
            "gap_probability",
            "lookup_probability",
        ):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be within 0..1, got {getattr(self, name)}")
        plans = ("skip_probability", "blind_probability", "gap_probability", "lookup_probability")
        if sum(getattr(self, name) for name in plans) > 1 + 1e-9:
            given = ", ".join(f"{name} {getattr(self, name)}" for name in plans)
            raise ValueError(f"{given} exclude each other and must not add up to more than 1")


class RandomPolicy(Policy):
    """Skips, scans, copies, drafts blind or with gaps, exits, drafts on at random; `reset` starts its stream over."""

    kind: ClassVar[str] = "random"
    config_class: ClassVar[type[PolicyConfig]] = RandomConfig
    config: RandomConfig

    def __init__(self, config: PolicyConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._layers = self.config.candidates
        self._n_layers: int | None = None
        self.reset()

    def check_model(self, model: EarlyExitModel) -> None:
        """Settle the layers to draw from on this model.

        Raises:
            ValueError: A candidate is outside 1..L-1, or a model without inner layers is to draft with gaps.
        """
        self._layers = self.candidates_for(model.n_layers)
        self.check_memory(model)
        if self.config.gap_probability > 0:
            if model.n_layers < 3:
                raise ValueError(f"gap_probability needs a model with at least 3 layers, got {model.n_layers}")
            model.check_sublayers()
        self._n_layers = model.n_layers

    @property
    def lookup(self) -> LookupConfig | None:
        """The defaults, if it copies at all."""
        return LookupConfig() if self.config.lookup_probability > 0 else None

    def reset(self) -> None:
        """Start the random stream over."""
        self._stream = numpy_stream(self.config.seed, Purpose.POLICY)

    def pre_scan(self, state: PreScanState) -> Plan:
        """Skip, draft blind at a random candidate or with random gaps, copy, or scan."""
        draw = self._stream.random()
        if draw < self.config.skip_probability:
            return PreScan.SKIP
        if draw >= 1 - self.config.gap_probability:
            return self._gaps()
        if draw >= 1 - self.config.gap_probability - self.config.lookup_probability:
            return self._copies()
        if draw >= self.config.skip_probability + self.config.blind_probability:
            return PreScan.SCAN
        layer = self._layer()
        fixed = self.config.fixed_probability > 0 and self._stream.random() < self.config.fixed_probability
        return ExitAt(layer, int(self._stream.integers(1, 9)) if fixed else None)

    def _layer(self) -> int:
        if self._layers is None:
            raise ValueError("this random policy takes its candidates from the model; call check_model(model) first")
        return int(self._layers[self._stream.integers(len(self._layers))])

    def _copies(self) -> Lookup:
        length = int(self._stream.integers(1, 17))
        return Lookup(length, self._layer() if self._stream.random() < 0.5 else None)

    def _gaps(self) -> SkipSublayers:
        """Each sublayer of the inner layers is left out with the same probability, which is itself drawn."""
        if self._n_layers is None:
            raise ValueError("this random policy takes its sublayers from the model; call check_model(model) first")
        share = self._stream.random()
        attention, mlp = (
            frozenset((2 + np.flatnonzero(row)).tolist())
            for row in self._stream.random((2, self._n_layers - 2)) < share
        )
        if not attention and not mlp:
            mlp = frozenset({int(self._stream.integers(2, self._n_layers))})
        return SkipSublayers(attention, mlp)

    def scan(self, state: LayerState) -> bool:
        """Exit with `exit_probability`."""
        return bool(self._stream.random() < self.config.exit_probability)

    def draft(self, state: LayerState) -> bool:
        """Draft on with `draft_probability`."""
        return bool(self._stream.random() < self.config.draft_probability)
