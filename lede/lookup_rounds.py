"""What a round that drafts from the text comes to, anywhere in a table of traces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lede.lookup_costs import LookupCosts
from lede.lookup_table import LookupTable
from lede.policies.base import Lookup
from lede.trace_table import Ints


@dataclass(frozen=True, eq=False)
class LookupRounds:
    """Rounds of one plan; one that drafts nothing is a plain pass, perhaps behind a look at the pruning layer."""

    drafted: Ints  # (round,)
    """Tokens that were verified; those that pruning left out are not among them."""
    accepted: Ints  # (round,)
    """Those that were right."""
    at_eos: npt.NDArray[np.bool_]  # (round,)
    """Whether the last token drafted ends the text and is right: then no token follows it."""
    seconds: npt.NDArray[np.float64]  # (round,)
    """Spent, the decision and the index aside."""
    read: Ints  # (round,)
    """Head reads at the pruning layer."""

    @property
    def tokens(self) -> Ints:
        """Tokens committed, `(round,)`."""
        return self.accepted + ~self.at_eos


def lookup_rounds(lookup: LookupTable, costs: LookupCosts, plan: Lookup, row: Ints, decision: Ints) -> LookupRounds:
    """Play a plan.

    Args:
        lookup: What the text would draft.
        costs: Seconds.
        plan: What is drafted.
        row: Row of the table where each round begins.
        decision: Its number in its text, from 1.
    """
    table = lookup.table
    context = table.prompt_length[np.searchsorted(table.first_row, row, side="right") - 1] + decision - 1
    room = np.maximum(table.max_new_tokens - decision - 1, 0)
    proposed = np.minimum(np.minimum(plan.length, room), lookup.proposed[row])
    # a token that ends the text is verified and not run
    ends = lookup.ends[row] & (proposed == lookup.proposed[row]) & (proposed > 0)
    drafted = proposed
    some = np.flatnonzero(proposed > 0)
    seconds, read = costs.plain[context], np.zeros_like(proposed)
    if plan.prune_at is not None:
        drafted = np.minimum(lookup.kept(plan.prune_at)[row], proposed)
        read[some] = (proposed + ~ends)[some]
        ends = ends & (drafted == proposed)
        seconds[some] = costs.pruned(plan.prune_at, read[some], (drafted + ~ends)[some], context[some])
    else:
        seconds[some] = costs.unpruned((drafted + ~ends)[some], context[some])
    accepted = np.minimum(lookup.run[row], drafted)
    return LookupRounds(drafted, accepted, ends & (accepted == drafted) & (drafted > 0), seconds, read)
