"""Calibrated features of the observation: how likely a drafted token is to be accepted, and the whole draft with it.

A model's own probability of its likeliest token says in what order positions are likely to be accepted, but not how
likely: early layers are too sure of themselves, each to its own extent, and the deeper into a draft the fewer survive.
A logistic regression for each candidate, one for the first position of a draft and one for those after it, puts that
right. Its coefficients are fitted on traces (`lede.reference_thresholds.fit_forecast`) and travel with the features
that are made of them, so that decoding, playback and environments see the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FORECAST_INPUTS = ("surprisal", "margin", "drafted")
"""Features that the regressions weigh, each with a bent copy of itself, as in `lede.acceptance.inputs`."""

N_WEIGHTS = 2 * len(FORECAST_INPUTS) + 1
"""Coefficients of a regression."""
MOST_ODDS = 12.0
"""Beyond these log-odds nothing changes any more."""
_MOST = 50.0  # nats; beyond it nothing changes any more

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Forecast:
    """Coefficients of `chance` and `outlook`.

    The log-odds of acceptance at a position are w . (s, odds(s), m, exp(-m), d, ln(1 + d), 1) for the surprisal s,
    odds(s) = -ln(exp(s) - 1) within -12..12, the margin m and d tokens drafted before it in the round.
    """

    layers: tuple[int, ...]
    """Candidates that there are coefficients for, ascending."""
    first: Rows
    """Coefficients w of each candidate at the first position of a draft, which is the position of the scan."""
    later: Rows
    """The same at the positions after it."""

    def __post_init__(self) -> None:
        for name in ("first", "later"):
            rows = getattr(self, name)
            if len(rows) != len(self.layers) or any(len(row) != N_WEIGHTS for row in rows):
                raise ValueError(
                    f"a forecast has {N_WEIGHTS} coefficients for each of the candidates {list(self.layers)}, got "
                    f"{[len(row) for row in rows]} in {name}"
                )
        if list(self.layers) != sorted(set(self.layers)) or not self.layers:
            raise ValueError(f"the candidates of a forecast must be distinct and ascending, got {list(self.layers)}")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Forecast:
        """Coefficients back from what `dataclasses.asdict` and JSON made of them."""
        first, later = (tuple(tuple(map(float, row)) for row in values[name]) for name in ("first", "later"))
        return cls(tuple(map(int, values["layers"])), first, later)

    def check_candidates(self, candidates: Sequence[int]) -> None:
        """Raise ValueError when there are no coefficients for one of the candidates."""
        lacking = [layer for layer in candidates if layer not in self._places]
        if lacking:
            raise ValueError(
                f"the forecast was fitted at layers {list(self.layers)} and says nothing of {lacking}; fit it at the "
                "candidates that are inspected"
            )

    def log_chance(self, layer: int, surprisal: float, margin: float, drafted: int) -> float:
        """Logarithm of the probability that a token is accepted if those drafted before it are; for decoding.

        Args:
            layer: Where it is drafted, one of `layers`.
            surprisal: -log p1 there, in nats.
            margin: log p1 - log p2 there, in nats.
            drafted: Tokens drafted before it in the round.
        """
        a, b, c, d, e, f, g = (self.later if drafted else self.first)[self._places[layer]]
        if surprisal > _MOST:
            surprisal = _MOST
        if margin > _MOST:
            margin = _MOST
        odds = a * surprisal + b * odds_of_surprisal(surprisal) + c * margin + d * math.exp(-margin) + g
        if drafted:
            odds += e * drafted + f * math.log1p(drafted)
        return -math.log1p(math.exp(-odds)) if odds > 0 else odds - math.log1p(math.exp(odds))

    def log_chances(self, layer: Ints, surprisal: npt.ArrayLike, margin: npt.ArrayLike, drafted: Ints) -> Array:
        """The same for arrays `(n,)`."""
        s = np.clip(np.asarray(surprisal, dtype=np.float64), 0.0, _MOST)
        m = np.clip(np.asarray(margin, dtype=np.float64), 0.0, _MOST)
        n = np.asarray(drafted, dtype=np.float64)
        bent = odds_of_surprisals(s)
        columns = np.stack([s, bent, m, np.exp(-m), n, np.log1p(n), np.ones_like(s)], axis=-1)
        weights = self._weights[(n > 0).astype(np.int64), np.searchsorted(self.layers, layer)]
        return np.asarray(-np.logaddexp(0.0, -(columns * weights).sum(axis=-1)))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {layer: place for place, layer in enumerate(self.layers)}

    @cached_property
    def _weights(self) -> Array:
        return np.asarray([self.first, self.later], dtype=np.float64)


def odds_of_surprisal(value: float) -> float:
    """Log-odds of the likeliest token from its surprisal, clipped."""
    return min(max(-math.log(math.expm1(max(value, 1e-12))), -MOST_ODDS), MOST_ODDS)


def odds_of_surprisals(values: Array) -> Array:
    """The same for arrays."""
    return np.asarray(np.clip(-np.log(np.expm1(np.maximum(values, 1e-12))), -MOST_ODDS, MOST_ODDS))
