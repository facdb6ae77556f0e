"""Rules of the decision process, and the rows that go by them: prompts on their way through tokens and layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lede.features import ConfidenceTrace, FeatureConfig
from lede.rewards import EXIT, RewardConfig
from lede.verification import Warp

BETWEEN_TOKENS = -1
"""Value of `Row.candidate` when the row stands at no candidate."""


@dataclass(frozen=True)
class Rules:
    """What every row goes by."""

    candidates: tuple[int, ...]
    """Candidate layers, ascending within 1..L-1."""
    max_new_tokens: int
    """Budget of new tokens a prompt; at least 2, since the first comes without a decision."""
    features: FeatureConfig = field(default_factory=FeatureConfig)
    """What an observation is made of."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """What a decision earns."""
    warp: Warp = field(default_factory=Warp)
    """How the target draws its tokens."""

    def __post_init__(self) -> None:
        self.features.check_token_level("the live exit process")
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens must be at least 2, got {self.max_new_tokens}: the first new token comes from the "
                "prefill, decisions start at the second"
            )


@dataclass
class Row:
    """One prompt on its way."""

    prompt_index: int
    """Names the prompt's random streams."""
    prompt_ids: list[int]
    """Token ids of the prompt."""
    trace: ConfidenceTrace
    """The confidence trace so far."""
    luck: torch.Generator | None
    """The target's draws; None when greedy."""
    token_ids: list[int] = field(default_factory=list)
    """The target's new tokens so far."""
    done: bool = False
    """Whether EOS or the budget ended the text."""
    ended_by_eos: bool = False
    """Whether it was EOS."""
    candidate: int = BETWEEN_TOKENS
    """Index of the candidate where the row stands."""
    hidden: torch.Tensor | None = None
    """State `(1, width)` where the row stands."""
    confidence: float = 0.0
    """C_k there, in nats."""
    entropy: float = 0.0
    """Entropy there, in nats."""
    surprisal: float = 0.0
    """-log probability of the likeliest token there, in nats."""
    margin: float = 0.0
    """Difference of the two largest log probabilities there, in nats."""
    agreement: float = 0.0
    """1 where the likeliest token is that of the candidate before, else -1; 0 at the first candidate."""
    token: int = -1
    """The likeliest token there."""
    probabilities: torch.Tensor | None = None
    """Warped distribution `(vocabulary,)` there; None when greedy."""

    def values(self) -> dict[str, float]:
        """Features of the candidate where the row stands, but for its depth."""
        return {
            "confidence": self.confidence,
            "entropy": self.entropy,
            "trace": self.trace.value(),
            "surprisal": self.surprisal,
            "margin": self.margin,
            "agreement": self.agreement,
        }

    @property
    def token_index(self) -> int:
        """Which decided token the row is at, from 1: the number of new tokens so far."""
        return len(self.token_ids)

    @property
    def position(self) -> int:
        """Position of the newest token."""
        return len(self.prompt_ids) + len(self.token_ids) - 1


@dataclass(frozen=True)
class Decision:
    """What one decision came to."""

    layer: int
    """Candidate layer that was inspected."""
    action: int
    """CONTINUE or EXIT."""
    reward: float
    """What it earned."""
    token_index: int
    """Which decided token it belongs to, from 1."""
    match: int = -1
    """Whether the exit's token was the target's, 0 or 1; -1 for a continue."""
    target_token: int | None = None
    """The target's next token; None while the row still decides about it."""

    @property
    def token_end(self) -> bool:
        """Whether it was the last decision of its token."""
        return self.target_token is not None

    @property
    def exit_layer(self) -> int:
        """Where the token was left, 0 for a continue."""
        return self.layer if self.action == EXIT else 0
