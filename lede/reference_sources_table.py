"""What every plan of the pre-scan brings at every row of a table, and what it saves in the end.

All plans are known at all rows: rounds of layers from `lede.round_outcomes`, copies from `lede.lookup_rounds`. So plans
are compared on the same text, whose luck cancels, and a policy's seconds from any row to the end of its text follow by
backward induction,

    S(row) = seconds(row, plan) + S(row + tokens(row, plan)),    S(end) = 0.

A plan saves what a plain pass and the policy after it would have spent more than the plan and the policy after it. As
every policy writes the same text, no price of tokens is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lede.acceptance import AcceptanceModel
from lede.cost_model import CostModel
from lede.features import FeatureConfig
from lede.lookup_costs import LookupCosts
from lede.lookup_rounds import lookup_rounds
from lede.lookup_table import LookupTable
from lede.policies.base import BLIND, Lookup
from lede.rewards import CONTINUE, EXIT
from lede.round_outcomes import Array, Bools, Ints, RoundOutcomes
from lede.trace_table import TraceTable


@dataclass(frozen=True, eq=False)
class PlannedRounds:
    """Rounds of every plan wherever they may begin; plans are numbered as actions of the pre-scan."""

    tokens: Ints  # (row, plan)
    """Committed."""
    seconds: Array  # (row, plan)
    """Spent, the decision and the index included."""


class SourceOutcomes(RoundOutcomes):
    """All rounds of a table under forecasts, from every source.

    Attributes:
        forced: Rows that leave no room for a draft: plain passes that ask nobody, `(row,)`.

    Args:
        table: Traces, with branches or without.
        costs: What operations cost.
        layers: Candidates, ascending.
        model: Forecasts at each of them.
        lookup: What the text drafts.
        lookups: The drafts from it to choose from.
        asked: What the policy observes in all.
        max_draft: Most tokens drafted in a round.
        seed: Of the acceptance of sampled drafts.
    """

    def __init__(
        self,
        table: TraceTable,
        costs: CostModel,
        layers: Sequence[int],
        model: AcceptanceModel,
        lookup: LookupTable,
        lookups: Sequence[Lookup],
        asked: FeatureConfig,
        max_draft: int = 12,
        seed: int = 0,
    ) -> None:
        super().__init__(table, costs, layers, model, max_draft, seed, asked)
        self.lookups = tuple(lookups)
        self.forced = self._cap < 1
        priced = LookupCosts(costs, table.max_context)
        self._index, rows = priced.index, np.arange(len(self._run))
        self._copies = [lookup_rounds(lookup, priced, plan, rows, self._decision) for plan in self.lookups]

    @property
    def n_plans(self) -> int:
        """Actions of the pre-scan."""
        return BLIND + len(self.layers) + len(self.lookups)

    def planned(self, thresholds: Sequence[float], survival: float) -> PlannedRounds:
        """Rounds of every plan.

        Args:
            thresholds: Least probability to exit with at each candidate of the scan.
            survival: Least survival to draft on.
        """
        n, plain = len(self._run), self._tables.plain[self._context]
        tokens, seconds = np.ones((n, self.n_plans), dtype=np.int64), np.zeros((n, self.n_plans))
        seconds[:, CONTINUE] = plain
        tokens[:, EXIT], seconds[:, EXIT] = self.scans(self.drafts(survival), self.layers, thresholds)
        first_copy = BLIND + len(self.layers)
        tokens[:, BLIND:first_copy], seconds[:, BLIND:first_copy] = self.drafts(survival, blind=True)
        for place, found in enumerate(self._copies, first_copy):
            tokens[:, place], seconds[:, place] = found.tokens, found.seconds
        seconds += self._tables.pre_scan(self.asked)
        tokens[self.forced], seconds[self.forced] = 1, plain[self.forced, None]
        return PlannedRounds(tokens, seconds + self._index * tokens)

    @property
    def first_rows(self) -> Ints:
        """Where texts begin, `(prompt,)`; those without a decision have none."""
        return np.asarray(self.table.first_row[self.table.n_decided > 0])

    def following(self, rounds: PlannedRounds) -> tuple[Ints, Bools]:
        """Row after each plan, and whether it is still inside the text, `(row, plan)` each; the last row if not."""
        following, last = np.arange(len(self._run))[:, None] + rounds.tokens, self._last_row[:, None]
        return np.minimum(following, last), following <= last

    def to_go(self, rounds: PlannedRounds, choice: Ints) -> Array:
        """Seconds from each row to the end of its text, `(row,)`.

        Args:
            rounds: Of every plan.
            choice: Plan at each row, `(row,)`.
        """
        rows, table = np.arange(len(choice)), self.table
        following, inside = (of_plans[rows, choice] for of_plans in self.following(rounds))
        left = rounds.seconds[rows, choice].copy()
        for decision in range(int(table.n_decided.max()), 0, -1):
            row = table.first_row[table.n_decided >= decision] + decision - 1
            left[row] += np.where(inside[row], left[following[row]], 0.0)
        return left

    def total(self, left: Array) -> float:
        """Seconds of all texts, of `to_go`."""
        return float(left[self.first_rows].sum())

    def saved(self, rounds: PlannedRounds, left: Array) -> Array:
        """Seconds that each plan saves against a plain pass if `to_go` says what comes after, `(row, plan)`."""
        following, inside = self.following(rounds)
        spent = rounds.seconds + np.where(inside, left[following], 0.0)
        return np.asarray(spent[:, :1] - spent)
