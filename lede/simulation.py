"""Any policy, played on traces and priced by a cost model, without the language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lede.cost_model import CostModel
from lede.cost_tables import CostTables
from lede.draft_rounds import DraftRounds, Stage
from lede.lookup_table import lookups_of
from lede.policies.base import BLIND, ExitAt, LayerState, Lookup, Policy, PreScan, PreScanState, SkipSublayers
from lede.policies.layer_skipping import LayerSkippingPolicy
from lede.policies.learned import LearnedPolicy
from lede.policies.lookup import LookupPolicy
from lede.policies.lookup_value import LookupValuePolicy
from lede.policies.online import learns_online
from lede.policies.source_value import SourceValuePolicy
from lede.policies.static import StaticPolicy
from lede.policies.survival import SurvivalPolicy
from lede.rewards import CONTINUE, EXIT
from lede.round_log import SOURCES, RoundLog

if TYPE_CHECKING:
    from lede.trace_table import Ints, TraceTable

Decide = Callable[[DraftRounds], npt.NDArray[np.int64]]
"""Legal actions `(lane,)` where the lanes stand."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a policy did on every prompt of a table."""

    tokens: Ints  # (prompt,)
    """Committed over rounds; the token that the prefill gives is not among them."""
    seconds: npt.NDArray[np.float64]  # (prompt,)
    """Spent on rounds; the prefill is not among them."""
    plain_seconds: npt.NDArray[np.float64]  # (prompt,)
    """What plain decoding spends on the same texts."""
    head_reads: Ints  # (prompt,)
    """Head reads of the scan, the draft and pruned lookups."""
    log: RoundLog
    """Every round."""

    @property
    def rate(self) -> float:
        """Tokens a second: ratio of the sums over prompts."""
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def speedup(self) -> float:
        """Rate over that of plain decoding on the same texts."""
        return float(self.plain_seconds.sum() / self.seconds.sum())

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted tokens; None where nothing was drafted."""
        drafted = int(self.log.n_drafted.sum())
        return float(self.log.n_accepted.sum() / drafted) if drafted else None

    @property
    def draft_length(self) -> float | None:
        """Mean tokens drafted in the rounds that drafted, from whatever source."""
        drafts = self.log.source > 0
        return float(self.log.n_drafted[drafts].mean()) if drafts.any() else None

    @property
    def exit_layer(self) -> float | None:
        """Mean exit layer of the rounds that drafted with layers."""
        drafts = self.log.layer > 0
        return float(self.log.layer[drafts].mean()) if drafts.any() else None

    def layer_shares(self) -> dict[int, float]:
        """Share of rounds by exit layer; 0 stands for rounds without one: plain passes and lookups."""
        layers, counts = np.unique(self.log.layer, return_counts=True)
        return {int(layer): float(n / len(self.log)) for layer, n in zip(layers, counts, strict=True)}

    def source_shares(self) -> dict[str, tuple[float, float]]:
        """Share of rounds and of committed tokens by source of the draft, out of `lede.round_log.SOURCES`."""
        rounds = np.bincount(self.log.source, minlength=len(SOURCES)) / max(len(self.log), 1)
        tokens = np.bincount(self.log.source, self.log.n_committed, len(SOURCES)) / max(int(self.tokens.sum()), 1)
        return {name: (float(rounds[i]), float(tokens[i])) for i, name in enumerate(SOURCES)}


def simulate(
    policy: Policy | None,
    table: TraceTable,
    costs: CostModel,
    candidates: Sequence[int] | None = None,
    seed: int = 0,
) -> Simulation:
    """Decode every prompt of a table with a policy.

    Args:
        policy: Who decides; None decodes plainly.
        table: Traces, with branches or without.
        costs: What operations cost.
        candidates: Candidate layers; None for the policy's.
        seed: Of the acceptance of sampled drafts.

    Raises:
        ValueError: The cost model or a candidate belongs to a model of other depth, the policy drafts blind at a layer
            that is no candidate or with gaps, or it learns from what it decodes.
    """
    # one that leaves gaps learns too, and is refused for the gaps
    if policy is not None and not isinstance(policy, LayerSkippingPolicy) and learns_online(policy):
        raise ValueError(
            f"the {policy.kind} policy learns from the texts that it decodes, in their order, which traces can't show "
            "it; measure it by `lede bench`"
        )
    rounds = rounds_of(policy, table, costs, candidates, seed)
    if policy is None:
        return play(rounds, lambda lanes: np.full(lanes.stage.size, CONTINUE, dtype=np.int64))
    if isinstance(policy, LearnedPolicy):
        learned = policy
        return play(rounds, lambda lanes: learned.decide(lanes.observe(), lanes.legal()))
    if isinstance(policy, StaticPolicy):
        plan = BLIND + rounds.candidates.tolist().index(_static_layer(policy, table))
        return play(rounds, _drafting_blind(plan, policy.config.draft_length))
    if isinstance(policy, LookupPolicy):
        copy = rounds.action_of(policy.plan)
        return play(rounds, lambda lanes: np.full(lanes.stage.size, copy, dtype=np.int64))
    if isinstance(policy, LookupValuePolicy):
        valued = policy
        return play(rounds, lambda lanes: valued.decide(lanes.observe()))
    if isinstance(policy, SurvivalPolicy):  # remembers its draft, and so needs a memory for each lane
        from lede.reference_thresholds import lane_decisions

        return play(rounds, lane_decisions(policy, table.n_prompts))
    if isinstance(policy, SourceValuePolicy):  # so does this one
        from lede.reference_sources_lanes import lane_decisions as source_decisions

        return play(rounds, source_decisions(policy, table.n_prompts))
    policy.reset()
    return play(rounds, _one_by_one(policy, table.n_prompts))


def rounds_of(
    policy: Policy | None,
    table: TraceTable,
    costs: CostModel,
    candidates: Sequence[int] | None = None,
    seed: int = 0,
) -> DraftRounds:
    """The process as a policy finds it: its candidates, cap and features, charged for what it asks.

    Raises:
        ValueError: As `simulate`.
    """
    if costs.n_layers != table.n_layers:
        raise ValueError(f"the cost model is of {costs.n_layers} layers, the traces of {table.n_layers}")
    if candidates is None:
        if policy is None:
            candidates = (table.n_layers - 1,)
        elif isinstance(policy, StaticPolicy):
            candidates = (_static_layer(policy, table),)
        else:
            candidates = policy.candidates_for(table.n_layers)
    max_draft = 1 if policy is None else policy.config.max_draft
    features = None if policy is None else policy.features
    # a policy that looks at nothing is free wherever it is asked
    asked = features is None or (policy is not None and policy.decides_pre_scan)
    tables = CostTables(costs, candidates, table.max_context, max_draft)
    plans = _plans(policy)
    config = None if policy is None else policy.lookup
    longest = max((plan.length for plan in plans if isinstance(plan, Lookup)), default=1)
    memory = None if policy is None else policy.memory
    lookup = None if config is None else lookups_of(table, config, longest, memory)
    return DraftRounds(table, tables, features, asked, seed, RoundLog(), lookup, plans)


def play(rounds: DraftRounds, decide: Decide) -> Simulation:
    """Let `decide` decode every prompt of the rounds' table."""
    table = rounds.table
    rounds.log = RoundLog() if rounds.log is None else rounds.log
    rounds.start(np.arange(table.n_prompts))
    while (rounds.stage != Stage.DONE).any():
        rounds.step(decide(rounds))
    rounds.log.finish()
    return Simulation(
        tokens=rounds.tokens,
        seconds=rounds.seconds,
        plain_seconds=plain_seconds(table, rounds.costs),
        head_reads=_head_reads(rounds) + rounds.pruning_reads,
        log=rounds.log,
    )


def plain_seconds(table: TraceTable, costs: CostTables) -> npt.NDArray[np.float64]:
    """Seconds that plain decoding spends on each text, `(prompt,)`."""
    sums = np.concatenate(([0.0], np.cumsum(costs.plain)))
    start = table.prompt_length
    return np.asarray(sums[start + table.n_decided] - sums[start])


def _plans(policy: Policy | None) -> tuple[Lookup | ExitAt, ...]:
    """The plans without decisions that a policy is known to choose from; others are added when it chooses them."""
    if isinstance(policy, LookupPolicy):
        return (policy.plan,)
    if isinstance(policy, LearnedPolicy):
        return (*policy.config.lookups, *policy.config.fixed_drafts)
    if isinstance(policy, LookupValuePolicy | SourceValuePolicy):
        return policy.config.lookups
    return ()


def _static_layer(policy: StaticPolicy, table: TraceTable) -> int:
    return policy.config.exit_layer or max(1, table.n_layers // 4)


def _head_reads(rounds: DraftRounds) -> Ints:
    log, features = rounds.log, rounds.features
    assert log is not None
    if features is None:  # one a token that layers drafted
        reads = np.where(log.layer > 0, log.n_drafted, 0)
    else:
        second = features.draft_agreement & (log.layer > (rounds.candidates[0] if rounds.candidates.size else 0))
        second &= log.fixed == 0
        asked = (
            np.where(log.layer > 0, log.n_drafted, 0) + np.where(log.ending == 1, 1, 0) - np.where(log.layer > 0, 1, 0)
        )  # in the draft
        blind = (log.layer > 0) & (log.n_scanned == 0)
        reads = log.n_scanned + blind + asked * (1 + second)
    return np.asarray(np.bincount(log.prompt, weights=reads, minlength=rounds.table.n_prompts).astype(np.int64))


def _drafting_blind(plan: int, length: int) -> Decide:
    """Draft `length` tokens by a plan of the pre-scan in every round."""

    def decide(lanes: DraftRounds) -> npt.NDArray[np.int64]:
        return np.where(lanes.stage == Stage.PRE_SCAN, plan, lanes.n_drafted < length).astype(np.int64)

    return decide


def _one_by_one(policy: Policy, n_lanes: int) -> Decide:
    """Ask a policy lane by lane."""
    numbers = {PreScan.SKIP: CONTINUE, PreScan.SCAN: EXIT}
    mine = [policy.for_text() for _ in range(n_lanes)]

    def decide(lanes: DraftRounds) -> npt.NDArray[np.int64]:
        observes = policy.features is not None
        observations = lanes.observe() if observes else np.zeros((lanes.stage.size, 0), dtype=np.float32)
        layers, actions = lanes.layer, np.zeros(lanes.stage.size, dtype=np.int64)
        places = {int(layer): k for k, layer in enumerate(lanes.candidates)}
        for i in np.flatnonzero(lanes.stage != Stage.DONE).tolist():
            if lanes.stage[i] == Stage.PRE_SCAN:
                choice = mine[i].pre_scan(_before(lanes, i, observations[i]))
                if isinstance(choice, SkipSublayers):
                    raise ValueError(
                        f"the {policy.kind} policy drafts with gaps; traces know exits alone and can't tell what such "
                        "a draft would say"
                    )
                if isinstance(choice, ExitAt) and choice.exit_layer not in places:
                    raise ValueError(
                        f"the {policy.kind} policy drafts at layer {choice.exit_layer}, which is none of the "
                        f"candidates {sorted(places)}; give candidates with it"
                    )
                actions[i] = numbers[choice] if isinstance(choice, PreScan) else lanes.action_of(choice)
            else:
                ask = mine[i].scan if lanes.stage[i] == Stage.SCAN else mine[i].draft
                actions[i] = ask(LayerState(int(layers[i]), int(lanes.n_drafted[i]), observations[i]))
        return actions

    return decide


def _before(lanes: DraftRounds, lane: int, observation: npt.NDArray[np.float32]) -> PreScanState:
    t, prompt = int(lanes.decision[lane]), lanes.prompt[lane]
    trace, acceptance, since = lanes.history(lane)
    return PreScanState(
        trace,
        acceptance,
        since,
        remaining=lanes.table.max_new_tokens - t,
        n_tokens=int(lanes.table.prompt_length[prompt]) + t,
        observation=observation,
        match=None if lanes.lookup is None else lanes.lookup.match(int(lanes.row[lane])),
    )
