"""What a policy knows of the text so far, beside the position that it decides about."""

from __future__ import annotations

from lede.confidence_trace import ConfidenceTrace
from lede.features import RECENT_ROUNDS


class History:
    """The rounds of one text: how many drafted tokens verification kept lately, and how long ago it had any to check.

    Args:
        trace: The confidence trace; None when nobody looks at it.

    Attributes:
        acceptance: (accepted + 1) / (drafted + 2) over the last rounds that drafted.
        recent_acceptance: accepted / drafted over the same rounds; None before the first.
        since_draft: Rounds since the last that drafted.
    """

    def __init__(self, trace: ConfidenceTrace | None = None) -> None:
        self.trace = trace
        self.acceptance = 0.5
        self.recent_acceptance: float | None = None
        self.since_draft = 0
        self._recent: list[tuple[int, int]] = []  # (drafted, accepted)

    def trace_value(self) -> float:
        """The confidence trace, in nats; 0 when it is not kept."""
        return self.trace.value() if self.trace is not None else 0.0

    def verified(self, drafted: int, accepted: int) -> None:
        """A round has been verified."""
        if not drafted:
            self.since_draft += 1
            return
        self.since_draft = 0
        self._recent = [*self._recent, (drafted, accepted)][-RECENT_ROUNDS:]
        drafted, accepted = (sum(counts) for counts in zip(*self._recent, strict=True))
        self.recent_acceptance = accepted / drafted
        self.acceptance = (accepted + 1) / (drafted + 2)
