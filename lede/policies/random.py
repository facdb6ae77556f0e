"""The random policy: every decision is a coin flip, so that every path through a round gets exercised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lede.policies.base import ExitAt, LayerState, Policy, PolicyConfig, PreScan, PreScanState
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
    exit_probability: float = 0.5
    """Probability of an exit at each candidate of a scan."""
    draft_probability: float = 0.7
    """Probability of drafting one more token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        for name in ("skip_probability", "blind_probability", "exit_probability", "draft_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be within 0..1, got {getattr(self, name)}")
        if self.skip_probability + self.blind_probability > 1:
            raise ValueError(
                f"skip_probability {self.skip_probability} and blind_probability {self.blind_probability} exclude each "
                "other and must not add up to more than 1"
            )


class RandomPolicy(Policy):
    """Skips, scans, drafts blind, exits and drafts on at random; `reset` starts its stream over."""

    kind: ClassVar[str] = "random"
    config_class: ClassVar[type[PolicyConfig]] = RandomConfig
    config: RandomConfig

    def __init__(self, config: PolicyConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._layers = self.config.candidates
        self.reset()

    def check_model(self, model: EarlyExitModel) -> None:
        """Settle the layers to draw from on this model.

        Raises:
            ValueError: A candidate is outside 1..L-1.
        """
        self._layers = self.candidates_for(model.n_layers)

    def reset(self) -> None:
        """Start the random stream over."""
        self._stream = numpy_stream(self.config.seed, Purpose.POLICY)

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt:
        """Skip, draft blind at a random candidate, or scan."""
        draw = self._stream.random()
        if draw < self.config.skip_probability:
            return PreScan.SKIP
        if draw >= self.config.skip_probability + self.config.blind_probability:
            return PreScan.SCAN
        if self._layers is None:
            raise ValueError("this random policy takes its candidates from the model; call check_model(model) first")
        return ExitAt(self._layers[self._stream.integers(len(self._layers))])

    def scan(self, state: LayerState) -> bool:
        """Exit with `exit_probability`."""
        return bool(self._stream.random() < self.config.exit_probability)

    def draft(self, state: LayerState) -> bool:
        """Draft on with `draft_probability`."""
        return bool(self._stream.random() < self.config.draft_probability)
