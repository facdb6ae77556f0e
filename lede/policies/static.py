"""The static policy: every round drafts the same number of tokens at the same layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lede.policies.base import ExitAt, LayerState, Policy, PolicyConfig, PreScan, PreScanState

if TYPE_CHECKING:
    from lede.models import EarlyExitModel


@dataclass(frozen=True)
class StaticConfig(PolicyConfig):
    """Settings of a static policy."""

    exit_layer: int | None = None
    """Layers that a drafted token goes through; None for a quarter of the model's layers."""
    draft_length: int = 4
    """Tokens drafted in a round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit_layer is not None and self.exit_layer < 1:
            raise ValueError(f"exit_layer must be at least 1, got {self.exit_layer}")
        if not 1 <= self.draft_length <= self.max_draft:
            raise ValueError(f"draft_length must be within 1..max_draft = {self.max_draft}, got {self.draft_length}")


class StaticPolicy(Policy):
    """Drafts `draft_length` tokens at `exit_layer` in every round, without looking at anything.

    Source: LayerSkip (arXiv 2404.16710), self-speculative decoding. The defaults are ours; the README example of the
    paper's code, 8 of 32 layers, is a quarter as well.
    """

    kind: ClassVar[str] = "static"
    config_class: ClassVar[type[PolicyConfig]] = StaticConfig
    config: StaticConfig

    _plan: ExitAt | None = None

    def check_model(self, model: EarlyExitModel) -> None:
        """Settle the exit layer on this model.

        Raises:
            ValueError: The exit layer is outside 1..L-1.
        """
        super().check_model(model)
        layer = self.config.exit_layer if self.config.exit_layer is not None else max(1, model.n_layers // 4)
        model.check_exit_layer(layer)
        self._plan = ExitAt(layer)

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt:
        """Draft blind at the exit layer."""
        if self._plan is None:
            if self.config.exit_layer is None:
                raise ValueError(
                    "this static policy takes its exit layer from the model; call check_model(model) first"
                )
            self._plan = ExitAt(self.config.exit_layer)
        return self._plan

    def scan(self, state: LayerState) -> bool:
        """Exit at the exit layer; asked only where a caller scans in spite of `pre_scan`."""
        plan = self._plan.exit_layer if self._plan is not None else self.config.exit_layer
        return state.layer == plan

    def draft(self, state: LayerState) -> bool:
        """Draft on until `draft_length` tokens are drafted."""
        return state.n_drafted < self.config.draft_length
