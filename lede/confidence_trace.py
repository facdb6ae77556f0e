"""The confidence trace: how sure the layers were where the policy left the last positions."""

from __future__ import annotations

import math


class ConfidenceTrace:
    """C_trace: mean over the last positions of -log top-1 probability at the layer where the policy left them.

    That layer is the exit layer if the policy drafted at the position and L if it did not; whether the draft was
    accepted does not matter, so no unverified result leaks into the state. Positions are pushed as they are left and
    removed when verification rejects what came before them.

    Args:
        anchor: The layer-L value of the last prompt position, used until a position has been pushed.
        window: Positions that count.
    """

    def __init__(self, anchor: float, window: int) -> None:
        self.window = window
        self.anchor = anchor
        self._values: list[float] = []

    def value(self) -> float:
        """The current trace, in nats."""
        if not self._values:
            return self.anchor
        recent = self._values[-self.window :]
        return math.fsum(recent) / len(recent)

    def push(self, surprisal: float) -> None:
        """Leave a position whose likeliest token had this -log probability."""
        self._values.append(surprisal)

    def drop(self, n_positions: int) -> None:
        """Forget the last `n_positions` positions."""
        if n_positions:
            del self._values[-n_positions:]
