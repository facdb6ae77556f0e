"""The ablated policy: a learned policy with one of its two decisions taken away.

Source: LEDE (arXiv 2606.03113), table 3: the full policy, without adaptive drafting (a fixed length), without dynamic
exit (a fixed layer). What the paper fixes them to is not published; `lede.presets` takes both from validation prompts.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lede.lookup import LookupConfig
from lede.policies.base import ExitAt, LayerState, Lookup, Policy, PolicyConfig, PreScan, PreScanState
from lede.policies.learned import LearnedPolicy
from lede.policies.survival import SurvivalPolicy

if TYPE_CHECKING:
    from lede.features import FeatureConfig
    from lede.models import EarlyExitModel


@dataclass(frozen=True)
class AblatedConfig(PolicyConfig):
    """Settings of an ablated policy; candidates, max_draft and temperature are those of its base."""

    base: str = ""
    """Folder of the policy that is ablated; it must stay where it is."""
    draft_length: int | None = None
    """Tokens drafted in every round that drafts; None leaves that to the base."""
    exit_layer: int | None = None
    """Layer that every round drafts at, without a scan; None leaves that to the base."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("draft_length", "exit_layer"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class AblatedPolicy(Policy):
    """Decides as its base does, but for what is held fixed.

    With a fixed length the base chooses the round's plan and exit layer, and nobody asks it how far to draft. With a
    fixed layer every round drafts there from the start, plain passes included in what is taken away, and the base says
    how far. The base's features are computed in either case: it is the decision that is ablated, not its cost.
    """

    kind: ClassVar[str] = "ablated"
    config_class: ClassVar[type[PolicyConfig]] = AblatedConfig
    config: AblatedConfig

    def __init__(self, config: PolicyConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.base = _load(self.config)
        self.config = replace(
            self.config,
            base=str(Path(self.config.base).resolve()),
            candidates=self.base.config.candidates,
            max_draft=self.base.config.max_draft,
            trained_temperature=self.base.config.trained_temperature,
        )
        length = self.config.draft_length
        if length is not None and length > self.config.max_draft:
            raise ValueError(f"draft_length must be within 1..max_draft = {self.config.max_draft}, got {length}")
        self.fingerprint = self.base.fingerprint
        self._profile = self.base._profile
        self.memory = self.base.memory
        self._plan = None if self.config.exit_layer is None else ExitAt(self.config.exit_layer)

    @classmethod
    def of(cls, base: str | Path, draft_length: int | None = None, exit_layer: int | None = None) -> Self:
        """The policy in a folder, with something held fixed.

        Raises:
            ValueError: The folder holds no policy, or what is fixed does not fit it.
        """
        return cls(base=str(base), draft_length=draft_length, exit_layer=exit_layer)

    @property
    def features(self) -> FeatureConfig | None:
        """The observation of the base."""
        return self.base.features

    @property
    def decides_pre_scan(self) -> bool:
        """Whether the base does, and still may."""
        return self._plan is None and self.base.decides_pre_scan

    @property
    def uses_trace(self) -> bool:
        """Whether the base wants the confidence trace."""
        return self.base.uses_trace

    def check_model(self, model: EarlyExitModel) -> None:
        """Raise ValueError when the base can't run on this model, or the fixed layer is none of it."""
        self.base.check_model(model)
        if self._plan is not None:
            model.check_exit_layer(self._plan.exit_layer)

    def bind(self, model: EarlyExitModel) -> Self:
        """A copy that belongs to the model.

        Raises:
            ValueError: The base belongs to another one.
        """
        from lede.checkpoint import check_fingerprint

        check_fingerprint(self.base, model)
        return super().bind(model)

    def for_text(self) -> Self:
        """One with a base of its own."""
        other = copy(self)
        other.base = self.base.for_text()
        return other

    def reset(self) -> None:
        """Forget what the base remembers."""
        self.base.reset()

    @property
    def lookup(self) -> LookupConfig | None:
        """The base's."""
        return self.base.lookup

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt | Lookup:
        """The fixed layer, or the base's answer."""
        if self._plan is not None and not isinstance(self.base, SurvivalPolicy):
            return self._plan
        plan = self.base.pre_scan(state)  # a survival policy begins its product here
        if self.config.draft_length is not None and isinstance(plan, ExitAt):
            return ExitAt(plan.exit_layer)  # its length is ours
        return plan

    def scan(self, state: LayerState) -> bool:
        """The base's answer."""
        return self.base.scan(state)

    def draft(self, state: LayerState) -> bool:
        """Draft on up to the fixed length, or as the base says."""
        if self.config.draft_length is not None:
            return state.n_drafted < self.config.draft_length
        return self.base.draft(state)


def _load(config: AblatedConfig) -> LearnedPolicy | SurvivalPolicy:
    """The base, told of the fixed layer where its own rule depends on it.

    Raises:
        ValueError: It can't be loaded, its decisions can't be taken apart, or nothing or both are fixed.
    """
    from lede.checkpoint import load_policy

    if not config.base:
        raise ValueError("an ablated policy needs the folder of its base; write ablated:base=FOLDER;draft_length=N")
    if (config.draft_length is None) == (config.exit_layer is None):
        raise ValueError("an ablated policy holds either draft_length or exit_layer fixed; both would be a static one")
    try:
        base = load_policy(config.base)
    except ValueError as error:
        raise ValueError(f"the base of the ablated policy: {error}") from None
    if not isinstance(base, LearnedPolicy | SurvivalPolicy):
        raise ValueError(
            f"{config.base} holds a '{base.kind}' policy; only a '{LearnedPolicy.kind}' or '{SurvivalPolicy.kind}' one "
            "can be ablated: others have no two decisions to take apart, plan gaps, or learn while they decode"
        )
    if config.exit_layer is None or not isinstance(base, SurvivalPolicy):
        return base
    # its forecasts belong to layers, and its product counts the blind first token
    settled = replace(base.config, blind=config.exit_layer)
    fixed = SurvivalPolicy.from_model(base.model, settled, fingerprint=base.fingerprint)
    fixed._profile = base._profile
    return fixed
