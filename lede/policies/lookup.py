"""The lookup policy: every round copies what followed where the end of the text has been before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lede.lookup import Continuation, LookupConfig
from lede.policies.base import LayerState, Lookup, Policy, PolicyConfig, PreScanState

if TYPE_CHECKING:
    from lede.models import EarlyExitModel


@dataclass(frozen=True)
class LookupPolicyConfig(PolicyConfig):
    """Settings of a lookup policy; `candidates` and `max_draft` have nothing to act on."""

    draft_length: int = 10
    """Tokens copied in a round, at most."""
    max_suffix: int = 3
    """Longest end of the text, in tokens, that is searched for; shorter ones are tried when it is new."""
    min_suffix: int = 1
    """Shortest end of the text that is searched for; a round is a plain pass where even that is new."""
    continuation: Continuation = "recent"
    """Which of several earlier places is copied from: the most `recent`, or the last with the most `frequent` next
    token."""
    prune_at: int | None = None
    """Layer, of 1..L-1, at which the draft is cut behind the first token that is not the likeliest there; none: all of
    it is verified."""
    memory: str | None = None
    """File of phrases of other texts (`lede phrases`), for where the text has nothing of its own to copy; none: no
    memory, or the one in the policy's folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_length < 1:
            raise ValueError(f"draft_length must be at least 1, got {self.draft_length}")
        if self.prune_at is not None and self.prune_at < 1:
            raise ValueError(f"prune_at must be at least 1, got {self.prune_at}")
        LookupConfig(self.max_suffix, self.min_suffix, self.continuation)  # complains of what it can't search for


class LookupPolicy(Policy):
    """Copies `draft_length` tokens from the text in every round, without looking at anything else.

    It needs no layer that foretells the last one, and never reads a head unless it prunes.

    Source: prompt lookup (Saxena, 2023), whose 10 tokens and suffixes of up to 3 are the defaults. Departs from it:
    generated text is searched with the prompt, a copy goes on in itself, layer `prune_at` may cut it (`lede.lookup`),
    and a memory of other texts may stand behind (`lede.phrases`).

    Raises:
        ValueError: The file of `memory` can't be read.
    """

    kind: ClassVar[str] = "lookup"
    config_class: ClassVar[type[PolicyConfig]] = LookupPolicyConfig
    config: LookupPolicyConfig

    def __init__(self, config: PolicyConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        if self.config.memory is not None:
            from lede.phrases import PhraseMemory

            self.memory = PhraseMemory.load(self.config.memory)

    @property
    def lookup(self) -> LookupConfig:
        """How the text is searched."""
        return LookupConfig(self.config.max_suffix, self.config.min_suffix, self.config.continuation)

    @property
    def plan(self) -> Lookup:
        """What every round does."""
        return Lookup(self.config.draft_length, self.config.prune_at)

    def candidates_for(self, n_layers: int) -> tuple[int, ...]:
        """No layer drafts."""
        return ()

    def check_model(self, model: EarlyExitModel) -> None:
        """Raise ValueError when the model can't cut drafts at layer `prune_at`, or has another tokenizer."""
        self.plan.check(model.n_layers)
        self.check_memory(model)

    def pre_scan(self, state: PreScanState) -> Lookup:
        """Copy; where nothing is found the round is a plain pass."""
        return self.plan

    def scan(self, state: LayerState) -> bool:
        """Never exit; asked only where a caller scans in spite of `pre_scan`."""
        return False

    def draft(self, state: LayerState) -> bool:
        """No further token; copies are drafted as a whole, unasked."""
        return False
