"""Thresholds on how likely a draft is to be accepted: one position at a time in the scan, all of it in the draft.

The survival of a draft is the product of the forecasts at its positions. `survival` policies decide by it in every
round, `source-value` policies in the rounds where layers draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lede.acceptance import DRAFTING, SCANNING, AcceptanceModel, log_sigmoid
from lede.features import parse_candidates


def check_thresholds(thresholds: Sequence[float], survival: float) -> None:
    """Raise ValueError when there is no threshold, or one of them or the survival is negative."""
    if not thresholds or min(*thresholds, survival) < 0:
        raise ValueError(
            f"thresholds and survival must not be negative, and there is at least one threshold; got "
            f"{list(thresholds)} and {survival}"
        )


class DraftSurvival:
    """Forecasts at the positions of one draft, held against thresholds; it serves one text at a time.

    Attributes:
        model: The forecasts.
        candidates: Layers that they are for, ascending.
        limits: Least probability to exit with at each candidate, `(candidate,)`.

    Args:
        model: As above.
        candidates: As above.
        thresholds: Least probability of acceptance to exit with, one for all candidates or one for each; above 1 never
            exits.
        survival: Least probability that the draft is accepted up to and with the next token, to draft it.

    Raises:
        ValueError: Candidates, thresholds and forecasts do not fit together.
    """

    def __init__(
        self, model: AcceptanceModel, candidates: Sequence[int] | None, thresholds: Sequence[float], survival: float
    ) -> None:
        n = model.blind.size
        if candidates is None or len(candidates) != n:
            given = "none are given" if candidates is None else f"they are {list(candidates)}"
            raise ValueError(f"the forecasts are for {n} candidates, but {given}")
        if len(thresholds) not in (1, n):
            raise ValueError(f"{len(thresholds)} thresholds for {n} candidates; give 1 or {n}")
        self.model = model
        self.candidates = parse_candidates(candidates, candidates[-1] + 1)
        self.limits: npt.NDArray[np.float64] = np.broadcast_to(np.asarray(thresholds, dtype=np.float64), (n,))
        self._places = {layer: place for place, layer in enumerate(self.candidates)}
        self._log_limits = [_log(limit) for limit in self.limits.tolist()]
        self._least = _log(survival)
        self._so_far = 0.0  # logarithm of the survival

    def reset(self) -> None:
        """Forget the draft."""
        self._so_far = 0.0

    def begin_blind(self, layer: int) -> None:
        """A draft begins at a layer with a token that nobody looks at."""
        self._so_far = log_sigmoid(float(self.model.blind[self._places[layer]]))

    def exits(self, layer: int, observation: npt.NDArray[np.float32]) -> bool:
        """Whether acceptance is at least as likely as the layer's threshold; a draft begins here if so.

        Args:
            layer: A candidate.
            observation: What the forecasts look at, `(feature,)`.
        """
        place = self._places[layer]
        self._so_far = self.model.log_chance(observation, SCANNING, place)
        return self._so_far >= self._log_limits[place]

    def goes_on(self, layer: int, observation: npt.NDArray[np.float32]) -> bool:
        """Whether the draft would survive the next token with at least the probability asked for.

        Args:
            layer: Where it drafts, a candidate.
            observation: What the forecasts look at, `(feature,)`.
        """
        self._so_far += self.model.log_chance(observation, DRAFTING, self._places[layer])
        return self._so_far >= self._least


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
