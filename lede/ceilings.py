"""The clairvoyant ceiling: the fastest way to write each text, known in advance where every layer is right.

Whoever knows the matches inspects nothing, asks no policy and drafts no wrong token: at each decision a plain pass, or
a layer and a number of tokens no longer than its run of matches. Every plan writes the same text, so the ratio of
tokens to seconds is greatest where the seconds are fewest, and those follow exactly by backward induction over the
decisions of each prompt,

    S(t) = min(plain(t) + S(t + 1), min over l, n of round(t, l, n) + S(t + tokens)),    S(end) = 0.

Where the text itself may draft (`lede.lookup_table`), it is one more l, right for as long as its proposal is.

With gamma = 1 and a price of lambda tokens a second, V(t) = tokens left - lambda S(t).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lede.cost_model import CostModel
from lede.cost_tables import CostTables
from lede.lookup_costs import LookupCosts
from lede.lookup_table import LookupTable
from lede.trace_table import Ints, TraceTable

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ceiling:
    """What the clairvoyant does, over all prompts."""

    rate: float
    """Tokens after the first over seconds after the prefill."""
    speedup: float
    """Over plain decoding of the same texts."""
    draft_length: float | None
    """Mean tokens drafted in the rounds that draft; None where none does."""
    exit_layer: float | None
    """Mean exit layer of the rounds that draft; None where none does."""
    layer_shares: dict[int, float]
    """Share of rounds by exit layer; 0 stands for plain passes and lookups."""
    lookup_share: float = 0.0
    """Share of rounds that draft by lookup."""


@dataclass(frozen=True, eq=False)
class Clairvoyant:
    """Values of every choice at every decision; rows as in the trace table."""

    table: TraceTable
    """The traces."""
    candidates: tuple[int, ...]
    """Layers that may draft, ascending."""
    max_draft: int
    """Most tokens drafted in a round."""
    blind: Array  # (ending, candidate, drafted, context)
    """Seconds of a round that drafts blind; ending 1 is an accepted end of sequence."""
    plain_seconds: Array  # (row,)
    """Seconds of a plain pass."""
    plain_value: Array  # (row,)
    """Seconds to the end of the text after a plain pass here, its own included."""
    draft_value: Array  # (row, candidate)
    """The same after the best draft at each candidate: of 1 token where its first one is wrong, infinite if the budget
    leaves no room for a draft."""
    draft_length: Ints  # (row, candidate)
    """Tokens of that draft."""
    lookup_value: Array  # (row,)
    """The same after the best draft from the text; infinite where it proposes nothing, or may not."""
    lookup_length: Ints  # (row,)
    """Tokens of that draft."""
    lookup_seconds: Array  # (q, context)
    """Seconds of a round that verifies a draft from the text, q tokens in all; column 0 is unused."""

    @cached_property
    def value(self) -> Array:
        """S of each decision, `(row,)`: the fewest seconds to the end of the text."""
        drafts = self.draft_value.min(axis=1, initial=np.inf)
        return np.asarray(np.minimum(np.minimum(self.plain_value, drafts), self.lookup_value))

    def value_at(self, prompt: Ints, decision: Ints) -> Array:
        """S of decisions that may lie behind the end of their text, where it is 0."""
        inside = decision <= self.table.n_decided[prompt]
        row = self.table.first_row[prompt] + decision - 1
        return np.where(inside, self.value[np.where(inside, row, 0)], 0.0)

    @cached_property
    def seconds(self) -> Array:
        """Fewest seconds of each text after the prefill, `(prompt,)`."""
        prompts = np.arange(self.table.n_prompts)
        return self.value_at(prompts, np.ones_like(prompts))

    @property
    def rate(self) -> float:
        """Tokens a second over all prompts: no policy is faster."""
        return float(self.table.n_decided.sum() / self.seconds.sum())

    @cached_property
    def plan(self) -> tuple[Ints, Ints]:
        """Exit layer (0 for none) and tokens drafted in each round, `(round,)`, rounds in no order.

        Tokens without a layer are drafted by lookup.
        """
        layers, lengths = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        layer_of = np.asarray((*self.candidates, 0), dtype=np.int64)  # the last one is the text
        prompt = np.flatnonzero(self.table.n_decided > 0)
        decision = np.ones_like(prompt)
        while prompt.size:
            row = self.table.first_row[prompt] + decision - 1
            drafting = np.concatenate((self.draft_value[row], self.lookup_value[row][:, None]), axis=1)
            best = drafting.argmin(axis=1)
            drafts = drafting[np.arange(row.size), best] < self.plain_value[row]
            length = np.concatenate((self.draft_length[row], self.lookup_length[row][:, None]), axis=1)
            n = np.where(drafts, length[np.arange(row.size), best], 0)
            layers.append(np.where(drafts, layer_of[best], 0))
            lengths.append(n)
            decision = decision + n + 1  # behind an end of sequence one too far, which ends the prompt all the same
            going = decision <= self.table.n_decided[prompt]
            prompt, decision = prompt[going], decision[going]
        return np.concatenate(layers), np.concatenate(lengths)

    def summary(self) -> Ceiling:
        """The ceiling in figures."""
        layer, length = self.plan
        drafts, exits = length > 0, layer > 0
        layers, counts = np.unique(layer, return_counts=True)
        return Ceiling(
            rate=self.rate,
            speedup=float(self.plain_seconds.sum() / self.seconds.sum()),
            draft_length=float(length[drafts].mean()) if drafts.any() else None,
            exit_layer=float(layer[exits].mean()) if exits.any() else None,
            layer_shares={int(each): float(n / layer.size) for each, n in zip(layers, counts, strict=True)},
            lookup_share=float((drafts & ~exits).mean()),
        )


def blind_seconds(tables: CostTables) -> Array:
    """Seconds of rounds that draft blind, `(ending, candidate, drafted, context)`; ending 1 is an accepted EOS.

    The context is the one before the round. Column 0 of `drafted` is unused.
    """
    n_contexts = tables.plain.size - tables.max_draft
    read = tables.head + tables.choice(None)
    again = tables.again + read  # (candidate, context)
    summed = np.concatenate((np.zeros((len(again), 1)), np.cumsum(again, axis=1)), axis=1)
    found = np.full((2, len(again), tables.max_draft + 1, n_contexts), np.inf)
    for n in range(1, tables.max_draft + 1):
        tokens = tables.draft[:, :n_contexts] + read + summed[:, n : n + n_contexts] - summed[:, 1 : 1 + n_contexts]
        # one more position goes to the exit layer, unread, so that there is a bonus token
        bonus = tables.again[:, n : n + n_contexts]
        found[0, :, n] = tokens + bonus + tables.verify[:, n + 1, :n_contexts]
        found[1, :, n] = tokens + tables.verify[:, n, :n_contexts]
    return found


def solve(
    table: TraceTable,
    costs: CostModel,
    candidates: Sequence[int],
    max_draft: int = 12,
    seed: int = 0,
    lookup: LookupTable | None = None,
) -> Clairvoyant:
    """The clairvoyant's values, exactly.

    Args:
        table: Traces.
        costs: Seconds.
        candidates: Layers that may draft, ascending.
        max_draft: Most tokens drafted in a round.
        seed: Of the acceptance of sampled drafts; give the simulation's.
        lookup: What the text drafts, to any length that was looked up; None where it may not. An index of the text is
            taken to cost nothing.

    Raises:
        ValueError: There is nothing that may draft, a candidate is outside 1..L-1, or a text stops before its budget
            without an end of sequence.
    """
    none = not candidates and lookup is None
    if none or min(candidates, default=1) < 1 or max(candidates, default=1) >= table.n_layers:
        raise ValueError(f"candidates {list(candidates)} must be layers within 1..{table.n_layers - 1}")
    table.check_ends()
    columns = np.asarray(candidates, dtype=np.int64) - 1
    tables = CostTables(costs, candidates, table.max_context, max_draft)
    blind = blind_seconds(tables)
    matches = table.matches(columns, seed)
    n_rows = len(matches)
    plain_seconds, plain_value = np.zeros(n_rows), np.zeros(n_rows)
    draft_value = np.full((n_rows, columns.size), np.inf)
    draft_length = np.ones((n_rows, columns.size), dtype=np.int64)
    lengths = np.arange(1, max_draft + 1)[:, None]
    n_decided, last = table.n_decided, int(table.n_decided.max())
    longest = 0 if lookup is None else lookup.most
    left = np.zeros((last + max(max_draft, longest) + 3, table.n_prompts))  # S by decision, 0 behind the end
    copying = _copying_seconds(costs, table.max_context, longest)
    lookup_value, lookup_length = np.full(n_rows, np.inf), np.ones(n_rows, dtype=np.int64)
    copied = np.arange(1, longest + 1)[:, None]
    run = np.zeros((columns.size, table.n_prompts), dtype=np.int64)  # matches from here on
    for t in range(last, 0, -1):
        lanes = np.flatnonzero(n_decided >= t)
        row, context = table.first_row[lanes] + t - 1, table.prompt_length[lanes] + t - 1
        run[:, lanes] = np.where(matches[row].T, run[:, lanes] + 1, 0)
        plain_seconds[row] = tables.plain[context]
        plain_value[row] = tables.plain[context] + left[t + 1, lanes]
        # a draft leaves room for the bonus in the budget; an accepted EOS needs none
        to_end = n_decided[lanes] - t + 1
        room = np.minimum(table.max_new_tokens - t - 1, to_end - ~table.ended_by_eos[lanes])
        ends = table.ended_by_eos[lanes] & (to_end == lengths)  # (drafted, lane)
        seconds = np.where(ends, blind[1][:, 1:, context], blind[0][:, 1:, context])
        after = seconds + np.where(ends, 0.0, left[t + 1 + lengths, lanes])  # (candidate, drafted, lane)
        after[(lengths > np.minimum(run[:, lanes], room)[:, None]).nonzero()] = np.inf
        astray = (run[:, lanes] == 0) & (room >= 1)
        after[:, 0][astray] = (blind[0][:, 1, context] + left[t + 1, lanes])[astray]
        best = after.argmin(axis=1)  # (candidate, lane)
        draft_length[row] = best.T + 1
        draft_value[row] = np.take_along_axis(after, best[:, None], axis=1)[:, 0].T
        left[t, lanes] = np.minimum(plain_value[row], draft_value[row].min(axis=1, initial=np.inf))
        if lookup is None:
            continue
        ends = table.ended_by_eos[lanes] & (to_end == copied)  # (copied, lane)
        seconds = np.where(ends, copying[1:-1, context], copying[2:, context])
        after = seconds + np.where(ends, 0.0, left[t + 1 + copied, lanes])
        after[copied > np.minimum(lookup.run[row], room)] = np.inf
        astray = (lookup.run[row] == 0) & (room >= 1) & (lookup.proposed[row] > 0)
        after[0, astray] = (copying[2, context] + left[t + 1, lanes])[astray]
        best = after.argmin(axis=0)
        lookup_length[row], lookup_value[row] = best + 1, after[best, np.arange(lanes.size)]
        left[t, lanes] = np.minimum(left[t, lanes], lookup_value[row])
    return Clairvoyant(
        table=table,
        candidates=tuple(int(each) for each in candidates),
        max_draft=max_draft,
        blind=blind,
        plain_seconds=plain_seconds,
        plain_value=plain_value,
        draft_value=draft_value,
        draft_length=draft_length,
        lookup_value=lookup_value,
        lookup_length=lookup_length,
        lookup_seconds=copying,
    )


def _copying_seconds(costs: CostModel, max_context: int, longest: int) -> Array:
    """Seconds of rounds that verify a draft from the text, `(q, context)`."""
    priced, contexts = LookupCosts(costs, max_context), np.arange(max_context + 1)
    rows = [priced.unpruned(np.full(contexts.size, q), contexts) for q in range(1, longest + 2)]
    return np.stack([np.full(contexts.size, np.inf), *rows])
