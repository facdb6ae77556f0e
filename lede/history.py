"""What a policy knows of the text so far, beside the position that it decides about."""

from __future__ import annotations

from lede.confidence_trace import ConfidenceTrace
from lede.features import RECENT_ROUNDS
from lede.lookup import LookupIndex, Match


class Recent:
    """How drafts of one source have fared lately.

    Attributes:
        acceptance: (accepted + 1) / (drafted + 2) over the last rounds that drafted so.
        ratio: accepted / drafted over the same rounds; None before the first.
        since: Rounds since the last that drafted so.
    """

    def __init__(self) -> None:
        self.acceptance = 0.5
        self.ratio: float | None = None
        self.since = 0
        self._rounds: list[tuple[int, int]] = []  # (drafted, accepted)

    def add(self, drafted: int, accepted: int) -> None:
        """A round drafted so, and was verified."""
        self.since = 0
        self._rounds = [*self._rounds, (drafted, accepted)][-RECENT_ROUNDS:]
        drafted, accepted = (sum(counts) for counts in zip(*self._rounds, strict=True))
        self.ratio = accepted / drafted
        self.acceptance = (accepted + 1) / (drafted + 2)


class History:
    """The rounds of one text, by where their drafts came from, and the text itself where drafts are copied from it.

    Args:
        trace: The confidence trace; None when nobody looks at it.
        index: Of the text; None when nothing is copied.

    Attributes:
        layers: Drafts by layers of the model, exits and gaps.
        lookups: Drafts copied from the text.
    """

    def __init__(self, trace: ConfidenceTrace | None = None, index: LookupIndex | None = None) -> None:
        self.trace = trace
        self.index = index
        self.layers = Recent()
        self.lookups = Recent()

    @property
    def match(self) -> Match | None:
        """Where the end of the text has been before."""
        return None if self.index is None else self.index.match()

    def trace_value(self) -> float:
        """The confidence trace, in nats; 0 when it is not kept."""
        return self.trace.value() if self.trace is not None else 0.0

    def verified(self, drafted: int, accepted: int, copied: bool = False) -> None:
        """A round has been verified; `copied` tells where its tokens, if it drafted any, came from."""
        used = None if not drafted else self.lookups if copied else self.layers
        for source in (self.layers, self.lookups):
            if source is used:
                source.add(drafted, accepted)
            else:
                source.since += 1

    def extend(self, tokens: tuple[int, ...]) -> None:
        """The text goes on."""
        if self.index is not None:
            self.index.extend(tokens)
