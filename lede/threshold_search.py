"""The search for confidence thresholds: all rounds of the traces laid out, one threshold moved after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lede.acceptance import AcceptanceModel
from lede.cost_model import CostModel
from lede.features import FeatureConfig
from lede.round_outcomes import Array, Ints, RoundOutcomes
from lede.trace_table import TraceTable

Limits = tuple[float, ...]
"""A threshold for each candidate, and the one to draft on."""

SHARED = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Thresholds that are tried everywhere, beside quantiles."""
NEVER = 1.0
"""The threshold that no probability passes; a candidate that has it is not looked at."""
ENOUGH = 1e-6
"""A turn of all thresholds that improves the rate by no larger a share ends the search."""
REFINEMENTS = 3
"""Times that the steps around the best thresholds are halved in the end."""

_FEATURES = FeatureConfig(names=("surprisal",))


class ThresholdOutcomes(RoundOutcomes):
    """All rounds of a table under thresholds on the probability of the likeliest token, as a threshold policy has them.

    Args:
        table: Traces, with branches or without.
        costs: What operations cost.
        layers: Layers that may draft, ascending.
        max_draft: Most tokens drafted in a round.
        seed: Of the acceptance of sampled drafts.
    """

    def __init__(
        self, table: TraceTable, costs: CostModel, layers: Sequence[int], max_draft: int = 12, seed: int = 0
    ) -> None:
        n = len(layers)
        # surprisal up to each position of a draft, the largest so far, (position, row, layer)
        self._worst = np.empty((max_draft - 1, len(table.match), n), dtype=np.float32)
        nothing = AcceptanceModel(_FEATURES, np.zeros((2, n, 3)), np.zeros(n))  # no forecast: thresholds decide
        super().__init__(table, costs, layers, nothing, max_draft, seed)
        self._by_limit: dict[float, tuple[Ints, Array]] = {}

    def rate(self, candidates: Sequence[int], thresholds: Sequence[float], draft_threshold: float) -> float:
        """Tokens for each unit of cost of a threshold policy."""
        limit = _on_feature(draft_threshold)
        if limit not in self._by_limit:
            length = 1 + (self._worst < np.float64(limit)).sum(axis=0)  # in float64, as the policy compares
            self._by_limit[limit] = self._brought(length, blind=False)
        # the policy asks for less than the limit, here at least a value is asked for: the next one above
        least = [float(np.nextafter(-_on_feature(value), np.inf)) for value in thresholds]
        return self.play(self._by_limit[limit], candidates, least).rate

    def _keep(self, model: AcceptanceModel, k: int, i: int, seen: npt.NDArray[np.float32]) -> None:
        surprisal = seen[:, 0]
        if i == 0:
            self.scanned[:, k] = -surprisal.astype(np.float64)
        else:
            self._worst[i - 1, :, k] = surprisal if i == 1 else np.maximum(self._worst[i - 2, :, k], surprisal)


class ThresholdSearch:
    """Plays thresholds on a table, each combination once.

    Attributes:
        best: The thresholds with the highest rate so far.
        played: Rate of everything that was played.

    Args:
        table: Traces.
        costs: What operations cost; its unit is what rates are told in.
        candidates: Layers that may be looked at, ascending.
        max_draft: Most tokens drafted in a round.
        seed: Of the acceptance of sampled drafts.
    """

    def __init__(
        self, table: TraceTable, costs: CostModel, candidates: Sequence[int], max_draft: int = 12, seed: int = 0
    ) -> None:
        self.candidates = tuple(candidates)
        self._outcomes = ThresholdOutcomes(table, costs, self.candidates, max_draft, seed)
        self._probabilities = np.exp(table.top1[:, np.asarray(self.candidates) - 1].astype(np.float64))
        self.played: dict[Limits, float] = {}
        self.best: Limits = ()

    def inspected(self, limits: Limits) -> tuple[tuple[int, ...], Limits]:
        """The candidates that are looked at, and their thresholds: those where a draft may begin, one at least."""
        kept = [(layer, value) for layer, value in zip(self.candidates, limits, strict=False) if value < NEVER]
        layers, values = zip(*(kept or [(self.candidates[0], NEVER)]), strict=True)
        return layers, values

    def rate(self, limits: Limits) -> float:
        """Tokens for each unit of cost under these thresholds."""
        if limits not in self.played:
            self.played[limits] = self._outcomes.rate(*self.inspected(limits), limits[-1])
            if not self.best or self.played[limits] > self.played[self.best]:
                self.best = limits
        return self.played[limits]

    def run(self, quantiles: int, sweeps: int) -> float:
        """Search, and return the best rate.

        Args:
            quantiles: Quantiles of the probabilities that are tried for each threshold.
            sweeps: Most turns of all thresholds from where a search begins.
        """
        grids, n = self.grids(quantiles), len(self.candidates)
        together = [tuple(shared) for shared in zip(*(grid[:quantiles] for grid in self._raw(quantiles)), strict=True)]
        together += [(value,) * (n + 1) for value in SHARED]
        alone = [
            (*(value if i == k else NEVER for i in range(n)), drafting)
            for k in range(n if n > 1 else 0)
            for value in SHARED
            for drafting in sorted({value, 0.3, 0.5})
        ]
        for starts in (together, alone):
            if starts:
                self._climb(max(starts, key=self.rate), grids, sweeps)
        self._refine(grids)
        return self.played[self.best]

    def grids(self, quantiles: int) -> list[list[float]]:
        """What is tried for each candidate and for drafting on: always, quantiles of what was seen, `SHARED`, never."""
        return [sorted({0.0, *values, *SHARED, NEVER}) for values in self._raw(quantiles)]

    def _raw(self, quantiles: int) -> list[list[float]]:
        """Quantiles at each candidate, and over all of them."""
        shares = np.arange(1, quantiles + 1) / (quantiles + 1)
        seen = [*self._probabilities.T, self._probabilities.ravel()]
        return [np.quantile(column, shares).clip(0, 1).round(6).tolist() for column in seen]

    def _climb(self, here: Limits, grids: list[list[float]], sweeps: int) -> None:
        """Move one threshold after the other to its best value."""
        for _ in range(sweeps):
            before = self.rate(here)
            for k, grid in enumerate(grids):
                here = max((_moved(here, k, value) for value in (here[k], *grid)), key=self.rate)
            if self.rate(here) <= before * (1 + ENOUGH):
                break

    def _refine(self, grids: list[list[float]]) -> None:
        """Try values between the best thresholds and their neighbours, ever closer."""
        for halvings in range(1, REFINEMENTS + 1):
            for k, grid in enumerate(grids):
                value = self.best[k]
                if value == NEVER:
                    continue
                below = max((other for other in grid if other < value), default=value)
                above = min((other for other in grid if other > value), default=value)
                for other in (below, above):
                    self.rate(_moved(self.best, k, round(value + (other - value) / 2**halvings, 6)))


def _moved(limits: Limits, k: int, value: float) -> Limits:
    return (*limits[:k], value, *limits[k + 1 :])


def _on_feature(threshold: float) -> float:
    """The upper limit of the surprisal that a threshold stands for, as the policy has it."""
    return -math.log(threshold) if threshold > 0 else math.inf
