"""The decoding loop for many texts: rounds in lockstep, each row by its own decisions.

A round of all rows that are not done yet:

0. Pre-scan of each row.
1. One sweep through the layers with the newest token of each row: blind rows leave at their layer, scanning rows where
   they exit or at the last candidate, rows that copy from the text, with all that they copied, at the layer that prunes
   it. Rows that skip, or copy unpruned, wait before the first layer.
2. Draft steps: one sweep with the newest drafted token of each row that is still drafting, up to the deepest exit layer
   among them; each leaves at its own and is asked there.
3. Verification: one sweep with all states of all rows, each row joining at the layer where its states are.
4. Rows that are done drop out, the others forget what was rejected: slots are positions, so nothing moves.

In every sweep all rows are asked before any of them draws, so no decision can know another row's token of that step.
Each layer sees each position of each row once a round, but for padding, whose slots are written again before anybody
looks at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from lede.batch_party import Party
from lede.batch_row import BatchRow
from lede.draft import UNKNOWN, Draft, HeadRead
from lede.lookup import agreeing
from lede.models import EarlyExitModel
from lede.observer import Observer
from lede.policies.base import ExitAt, Lookup, Plan, Policy, PreScan
from lede.statistics import Meter

PREFILL_TOKENS = 4096
"""Most tokens of prompts that go through the layers at once, padding included, unless one prompt is longer."""

Tokens = dict[int, tuple[int, ...]]
"""New tokens by the number of the row."""


class BatchDecoder:
    """Decodes a batch of texts.

    Args:
        model: The model.
        policy: Who decides for all rows, by what it is told alone; None decodes plainly.
        rows: The texts, numbered from 0.
        meter: Where the time of the whole batch is booked; rows count rounds and head reads themselves.
    """

    def __init__(
        self, model: EarlyExitModel, policy: Policy | None, rows: Sequence[BatchRow], meter: Meter | None = None
    ) -> None:
        self.model = model
        self.policy = policy
        self.rows = list(rows)
        self.meter = meter or Meter()
        self._candidates: tuple[int, ...] = ()
        self._observer: Observer | None = None
        self._second_reads = False
        if policy is not None:
            self._candidates = policy.candidates_for(model.n_layers)
            features = policy.features
            if features is not None:
                self._observer = Observer(features, model.n_layers, model.vocab_size)
                self._second_reads = features.draft_agreement
        # the last slot of the longest text never holds a token that anybody looks at: padding may go there
        self.cache = model.new_cache(max(row.budget for row in self.rows), len(self.rows))

    @torch.inference_mode()
    def decode(self) -> Iterator[Tokens]:
        """Yield the tokens of the prefill and then of every round; rows that are done have none."""
        self.meter.enter("prefill")
        self._prefill()
        self.meter.enter("other")
        yield {row.number: tuple(row.new) for row in self.rows}
        active = self._going_on(sorted(self.rows, key=lambda row: row.place))
        while active:
            tokens = self._round(active)
            self.meter.enter("other")
            yield tokens
            active = self._going_on(active)

    def _prefill(self) -> None:
        """Run the prompts through all layers, those of like lengths together, and take the first tokens."""
        ordered = sorted(self.rows, key=lambda row: row.n_prompt)
        for place, row in enumerate(ordered):
            row.place = place
        while ordered:
            n = 1
            while n < len(ordered) and (n + 1) * ordered[n].n_prompt <= PREFILL_TOKENS:
                n += 1
            group, ordered = ordered[:n], ordered[n:]
            party = Party.of_tokens(self.model, self.cache, group, [0] * n, [row.ids for row in group])
            party.run(self.model.n_layers)
            for row, logits in zip(group, party.last_logits(), strict=True):
                row.begin(logits, self.policy, self._observer, self.meter)

    def _going_on(self, active: list[BatchRow]) -> list[BatchRow]:
        """Rows that are not done, moved so that their places in the cache have no gaps."""
        going_on = [row for row in active if not row.done]
        n = len(going_on)
        free = sorted(set(range(n)) - {row.place for row in going_on})
        for row in [row for row in going_on if row.place >= n]:
            target = free.pop()
            self.cache.move_row(row.place, target, row.position)
            row.place = target
        return sorted(going_on, key=lambda row: row.place)

    def _round(self, rows: list[BatchRow]) -> Tokens:
        """One round of rows that are not done."""
        self.meter.enter("policy")
        plans = {row.number: self._plan(row) for row in rows}
        self.meter.enter("draft")
        drafting = self._scan(rows, plans)
        while drafting:
            drafting = self._draft_on([row for row in drafting if not row.draft_ends_text])
        self.meter.enter("verify")
        party: Party | None = None
        for depth, last in pairwise([*sorted({row.draft.exit_layer for row in rows}), self.model.n_layers]):
            joining = [row for row in rows if row.draft.exit_layer == depth]
            party = Party.of_drafts(self.model, self.cache, depth, joining, party)
            party.run(last)
        assert party is not None
        return {row.number: row.commit(logits) for row, logits in zip(party.rows, party.logits(), strict=True)}

    def _plan(self, row: BatchRow) -> Plan:
        """What a row does in this round; a plain pass where it may not draft."""
        remaining = row.budget - len(row.ids)
        row.copied = []
        row.cap = 0 if self.policy is None else min(self.policy.config.max_draft, remaining - 1)
        if self.policy is None or row.cap < 1:
            return PreScan.SKIP
        row.decider.start()
        plan = row.decider.choose_plan(remaining, len(row.ids))
        if isinstance(plan, ExitAt):
            self.model.check_exit_layer(plan.exit_layer)
            row.cap = row.cap if plan.length is None else min(row.cap, plan.length)
        elif isinstance(plan, Lookup):
            plan.check(self.model.n_layers)
            row.copied = row.decider.copied(plan, remaining - 1)
        elif not isinstance(plan, PreScan):
            raise ValueError(
                f"pre_scan of the {self.policy.kind} policy must answer SKIP, SCAN, ExitAt or Lookup in a batch, got "
                f"{plan!r}; "
                "decode the prompts one by one for drafts with gaps"
            )
        return plan

    def _scan(self, rows: list[BatchRow], plans: dict[int, Plan]) -> list[BatchRow]:
        """Take each row's newest token to where its draft starts; returns the rows that drafted a token."""
        party = Party.of_tokens(
            self.model, self.cache, rows, [row.position for row in rows], [row.newest for row in rows]
        )
        goals: dict[int, int] = {}
        for row, state in party.states():
            plan = plans[row.number]
            row.draft = _begun(plan, state, row.copied)
            goal = _goal(plan, row.copied, self._candidates)
            if goal:
                goals[row.number] = goal
        scanning = [row for row in rows if plans[row.number] is PreScan.SCAN]
        stops = {goals[row.number] for row in rows if row.number in goals and plans[row.number] is not PreScan.SCAN}
        walking = [row for row in rows if row.number in goals]
        drafting: list[BatchRow] = []
        reads: dict[int, HeadRead] = {}
        tokens_before: dict[int, int] = {}
        for layer in sorted(stops.union(self._candidates if scanning else ())):
            walking = [row for row in walking if row.draft.exit_layer < goals[row.number]]
            if not walking:
                break
            party.keep(walking)
            self.meter.enter("draft")
            party.run(layer)
            asked: list[BatchRow] = []
            for row, state in party.states():
                if plans[row.number] is PreScan.SCAN:
                    if layer not in self._candidates:
                        continue
                    asked.append(row)
                elif layer < goals[row.number]:
                    continue
                elif row.copied:
                    self._prune(row, layer, state)
                    continue
                else:
                    drafting.append(row)
                row.draft = Draft(layer, [state], fixed=_length(plans[row.number]))
            if self._observer is not None:
                reads.update(self._read(asked))
            for row in asked:
                read = reads.get(row.number)
                if row.decider.exits(layer, read, tokens_before.get(row.number, UNKNOWN)):
                    drafting.append(row)
                    goals[row.number] = layer
                elif read is not None:
                    tokens_before[row.number] = row.decider.look(read).token
        self.meter.enter("draft")
        drafting.sort(key=lambda row: row.place)
        self._draw(drafting, reads)
        return drafting

    def _prune(self, row: BatchRow, layer: int, state: torch.Tensor) -> None:
        """Keep of what a row copied what a layer would have drafted too."""
        section = self.meter.enter("head")
        said = self.model.head(state.to(self.model.device))[0].argmax(-1).tolist()
        self.meter.enter(section)
        row.head_reads += state.shape[1]
        n_kept = agreeing(row.copied, said)
        tokens = row.copied[:n_kept]
        row.draft = Draft(layer, [state[:, : n_kept + 1]], tokens, [None] * n_kept, lookup=row.draft.lookup)

    def _draft_on(self, rows: list[BatchRow]) -> list[BatchRow]:
        """Take each row's newest drafted token to its exit layer; returns the rows that drafted one more."""
        if not rows:
            return []
        starts = [row.position + len(row.draft.tokens) for row in rows]
        party = Party.of_tokens(self.model, self.cache, rows, starts, [row.draft.tokens[-1:] for row in rows])
        going = [row for row in rows if len(row.draft.tokens) < row.cap]  # others only make the bonus token possible
        asked = [row for row in going if row.draft.fixed is None]
        below = {row.number: self._below(row.draft.exit_layer) for row in asked} if self._second_reads else {}
        lower: dict[int, torch.Tensor] = {}
        for layer in sorted({*(row.draft.exit_layer for row in rows), *below.values()} - {0}):
            party.keep([row for row in party.rows if row.draft.exit_layer >= layer])
            party.run(layer)
            for row, state in party.states():
                if row.draft.exit_layer == layer:
                    row.draft.states.append(state)
                elif below.get(row.number) == layer:
                    lower[row.number] = state
        reads = self._read(asked) if self._observer is not None else {}
        tokens_before = self._tokens([row for row in asked if row.number in lower], lower)
        on = [row for row in going if row.draft.fixed is not None]
        for row in asked:
            read, before = reads.get(row.number), tokens_before.get(row.number, UNKNOWN)
            if row.decider.drafts_on(row.draft.exit_layer, len(row.draft.tokens), read, before):
                on.append(row)
        on.sort(key=lambda row: row.place)
        self._draw(on, reads)
        return on

    def _below(self, layer: int) -> int:
        """The candidate below an exit layer; 0 for none."""
        return max((c for c in self._candidates if c < layer), default=0)

    def _read(self, rows: list[BatchRow]) -> dict[int, HeadRead]:
        """Head reads of the rows' newest states."""
        return self._heads(rows, [row.draft.states[-1] for row in rows])

    def _tokens(self, rows: list[BatchRow], states: dict[int, torch.Tensor]) -> dict[int, int]:
        """The likeliest tokens of states below the exit layer."""
        if not rows or self._observer is None:
            return {}
        self.meter.enter("inspect")
        reads = self._heads(rows, [states[row.number] for row in rows])
        found = {number: self._observer.token(read.logits) for number, read in reads.items()}
        self.meter.enter("draft")
        return found

    def _heads(self, rows: list[BatchRow], states: list[torch.Tensor]) -> dict[int, HeadRead]:
        if not rows:
            return {}
        section = self.meter.enter("head")
        logits = self.model.head(torch.cat([state.to(self.model.device) for state in states]))[:, 0]
        self.meter.enter(section)
        for row in rows:
            row.head_reads += 1
        return {row.number: HeadRead(each) for row, each in zip(rows, logits, strict=True)}

    def _draw(self, rows: list[BatchRow], reads: dict[int, HeadRead]) -> None:
        """Draw the next token of each row's draft, reading the head where nobody looked."""
        unread = [row for row in rows if row.number not in reads]
        reads = {**reads, **self._read(unread)}
        for row in rows:
            row.decider.add(row.draft, reads[row.number], row.ids)


def _begun(plan: Plan, state: torch.Tensor, copied: list[int]) -> Draft:
    """A row's draft before the first layer."""
    if isinstance(plan, Lookup):
        return Draft(0, [state], list(copied), [None] * len(copied), lookup=plan)
    return Draft(0, [state])


def _length(plan: Plan) -> int | None:
    """Tokens that a plan drafts without asking; None where it asks."""
    return plan.length if isinstance(plan, ExitAt) else None


def _goal(plan: Plan, copied: list[int], candidates: tuple[int, ...]) -> int:
    """Layer that a row goes to before verification; 0 where it waits before the first."""
    if isinstance(plan, Lookup):
        return (plan.prune_at or 0) if copied else 0
    if plan is PreScan.SKIP:
        return 0
    return plan.exit_layer if isinstance(plan, ExitAt) else max(candidates, default=0)
