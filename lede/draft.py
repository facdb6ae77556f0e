"""What a round has drafted so far, and what verification makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lede.head_reading import Reading
from lede.history import History
from lede.policies.base import ExitAt, Lookup, SkipSublayers
from lede.primitives import surprisal, surprisals
from lede.statistics import Round
from lede.verification import Chooser

UNKNOWN = -1
"""In place of a token that nobody read."""


@dataclass
class Draft:
    """The draft of one round, or the position of a plain pass when `tokens` is empty."""

    exit_layer: int
    """Layers that the states went through, and verification need not run again."""
    states: list[torch.Tensor]
    """Hidden states after `exit_layer` layers, `(1, n, width)` each: the newest token's, then the drafted tokens'."""
    tokens: list[int] = field(default_factory=list)
    """Drafted tokens."""
    distributions: list[torch.Tensor | None] = field(default_factory=list)
    """What each was drawn from; None when greedy, and for a token copied from the text."""
    gaps: SkipSublayers | None = None
    """What the draft left out, which then went on behind the states; None where it left at the exit layer."""
    lookup: Lookup | None = None
    """The plan of tokens that were copied from the text; the exit layer is then the one that pruned them, if any."""
    fixed: int | None = None
    """Tokens that it was to have without anybody looking at them; None where a policy is asked."""
    capped: bool = False
    """Whether it was as long as it could be: up to the cap, or up to a token that ends the text."""

    @property
    def plan(self) -> ExitAt | SkipSublayers | Lookup | None:
        """Where the tokens came from; None without any."""
        if self.gaps is not None:
            return self.gaps
        return (self.lookup or ExitAt(self.exit_layer, self.fixed)) if self.tokens else None

    @property
    def n_states(self) -> int:
        """Positions that verification runs."""
        return sum(state.shape[1] for state in self.states)


@dataclass
class HeadRead:
    """What one head read gave."""

    logits: torch.Tensor
    """Raw, `(vocabulary,)`."""
    reading: Reading | None = None
    """What the policy's features take from it, where somebody looked."""


def settle(draft: Draft, logits: torch.Tensor, chooser: Chooser, ids: Sequence[int], history: History) -> Round:
    """Accept what stays of a draft; also a plain pass, where nothing was drafted.

    Args:
        draft: The draft.
        logits: The whole model's at its states, `(state, vocabulary)`.
        chooser: Accepts and draws.
        ids: The text before the draft.
        history: Of the text; is told what came of the round.
    """
    accepted, following = chooser.verify(logits, draft.tokens, draft.distributions, ids)
    drafted, trace = len(draft.tokens), history.trace
    if trace is not None:
        if draft.lookup is not None:  # no position was left before the last layer
            for value in surprisals(logits[: accepted + (following is not None)]):
                trace.push(value)
        elif draft.fixed is not None:  # nobody looked at its positions
            if following is not None:
                trace.push(surprisal(logits[accepted]))
        elif accepted < drafted:
            trace.drop(drafted - accepted - 1)  # the first rejected position was left at its exit layer: it stays
        elif following is not None:
            trace.push(surprisal(logits[accepted]))
    history.verified(drafted, accepted, copied=draft.lookup is not None)
    tokens = (*draft.tokens[:accepted], *(() if following is None else (following,)))
    if draft.gaps is not None:
        return Round(tokens, drafted, accepted, None, draft.gaps.n_skipped, source="gaps")
    if not drafted:
        return Round(tokens, drafted, accepted, None)
    if draft.lookup is not None:
        return Round(tokens, drafted, accepted, None, source="lookup")
    return Round(tokens, drafted, accepted, draft.exit_layer, source="exit", fixed=draft.fixed is not None)
