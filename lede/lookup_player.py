"""Static lookups played on recorded texts, round by round, without the language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lede.lookup import LookupConfig
from lede.lookup_costs import LookupCosts
from lede.lookup_table import LookupTable
from lede.policies.base import Lookup

if TYPE_CHECKING:
    from lede.cost_model import CostModel


@dataclass(frozen=True)
class LookupSetting:
    """One static lookup."""

    config: LookupConfig
    """How the text is searched."""
    plan: Lookup
    """What a round drafts."""

    @property
    def text(self) -> str:
        """As a command line gives it, without what is the default anyway."""
        default = LookupConfig()
        parts = [f"draft_length={self.plan.length}"]
        for key in ("max_suffix", "min_suffix", "continuation"):
            if getattr(self.config, key) != getattr(default, key):
                parts.append(f"{key}={getattr(self.config, key)}")
        if self.plan.prune_at is not None:
            parts.append(f"prune_at={self.plan.prune_at}")
        return f"lookup:{';'.join(parts)}"


@dataclass(frozen=True)
class Played:
    """What a setting came to on the texts."""

    setting: LookupSetting
    """The setting."""
    rate: float
    """Tokens a second by the cost model, after the prefill, sums over texts."""
    speedup: float
    """That over plain decoding's."""
    rounds: int
    """Rounds, plain passes among them."""
    drafting: int
    """Rounds that verified copied tokens."""
    tokens: int
    """Tokens that the rounds wrote."""


class LookupPlayer:
    """Plays static lookups on the texts of a table, round by round as the decoder runs them.

    Args:
        lookups: What would be proposed at every row.
        costs: What operations cost.
    """

    def __init__(self, lookups: LookupTable, costs: CostModel) -> None:
        self.lookups, self.costs = lookups, costs
        self._seconds = LookupCosts(costs, lookups.table.max_context)
        self._proposed, self._run = lookups.proposed.tolist(), lookups.run.tolist()
        self._ends = lookups.ends.tolist()
        contexts = range(lookups.table.max_context + 1)
        self._plain = [costs.plain_seconds(context) for context in contexts]
        texts = zip(map(len, lookups.table.prompt_ids), lookups.table.n_decided.tolist(), strict=True)
        self._plain_seconds = sum(sum(self._plain[n : n + decided]) for n, decided in texts)

    def play(self, plan: Lookup) -> Played:
        """All texts from their first decision to their end."""
        table = self.lookups.table
        kept = None if plan.prune_at is None else self.lookups.kept(plan.prune_at).tolist()
        plain_contexts: list[int] = []  # of plain passes
        rounds: list[tuple[int, int, int]] = []  # rows read at the pruning layer, rows that go on, context
        tokens = 0
        for first, decided, n_prompt in zip(
            table.first_row.tolist(), table.n_decided.tolist(), map(len, table.prompt_ids), strict=True
        ):
            t = 1  # new tokens so far
            while t <= decided:
                row, context = first + t - 1, n_prompt + t - 1
                n = min(self._proposed[row], plan.length, table.max_new_tokens - t - 1)
                if n < 1:
                    plain_contexts.append(context)
                    t, tokens = t + 1, tokens + 1
                    continue
                ended = self._ends[row] and n == self._proposed[row]
                read = n + (not ended)
                if kept is not None and kept[row] < n:
                    n, ended = kept[row], False
                accepted = min(self._run[row], n)
                wrote = accepted + (not (ended and accepted == n))
                rounds.append((read, n + (not ended), context))
                t, tokens = t + wrote, tokens + wrote
        seconds = sum(self._plain[context] for context in plain_contexts) + self._drafting_seconds(plan, rounds)
        seconds += tokens * self._seconds.index
        return Played(
            LookupSetting(self.lookups.config, plan),
            rate=tokens / seconds,
            speedup=self._plain_seconds / seconds,
            rounds=len(plain_contexts) + len(rounds),
            drafting=len(rounds),
            tokens=tokens,
        )

    def _drafting_seconds(self, plan: Lookup, rounds: Sequence[tuple[int, int, int]]) -> float:
        if not rounds:
            return 0.0
        read, q, context = (np.asarray(column, dtype=np.int64) for column in zip(*rounds, strict=True))
        if plan.prune_at is None:
            return float(self._seconds.unpruned(q, context).sum())
        return float(self._seconds.pruned(plan.prune_at, read, q, context).sum())
