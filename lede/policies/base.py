"""The protocol of a policy: three stages, state in, decision out.

A round asks `pre_scan` once, unless only one token is left, `scan` at each candidate layer until one exits, then
`draft` for every further drafted position. No state carries the sampled token of its own position, nor a match that
verification has not yet told, so a policy of this type cannot break the law of sampling (see `lede.verification`).

A policy that learns while it decodes is told of each text (`begin`) and of each round once it is verified (`verified`),
and may ask questions about the verified text between two rounds (`between_rounds`).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lede.features import FeatureConfig, parse_candidates
from lede.lookup import LookupConfig, Match
from lede.policies.plans import ExitAt, Lookup, Plan, PreScan, SkipSublayers

if TYPE_CHECKING:
    from lede.cost_profile import CostProfile
    from lede.models import EarlyExitModel
    from lede.phrases import PhraseMemory
    from lede.text_probe import TextProbe

__all__ = [
    "BLIND",
    "NOTHING_OBSERVED",
    "ExitAt",
    "LayerState",
    "Lookup",
    "Plan",
    "Policy",
    "PolicyConfig",
    "PreScan",
    "PreScanState",
    "RoundReport",
    "Shadow",
    "SkipSublayers",
]

BLIND = 2
"""Where decisions are numbered, BLIND + k is the plan to draft blind at candidate k; in the pre-scan CONTINUE skips the
draft and EXIT scans (see `lede.rewards`)."""

NOTHING_OBSERVED = np.empty(0, dtype=np.float32)
"""The observation of a policy that asks for none."""


@dataclass(frozen=True)
class Shadow:
    """What layers would have drafted at the positions of a round whose prefix is the text."""

    layers: tuple[int, ...]
    """The policy's `shadow_layers`."""
    tokens: npt.NDArray[np.int64]
    """Likeliest token, `(layer, position)`."""
    probabilities: npt.NDArray[np.float32]
    """Its probability by the softmax of raw logits, `(layer, position)`."""
    targets: npt.NDArray[np.int64]
    """The token that the text has there, `(position,)`: accepted, or the correction or bonus."""


@dataclass(frozen=True)
class RoundReport:
    """What a round came to, once it is verified."""

    plan: ExitAt | SkipSublayers | Lookup | None
    """Where the draft came from; None for a plain pass."""
    drafted: int
    """Tokens drafted."""
    accepted: int
    """Drafted tokens that verification kept."""
    capped: bool
    """Whether the draft was as long as it could be: `max_draft` or the budget allowed no more, or it ended the text."""
    shadow: Shadow | None
    """What the policy's `shadow_layers` say; None when it has none."""


@dataclass(frozen=True)
class PreScanState:
    """What is known before a round, all of it verified."""

    trace: float
    """Confidence trace, in nats."""
    recent_acceptance: float | None
    """Accepted over drafted tokens of the last rounds that drafted with layers of the model; None before the first."""
    rounds_since_draft: int
    """Rounds since one drafted so."""
    remaining: int
    """Tokens left in the budget."""
    n_tokens: int
    """Tokens so far, prompt included."""
    observation: npt.NDArray[np.float32] = field(default_factory=lambda: NOTHING_OBSERVED)
    """The policy's features, `(feature,)`; empty unless it decides the pre-scan by them."""
    match: Match | None = None
    """Where the end of the text has been before; None where it is new, or the policy has no `lookup`."""


@dataclass(frozen=True)
class LayerState:
    """What a policy sees at a layer, in the scan and in the draft."""

    layer: int
    """Layers that the position went through."""
    n_drafted: int
    """Tokens drafted before this position in this round; 0 in the scan."""
    observation: npt.NDArray[np.float32]
    """The policy's features, `(feature,)`; empty when it asks for none."""


@dataclass(frozen=True)
class PolicyConfig:
    """Settings that every policy has; a policy's own come on top."""

    candidates: tuple[int, ...] | None = None
    """Candidate layers, ascending; None for the default of the model it is bound to."""
    max_draft: int = 12
    """Most tokens drafted in a round, one after the other; a lookup has a length of its own."""
    trained_temperature: float | None = None
    """Temperature of the data that the policy was fitted on; None when it was not fitted."""

    def __post_init__(self) -> None:
        if self.max_draft < 1:
            raise ValueError(f"max_draft must be at least 1, got {self.max_draft}")


class Policy(ABC):
    """Base class of all policies.

    Class attributes:
        kind: The name in `NAME:key=value` and in config.json.
        config_class: The frozen dataclass of its settings.
    """

    kind: ClassVar[str]
    config_class: ClassVar[type[PolicyConfig]] = PolicyConfig

    def __init__(self, config: PolicyConfig | None = None, **settings: Any) -> None:
        self.config = config if config is not None else self.config_class()
        if settings:
            self.config = replace(self.config, **settings)
        self.fingerprint: dict[str, Any] | None = None  # of the base model; None while unbound
        self._profile: CostProfile | Callable[[], CostProfile] | None = None
        self.memory: PhraseMemory | None = None  # of other texts, behind the one that `lookup` searches; saved too

    @property
    def features(self) -> FeatureConfig | None:
        """The observation that `scan` and `draft` get; None when they look at none (no head read for it)."""
        return None

    @property
    def decides_pre_scan(self) -> bool:
        """Whether `pre_scan` gets an observation to decide by."""
        return self.features is not None and "in_scan" in self.features.names

    @property
    def lookup(self) -> LookupConfig | None:
        """How the text is searched for drafts; None for a policy that never copies, and no index is kept."""
        return None

    @property
    def profile(self) -> CostProfile | None:
        """What decoding costs where the policy was fitted; None when its fit knew no seconds.

        Raises:
            ValueError: The profile in the policy's folder can't be read (any more).
        """
        if callable(self._profile):
            self._profile = self._profile()
        return self._profile

    @profile.setter
    def profile(self, profile: CostProfile | Callable[[], CostProfile] | None) -> None:
        """Carry a profile, or what loads it when somebody asks."""
        self._profile = profile

    @property
    def uses_trace(self) -> bool:
        """Whether the confidence trace is wanted, in the observation or in `pre_scan`; it costs a read of layer L."""
        return self.features is not None and "trace" in self.features.names

    @property
    def trace_window(self) -> int:
        """Positions that enter the confidence trace."""
        return self.features.window if self.features is not None else FeatureConfig().window

    @property
    def bound(self) -> bool:
        """Whether the policy belongs to one model."""
        return self.fingerprint is not None

    @property
    def shadow_layers(self) -> tuple[int, ...]:
        """Layers of 1..L-1 read at every verified position, a head read each, for `RoundReport.shadow`; once a text."""
        return ()

    @property
    def searches(self) -> bool:
        """Whether `between_rounds` wants to be called now."""
        return False

    def candidates_for(self, n_layers: int) -> tuple[int, ...]:
        """Candidate layers on a model of `n_layers` layers.

        Raises:
            ValueError: A candidate is outside 1..L-1.
        """
        return parse_candidates(self.config.candidates, n_layers)

    def check_model(self, model: EarlyExitModel) -> None:
        """Raise ValueError when the policy can't run on this model; called before any decoding."""
        self.candidates_for(model.n_layers)
        self.check_memory(model)

    def check_memory(self, model: EarlyExitModel) -> None:
        """Raise ValueError when the token ids that the policy remembers are not the model's."""
        if self.memory is not None:
            self.memory.check_model(model)

    def check_temperature(self, temperature: float) -> None:
        """Warn when decoding at another temperature than the policy was fitted at: still exact, perhaps slower."""
        trained = self.config.trained_temperature
        if trained is not None and trained != temperature:
            warnings.warn(
                f"the policy was fitted at temperature {trained} and decodes at {temperature}; the text is exact, but "
                "the decisions may be poor",
                stacklevel=3,
            )

    def bind(self, model: EarlyExitModel) -> Self:
        """A copy of this policy that belongs to the model: its candidates made explicit, its fingerprint recorded."""
        from lede.checkpoint import fingerprint

        self.check_model(model)
        other = deepcopy(self)
        other.config = replace(self.config, candidates=self.candidates_for(model.n_layers))
        other.fingerprint = fingerprint(model)
        return other

    def for_text(self) -> Self:
        """Who decides about one more text of a batch: another where something is kept from question to question."""
        return self

    def reset(self) -> None:  # noqa: B027  nothing to forget is the common case
        """Forget everything learned or drawn while decoding. Most policies keep nothing."""

    def state(self) -> dict[str, Any]:
        """What was learned while decoding, as plain JSON values; most policies learn nothing."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned.

        Raises:
            ValueError: It is not this policy's.
        """
        if state:
            raise ValueError(f"a {self.kind} policy learns nothing while decoding, got {', '.join(sorted(state))}")

    def begin(self, n_prompt_tokens: int) -> None:  # noqa: B027  most policies treat all texts alike
        """A new text begins: its prompt is prefilled and its first token chosen."""

    def verified(self, report: RoundReport) -> None:  # noqa: B027  most policies learn nothing while decoding
        """A round is verified."""

    def between_rounds(self, probe: TextProbe) -> None:  # noqa: B027  most policies search nothing
        """Between two rounds of a text, after `verified`, while `searches`; the time is booked as "search"."""

    def pre_scan(self, state: PreScanState) -> Plan:
        """Decide before any head read: skip, scan, or draft blind from a plan. The paper always scans."""
        return PreScan.SCAN

    @abstractmethod
    def scan(self, state: LayerState) -> bool:
        """Whether to exit at this candidate; False goes on to the next."""

    @abstractmethod
    def draft(self, state: LayerState) -> bool:
        """Whether to draft one more token; False stops the draft.

        Under a plan with gaps it is asked before the position runs further than the layers before the first gap, so
        `state.observation` is of the last drafted position and `state.layer` is L.
        """

    def save_pretrained(self, folder: str) -> None:
        """Write config.json, weights, a card, and any profile and memory; see `lede.checkpoint.save_policy`."""
        from lede.checkpoint import save_policy

        save_policy(self, folder)

    @classmethod
    def from_pretrained(cls, folder: str) -> Self:
        """Load a policy of this class from a folder.

        Raises:
            ValueError: The folder holds no policy, or one of another kind.
        """
        from lede.checkpoint import load_policy

        policy = load_policy(folder)
        if not isinstance(policy, cls):
            raise ValueError(f"{folder} holds a '{policy.kind}' policy, not '{cls.kind}'")
        return policy

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Weights that go into model.safetensors; none for most policies."""
        return {}

    def load_tensors(self, tensors: dict[str, npt.NDArray[Any]]) -> None:
        """Take the weights back from model.safetensors.

        Raises:
            ValueError: They are not this policy's.
        """
        if tensors:
            raise ValueError(f"a {self.kind} policy has no tensors, got {', '.join(sorted(tensors))}")

    def __repr__(self) -> str:
        """The policy as its settings."""
        return f"{type(self).__name__}({self.config})"
