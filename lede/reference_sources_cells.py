"""The best plan for each cell of what the pre-scan knows, by policy iteration in tables: a check of the reference.

What is known before a round is sorted into cells by quantiles: the expected right tokens of a copy, the confidence
trace, the acceptance and the share of lookups that hit. In each cell the plan is taken that saves most on the mean of
the rows that fell into it, by the same table of all plans at all rows (`lede.reference_sources_table`), where the
policy's own seconds to the end of each text follow exactly. The thresholds of scan and draft are given, as a
source-value policy has them.

Departs from the reference: means of cells for regressions, and no prices.

Source: Howard, Dynamic programming and Markov processes (1960), for policy iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lede.draft_rounds import DraftRounds, Stage
from lede.reference_sources import SourceSearch
from lede.reference_sources_lanes import LayerThresholds
from lede.round_outcomes import Array, Ints
from lede.simulation import Decide, Simulation, play, rounds_of
from lede.trace_table import TraceTable

CELLS = (8, 3, 2, 2)
"""Cells by expected copies, `trace`, `acceptance` and `lookup_hits`; places without a match are cells of their own."""
_TURNS = 8  # of policy iteration
_COPY = 8  # tokens of the copy whose expectation sorts


class SourceCells:
    """The best plan in every cell.

    Attributes:
        plan: Of each cell, an action of the pre-scan, `(cell,)`.
        policy: Whose thresholds, forecast of copies and observation are taken.

    Args:
        search: What was seen at which row, and what every plan brings there; its policy is where the iteration begins.
        cells: Fineness, as `CELLS`.

    Raises:
        ValueError: The search has no policy yet.
    """

    def __init__(self, search: SourceSearch, cells: Sequence[int] = CELLS) -> None:
        if search.policy is None:
            raise ValueError("the search has no policy yet; call its improve first")
        self.policy, self._cells, self._costs = search.policy, tuple(cells), search.outcomes.costs
        rows, seen = search.visits()
        columns = self._columns(seen)
        matched = columns[0] > 0
        self._edges = [
            np.quantile(column[matched] if place == 0 else column, np.arange(1, n) / n)
            for place, (column, n) in enumerate(zip(columns, cells, strict=True))
        ]
        outcomes, visited, at = search.outcomes, self.cell(seen), self.cell(search.seen())
        planned = outcomes.planned(self.policy.limits.tolist(), self.policy.config.survival)
        choice, least = search.choices(), np.inf
        self.plan = np.zeros(self.n_cells, dtype=np.int64)
        for _ in range(_TURNS):
            left = outcomes.to_go(planned, choice)
            saved = outcomes.saved(planned, left)[rows]
            sums = np.stack([np.bincount(visited, column, self.n_cells) for column in saved.T], axis=1)
            plan = sums.argmax(axis=1)  # largest sum, so largest mean, of each cell
            choice = np.where(search.known, plan[at], choice)
            if (seconds := outcomes.total(outcomes.to_go(planned, choice))) < least:
                least, self.plan = seconds, plan

    @property
    def n_cells(self) -> int:
        """Cells."""
        return int(np.prod([self._cells[0] + 1, *self._cells[1:]]))

    def cell(self, seen: npt.NDArray[np.float32]) -> Ints:
        """Cells of observations `(n, feature)`, `(n,)`."""
        found = np.zeros(len(seen), dtype=np.int64)
        for place, (column, edges, n) in enumerate(zip(self._columns(seen), self._edges, self._cells, strict=True)):
            here = np.searchsorted(edges, column, side="right")
            found = found * n + here if place else np.where(column > 0, here + 1, 0)
        return found

    def simulate(self, table: TraceTable, seed: int = 0) -> Simulation:
        """Decode every prompt of a table with it."""
        rounds = rounds_of(self.policy, table, self._costs, seed=seed)
        return play(rounds, self._decisions(table.n_prompts))

    def _decisions(self, n_lanes: int) -> Decide:
        policy = self.policy
        later = LayerThresholds(policy.acceptance, policy.layer_places, n_lanes, policy.limits, policy.config.survival)

        def decide(lanes: DraftRounds) -> Ints:
            seen = lanes.observe()
            return np.where(lanes.stage == Stage.PRE_SCAN, self.plan[self.cell(seen)], later(lanes, seen))

        return decide

    def _columns(self, seen: npt.NDArray[np.float32]) -> list[Array]:
        names, copies = self.policy.features.names, self.policy.copies
        likely = copies.expected(seen[:, [names.index(name) for name in copies.features.names]], (_COPY,))[:, 0]
        others = [
            seen[:, names.index(name)].astype(np.float64) if name in names else np.zeros(len(seen))
            for name in ("trace", "acceptance", "lookup_hits")
        ]
        return [likely, *others]
