"""What the rounds of a benchmark should have cost by a cost profile, beside what they did cost.

A run tells of each round what was drafted, accepted and committed, and where, and of the whole how many heads were
read; that prices everything but the following. Splitting a scan into spans is free. Of a lookup that is cut at a layer
only what was left is known, so each is taken to have been as long as its policy's plan, and those of which nothing was
left are told from plain passes by the heads read; where a policy chooses between several such plans, their cutting is
priced as inspections. Where a policy decided is not
known, only how often: each head read beyond those that draft is a decision, and for a policy with features every read
is. A search between rounds is left out, and with it, in a run that searched, all reads beyond those that draft. Of a
draft with gaps only the number of sublayers left out is known, so each of its tokens is charged the whole stack times
the share that ran, attention and MLP counting alike, and verification is charged all layers: what it takes over from
before the first gap is not credited.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lede.bench_runs import ContenderSetup, PromptRun, RoundCounts, source_of
from lede.cost_model import CostModel
from lede.features import FeatureConfig
from lede.policies.base import Lookup, Policy


@dataclass(frozen=True)
class Observed:
    """What a policy looks at, as far as it costs time."""

    features: FeatureConfig | None = None
    """Its observation; None for one that looks at nothing."""
    pre_scan: bool = False
    """Whether it decides on an observation before the scan."""
    indexed: bool = False
    """Whether the text is indexed for lookups."""
    pruned: Lookup | None = None
    """The plan of all of its lookups, where that is one and cuts them at a layer."""

    @classmethod
    def by(cls, policy: Policy | None) -> Observed:
        """What a policy looks at; plain decoding at nothing."""
        if policy is None:
            return cls()
        from lede.policies.lookup import LookupPolicy

        plan = policy.plan if isinstance(policy, LookupPolicy) else None
        pruned = None if plan is None or plan.prune_at is None else plan
        return cls(policy.features, policy.decides_pre_scan, policy.lookup is not None, pruned)


class RoundCosts:
    """Seconds of runs by a cost model; rounds that look alike are priced once.

    Args:
        costs: The model.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._plain = cache(costs.plain_seconds)
        self._round = cache(self._price)

    def seconds(self, run: PromptRun, observed: Observed) -> float:
        """Modelled seconds after the first new token.

        Args:
            run: A decode on lede's engine.
            observed: What its policy looks at.
        """
        costs, features = self._costs, observed.features
        context, total, drafting_reads, lookups = run.prompt_tokens, 0.0, 0, 0
        for counts in run.rounds:
            total += self._round(context, counts, observed.pruned)
            copied = source_of(counts) == "lookup"
            lookups += copied
            drafting_reads += 0 if copied else counts[0]
            context += counts[2]
        if observed.indexed:
            total += (context - run.prompt_tokens) * costs.costs.index
        reads = drafting_reads if run.sections.get("search") else max(run.head_reads, drafting_reads)
        if observed.pruned is not None:
            n_cut = (reads - drafting_reads) / (observed.pruned.length + 1)
            in_vain = max(0.0, n_cut - lookups)
            middle = (run.prompt_tokens + context) // 2
            return total + in_vain * (self._cut(middle, 1, observed.pruned) - self._plain(middle))
        total += (reads - drafting_reads) * costs.head_seconds()
        if features is not None:
            decisions = (reads - run.unasked) / features.draft_head_reads
            total += decisions * (costs.decision_seconds(features) - costs.head_seconds())
            total -= (drafting_reads - run.unasked) * (costs.costs.choose - costs.choice_seconds(features))
            if observed.pre_scan:
                total += len(run.rounds) * costs.pre_scan_seconds(features)
        return total

    def plain_seconds(self, run: PromptRun) -> float:
        """Modelled seconds of writing the same tokens plainly."""
        return sum(self._plain(run.prompt_tokens + i) for i in range(len(run.token_ids) - 1))

    def _cut(self, context: int, q: int, plan: Lookup) -> float:
        """A lookup that is cut at a layer, of which `q` tokens go on, the newest one of the text among them."""
        costs, layer, read = self._costs, plan.prune_at or 0, plan.length + 1
        total = costs.costs.embed + costs.costs.propose + costs.costs.choose
        total += costs.seconds(0, layer, read, context) + costs.head_seconds(read)
        return total + costs.verify_seconds(layer, q, context)

    def _price(self, context: int, counts: RoundCounts, pruned: Lookup | None) -> float:
        """A round without the reads that only inspect."""
        costs = self._costs
        drafted, accepted, committed, layer, skipped = counts
        if not drafted:
            return self._plain(context)
        # a drafted end of sequence that was accepted wrote no bonus, nor did it run any further
        ended = accepted == committed
        if source_of(counts) == "lookup":
            q = drafted + (not ended)
            if pruned is not None:
                return self._cut(context, q, pruned)
            return costs.costs.embed + costs.costs.propose + costs.verify_seconds(0, q, context)
        if not skipped:
            return costs.round_seconds(context, (), layer, drafted, "eos" if ended else "cap", features=None)
        share = 1 - skipped / (2 * costs.n_layers)
        total = (drafted + (not ended)) * costs.costs.embed
        for i in range(drafted):
            total += share * costs.again_seconds(costs.n_layers, context + i) + costs.head_seconds()
            total += costs.costs.choose
        return total + costs.verify_seconds(0, drafted + (not ended), context)


def modelled_seconds(
    runs: Iterable[PromptRun], costs: RoundCosts, observed: Observed
) -> dict[int, tuple[float, float]]:
    """Seconds of one contender's rounds, and of plain decoding of the same tokens, by prompt; means over repetitions.

    Prompts that failed or were answered by a single token have none, nor have external contenders.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        if run.error is None and run.rounds and len(run.token_ids) > 1:
            pair = costs.seconds(run, observed), costs.plain_seconds(run)
            found.setdefault(run.prompt_index, []).append(pair)
    return {
        index: (sum(own for own, _ in pairs) / len(pairs), sum(plain for _, plain in pairs) / len(pairs))
        for index, pairs in found.items()
    }


def observed(contender: ContenderSetup, out: Path | None = None) -> Observed:
    """What the policy of a contender looks at.

    The copy that decoded, in the benchmark's folder `out`, is asked first: what was given may have changed since. The
    default set stands in where neither can be loaded.
    """
    from lede.bench_lineup import policy_folder
    from lede.checkpoint import load_policy
    from lede.policies import parse_policy

    if contender.kind != "policy":
        return Observed()
    if out is not None:
        with suppress(ValueError, OSError):
            return Observed.by(load_policy(policy_folder(out, contender.suite, contender.name)))
    try:
        return Observed.by(parse_policy(contender.settings))
    except ValueError:
        return Observed(FeatureConfig())
