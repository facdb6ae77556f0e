"""The process that deployment runs, played on traces for many prompts at once.

A lane decodes one prompt: pre-scan, scan, draft, verification, until the text ends. Seconds are charged at the action
that spends them, tokens are paid at the verification that commits them, and nothing that a policy sees depends on a
match before that. After a wrong draft the drafter is on a text of its own: it sees the branch that was recorded for it
(`TraceTable.branch_of`), or, where there are no branches, what it would have seen on the target's text.

A draft copied from the text needs no branch, as all of it is a function of the text (`lede.lookup_table`).

Departs from deployment where the text is sampled: the text is the recorded one, whether or not a draft led to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lede.cost_tables import CostTables
from lede.features import FeatureConfig
from lede.lane_features import LaneFeatures
from lede.lookup_costs import LookupCosts
from lede.lookup_rounds import lookup_rounds
from lede.lookup_table import LookupTable
from lede.policies.base import BLIND, ExitAt, Lookup
from lede.rewards import CONTINUE, EXIT
from lede.round_log import RoundLog
from lede.round_step import Stage, StepResult
from lede.trace_table import Ints, TraceTable

__all__ = ["DraftRounds", "Stage", "StepResult"]

Bools = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]


class DraftRounds:
    """Lanes that step through rounds.

    Actions: in the pre-scan 0 = plain pass, 1 = scan, 2 + k = draft blind at candidate k of K, 2 + K + j = plan j of
    those that leave nothing to decide, lookups and drafts of a fixed layer and length; in the scan 0 = go on (past the
    last candidate: plain pass through the rest), 1 = exit here; in the draft 0 = stop, 1 = draft on. With no candidate
    there is no scan. A lookup that finds nothing is a plain pass.

    Args:
        table: Traces.
        costs: Seconds; its candidates are the ones that may be inspected, its cap bounds the draft.
        features: What the policy observes; None for a policy that looks at nothing and is charged for nothing.
        decides_pre_scan: Whether the policy is asked before the scan, and charged for it; otherwise action 1 is the
            only legal one there.
        seed: Of the acceptance of sampled drafts.
        log: Where rounds are written; None writes none.
        lookup: What the text's own drafts would be; None where no index of the text is kept.
        plans: The lookups and fixed drafts that may be chosen; lookups need `lookup`, fixed drafts a candidate's layer.

    Raises:
        ValueError: A candidate is none of the traces' layers, a plan can't be played, there is neither a candidate nor
            an index, or a text stops before its budget without an end.
    """

    def __init__(
        self,
        table: TraceTable,
        costs: CostTables,
        features: FeatureConfig | None = None,
        decides_pre_scan: bool = True,
        seed: int = 0,
        log: RoundLog | None = None,
        lookup: LookupTable | None = None,
        plans: Sequence[Lookup | ExitAt] = (),
    ) -> None:
        table.check_ends()
        self.table, self.costs, self.features, self.log = table, costs, features, log
        self.candidates = np.asarray(costs.candidates, dtype=np.int64)
        if self.candidates.size and self.candidates[-1] >= table.n_layers:
            raise ValueError(f"candidate layer {self.candidates[-1]} is outside 1..{table.n_layers - 1} of the traces")
        if not self.candidates.size and not (decides_pre_scan and lookup is not None):
            raise ValueError("without candidates only a policy that decides the pre-scan among lookups can be played")
        self.lookup = lookup
        self.plans: list[Lookup | ExitAt] = []
        for plan in plans:
            self.action_of(plan)
        self.decides_pre_scan = decides_pre_scan
        self._matches = table.matches(self.candidates - 1, seed)
        branch_of = [table.branch_of(int(layer)) for layer in self.candidates]
        self._branch_of = np.stack(branch_of, axis=1) if branch_of else np.zeros((len(table.match), 0), dtype=np.int32)
        self._seen = LaneFeatures(table, self.candidates, features or FeatureConfig(), lookup)
        # asking costs in every stage; drawing a token needs a head read of its own where nobody asked
        self._ask_pre_scan = costs.pre_scan(features) if decides_pre_scan else 0.0
        self._ask_scan = costs.decision(features)
        self._ask_draft = np.full(self.candidates.size, costs.decision(features, drafting=True))
        self._ask_draft[:1] = self._ask_scan  # below the lowest candidate there is none to agree with
        self._lookup_costs = LookupCosts(costs.costs, table.max_context)
        self._draw = costs.choice(features) + (costs.head if features is None else 0.0)
        self._blind = costs.costs.blind_seconds(features)
        self._unseen = costs.choice(None) + costs.head  # a token of a fixed draft

    @property
    def n_actions(self) -> int:
        """Actions of the pre-scan, the stage that has most."""
        return BLIND + self.candidates.size + len(self.plans)

    @property
    def lookups(self) -> list[Lookup]:
        """The plans that copy from the text."""
        return [plan for plan in self.plans if isinstance(plan, Lookup)]

    @property
    def fixed_drafts(self) -> list[ExitAt]:
        """The plans that draft so many tokens at one layer."""
        return [plan for plan in self.plans if isinstance(plan, ExitAt)]

    def action_of(self, plan: Lookup | ExitAt) -> int:
        """The action that drafts by a plan; a lookup or fixed draft that is none yet becomes one.

        Raises:
            ValueError: The plan can't be played.
        """
        if isinstance(plan, ExitAt):
            if plan.exit_layer not in self.candidates:
                known = self.candidates.tolist()
                raise ValueError(f"a draft at layer {plan.exit_layer} can't be played; candidates are {known}")
            if plan.length is None:
                return BLIND + int(np.searchsorted(self.candidates, plan.exit_layer))
        elif self.lookup is None or plan.length > self.lookup.most:
            longest = "no index is kept" if self.lookup is None else f"at most {self.lookup.most} tokens are looked up"
            raise ValueError(f"a lookup of {plan.length} tokens can't be played: {longest}")
        else:
            plan.check(self.table.n_layers)
        if plan not in self.plans:
            self.plans.append(plan)
        return BLIND + self.candidates.size + self.plans.index(plan)

    def start(self, prompts: Ints) -> None:
        """Begin one lane for each of `prompts` (places in the table)."""
        n = prompts.size
        self.prompt = np.zeros(n, dtype=np.int64)
        self.stage = np.full(n, Stage.DONE, dtype=np.int8)
        self.decision = np.ones(n, dtype=np.int64)  # t of the round's first position
        self.candidate = np.zeros(n, dtype=np.int64)
        self.n_scanned = np.zeros(n, dtype=np.int64)
        self.n_drafted = np.zeros(n, dtype=np.int64)
        self.fixed = np.zeros(n, dtype=np.int64)  # length of a fixed draft; 0 where the policy is asked
        self.n_accepted = np.zeros(n, dtype=np.int64)  # of this round so far: what no policy sees
        self.branch = np.full(n, -1, dtype=np.int64)
        self.seconds, self.tokens = np.zeros(n), np.zeros(n, dtype=np.int64)
        self.pruning_reads = np.zeros(n, dtype=np.int64)
        self._round_start = np.zeros(n)
        self._seen.start(n)
        self._step_seconds, self._step_tokens = np.zeros(n), np.zeros(n, dtype=np.int64)
        self._drafted, self._accepted = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        self._ended = np.zeros(n, dtype=np.bool_)
        self.restart(np.arange(n), prompts)

    def restart(self, lanes: Ints, prompts: Ints) -> None:
        """Put lanes at the beginning of other prompts."""
        self.prompt[lanes] = prompts
        self.decision[lanes] = 1
        self.seconds[lanes] = self.tokens[lanes] = self.pruning_reads[lanes] = 0
        self._step_seconds[lanes] = self._step_tokens[lanes] = 0
        self._seen.restart(lanes, self.table.anchor[prompts])
        self._begin_round(lanes)
        self.seconds[lanes] += self._step_seconds[lanes]
        self.tokens[lanes] += self._step_tokens[lanes]

    @property
    def row(self) -> Ints:
        """Row of the table of each lane's position on the target's text, clipped to its prompt, `(lane,)`."""
        last = self.table.n_decided[self.prompt] - 1
        place = np.minimum(self.decision - 1 + self.n_drafted, np.maximum(last, 0))
        # a prompt without a decision at the very end has no row at all
        return np.asarray(np.minimum(self.table.first_row[self.prompt] + place, len(self.table.match) - 1))

    @property
    def layer(self) -> Ints:
        """Layers that each lane's position went through when the policy is asked; 0 in the pre-scan, `(lane,)`."""
        if not self.candidates.size:
            return np.zeros(self.stage.size, dtype=np.int64)
        return np.where(self.stage == Stage.PRE_SCAN, 0, self.candidates[self.candidate])

    def observe(self) -> npt.NDArray[np.float32]:
        """What the policy sees, `(lane, feature)`; lanes that are done show their last position."""
        offset = self.n_drafted - self.n_accepted - 1  # positions since the wrong draft
        return self._seen.observe(self.stage, self.candidate, self.row, self.branch, offset, self.n_drafted)

    def history(self, lane: int) -> tuple[float, float | None, int]:
        """Confidence trace in nats, acceptance of the recent rounds that drafted, rounds since the last of them."""
        return self._seen.history(lane)

    def legal(self) -> Bools:
        """Actions that each lane may take, `(lane, action)`; action 0 alone where it is done."""
        allowed = np.zeros((self.stage.size, self.n_actions), dtype=np.bool_)
        before = self.stage == Stage.PRE_SCAN
        allowed[:, CONTINUE] = ~before | self.decides_pre_scan
        allowed[:, EXIT] = (self.stage != Stage.DONE) & (self.candidates.size > 0)
        allowed[:, BLIND:] = (before & self.decides_pre_scan)[:, None]
        return allowed

    def step(self, actions: npt.NDArray[np.integer]) -> StepResult:
        """Take one action in every lane; lanes that are done ignore theirs. The actions must be legal."""
        self._step_seconds[:] = 0
        self._step_tokens[:] = 0
        self._ended = np.zeros(self.stage.size, dtype=np.bool_)
        self._drafted[:] = self._accepted[:] = 0
        by_stage = [np.flatnonzero(self.stage == stage) for stage in (Stage.PRE_SCAN, Stage.SCAN, Stage.DRAFT)]
        for lanes, act in zip(by_stage, (self._pre_scan, self._scan, self._draft), strict=True):
            if lanes.size:
                act(lanes, actions[lanes])
        self.seconds += self._step_seconds
        self.tokens += self._step_tokens
        return StepResult(
            self._step_seconds.copy(),
            self._step_tokens.copy(),
            self._ended,
            self.stage == Stage.DONE,
            self._drafted.copy(),
            self._accepted.copy(),
        )

    def _context(self, lanes: Ints) -> Ints:
        """Tokens in the cache before the round."""
        return self.table.prompt_length[self.prompt[lanes]] + self.decision[lanes] - 1

    def _pre_scan(self, lanes: Ints, actions: npt.NDArray[np.integer]) -> None:
        self._step_seconds[lanes] += self._ask_pre_scan
        skips, scans = lanes[actions == CONTINUE], lanes[actions == EXIT]
        if skips.size:
            self._plain_pass(skips, self.costs.plain[self._context(skips)])
        if scans.size:
            self.stage[scans] = Stage.SCAN
            self._inspect(scans, np.zeros(scans.size, dtype=np.int64))
        n_plans = BLIND + self.candidates.size
        blind = (actions >= BLIND) & (actions < n_plans)
        for j, plan in enumerate(self.plans):
            here = lanes[actions == n_plans + j]
            if not here.size:
                continue
            if isinstance(plan, ExitAt):
                self._draft_fixed(here, plan)
            else:
                self._look_up(here, plan)
        if blind.any():
            self._draft_blind(lanes[blind], actions[blind].astype(np.int64) - BLIND, self._blind)

    def _draft_blind(self, lanes: Ints, candidate: Ints, seconds: float) -> None:
        """The first token of a draft at a layer that nobody looked at, whose head read takes `seconds`."""
        self.candidate[lanes] = candidate
        self.stage[lanes] = Stage.DRAFT
        self._step_seconds[lanes] += self.costs.draft[candidate, self._context(lanes)] + seconds
        self._add_draft(lanes)

    def _draft_fixed(self, lanes: Ints, plan: ExitAt) -> None:
        """A whole round that drafts so many tokens at one layer."""
        assert plan.length is not None
        self.fixed[lanes] = plan.length
        self._draft_blind(lanes, np.searchsorted(self.candidates, np.full(lanes.size, plan.exit_layer)), self._unseen)
        while (lanes := lanes[self.fixed[lanes] > 0]).size:  # a new round forgets it
            self._step_seconds[lanes] += self._unseen
            self._add_draft(lanes)

    def _inspect(self, lanes: Ints, candidate: Ints) -> None:
        self.candidate[lanes] = candidate
        self.n_scanned[lanes] += 1
        self._step_seconds[lanes] += self.costs.scan[candidate, self._context(lanes)] + self._ask_scan

    def _scan(self, lanes: Ints, actions: npt.NDArray[np.integer]) -> None:
        last = self.candidate[lanes] == self.candidates.size - 1
        goes_on, gives_up = lanes[(actions == CONTINUE) & ~last], lanes[(actions == CONTINUE) & last]
        exits = lanes[actions == EXIT]
        if goes_on.size:
            self._inspect(goes_on, self.candidate[goes_on] + 1)
        if gives_up.size:
            self._plain_pass(gives_up, self.costs.verify[-1, 1, self._context(gives_up)])
        if exits.size:
            self.stage[exits] = Stage.DRAFT
            self._step_seconds[exits] += self._draw
            self._add_draft(exits)

    def _draft(self, lanes: Ints, actions: npt.NDArray[np.integer]) -> None:
        stops, goes_on = lanes[actions == CONTINUE], lanes[actions == EXIT]
        if stops.size:
            self._verify(stops, "stop")
        if goes_on.size:
            self._step_seconds[goes_on] += self._draw
            self._add_draft(goes_on)

    def _add_draft(self, lanes: Ints) -> None:
        """One more token is drafted at each lane's position; then the next position, unless the draft ends here."""
        prompt, k, row = self.prompt[lanes], self.candidate[lanes], self.row[lanes]
        on_text = self.n_accepted[lanes] == self.n_drafted[lanes]
        offset = self.n_drafted[lanes] - self.n_accepted[lanes] - 1
        seen = self.fixed[lanes] == 0
        if seen.any():
            self._seen.left(lanes[seen], k[seen], row[seen], self.branch[lanes[seen]], offset[seen])
        match = on_text & self._matches[row, k]
        at_eos = match & self.table.ended_by_eos[prompt]
        at_eos &= self.decision[lanes] + self.n_drafted[lanes] == self.table.n_decided[prompt]
        self.n_drafted[lanes] += 1
        self.n_accepted[lanes] += match
        wrong = on_text & ~match
        self.branch[lanes[wrong]] = self._branch_of[row[wrong], k[wrong]]
        if at_eos.any():
            self._verify(lanes[at_eos], "eos")
            lanes = lanes[~at_eos]
        if not lanes.size:
            return
        drafted = self.n_drafted[lanes]
        self._step_seconds[lanes] += self.costs.again[self.candidate[lanes], self._context(lanes) + drafted]
        fixed = self.fixed[lanes]
        full = drafted == np.where(fixed > 0, np.minimum(fixed, self._cap(lanes)), self._cap(lanes))
        asked = lanes[~full & (fixed == 0)]
        self._step_seconds[asked] += self._ask_draft[self.candidate[asked]]
        if full.any():
            self._verify(lanes[full], "cap")

    def _look_up(self, lanes: Ints, plan: Lookup) -> None:
        """A whole round that drafts by lookup."""
        assert self.lookup is not None
        found = lookup_rounds(self.lookup, self._lookup_costs, plan, self.row[lanes], self.decision[lanes])
        self.pruning_reads[lanes] += found.read
        drafts = found.drafted > 0
        if not drafts.all():
            self._plain_pass(lanes[~drafts], found.seconds[~drafts])
        self._step_seconds[lanes[drafts]] += found.seconds[drafts]
        self._drafted[lanes], self._accepted[lanes] = found.drafted, found.accepted
        for which, ending in ((drafts & ~found.at_eos, "cap"), (found.at_eos, "eos")):
            here, tokens = lanes[which], found.tokens[which]
            if here.size:
                drafted, accepted = found.drafted[which], found.accepted[which]
                if self.log is not None:
                    self.n_drafted[here] = drafted
                    self._write(here, np.zeros_like(tokens), accepted, tokens, ending, lookup=True)
                rows = [self._row_of(here, np.minimum(i, tokens - 1)) for i in range(int(tokens.max()))]
                self._seen.looked_up(here, drafted, accepted, tokens, rows)
                self._commit(here, tokens)

    def _cap(self, lanes: Ints) -> Ints:
        remaining = self.table.max_new_tokens - self.decision[lanes]
        return np.minimum(self.costs.max_draft, remaining - 1)

    def _verify(self, lanes: Ints, ending: str) -> None:
        k, n, accepted = self.candidate[lanes], self.n_drafted[lanes], self.n_accepted[lanes]
        q = n + (ending != "eos")
        self._step_seconds[lanes] += self.costs.verify[k, q, self._context(lanes)]
        if self.log is not None:
            self._write(lanes, self.candidates[k], accepted, accepted + (ending != "eos"), ending)
        rows, unseen = self._row_of(lanes, accepted), self.fixed[lanes] > 0
        self._drafted[lanes], self._accepted[lanes] = n * unseen, accepted * unseen
        self._seen.verified(lanes, n, accepted, bonus=ending != "eos", rows=rows, unseen=unseen)
        self._commit(lanes, accepted + (ending != "eos"))

    def _row_of(self, lanes: Ints, offset: Ints) -> Ints:
        """Row of a position of the round on the target's text, clipped to the prompt."""
        prompt = self.prompt[lanes]
        t = np.minimum(self.decision[lanes] + offset, self.table.n_decided[prompt])
        return np.asarray(self.table.first_row[prompt] + t - 1)

    def _plain_pass(self, lanes: Ints, seconds: Doubles) -> None:
        self._step_seconds[lanes] += seconds
        ones = np.ones(lanes.size, dtype=np.int64)
        if self.log is not None:
            self._write(lanes, np.zeros_like(ones), np.zeros_like(ones), ones, "plain")
        self._seen.passed(lanes, self._row_of(lanes, np.zeros_like(ones)))
        self._commit(lanes, ones)

    def _commit(self, lanes: Ints, tokens: Ints) -> None:
        self._step_tokens[lanes] += tokens
        if self.lookup is not None:
            self._step_seconds[lanes] += self._lookup_costs.index * tokens
        self._ended[lanes] = True
        self.decision[lanes] += tokens
        self._begin_round(lanes)

    def _begin_round(self, lanes: Ints) -> None:
        self.stage[lanes] = Stage.PRE_SCAN
        self.candidate[lanes] = self.n_scanned[lanes] = self.n_drafted[lanes] = self.n_accepted[lanes] = 0
        self.fixed[lanes] = 0
        self.branch[lanes] = -1
        self._seen.begin_round(lanes)
        self._round_start[lanes] = self.seconds[lanes] + self._step_seconds[lanes]
        over = self.decision[lanes] > self.table.n_decided[self.prompt[lanes]]
        self.stage[lanes[over]] = Stage.DONE
        # the budget leaves no room for a draft: a plain pass that asks nobody
        forced = lanes[~over & (self._cap(lanes) < 1)]
        if forced.size:
            self._plain_pass(forced, self.costs.plain[self._context(forced)])

    def _write(
        self, lanes: Ints, layer: Ints, accepted: Ints, committed: Ints, ending: str, lookup: bool = False
    ) -> None:
        assert self.log is not None
        spent = self.seconds[lanes] + self._step_seconds[lanes] - self._round_start[lanes]
        if self.lookup is not None:
            spent = spent + self._lookup_costs.index * committed
        self.log.write(
            self.prompt[lanes], self.decision[lanes], layer, self.n_scanned[lanes], self.n_drafted[lanes], accepted,
            committed, ending, spent, lookup, self.fixed[lanes],
        )  # fmt: skip
