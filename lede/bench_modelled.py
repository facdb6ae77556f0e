"""What the rounds of a benchmark should have cost by a cost profile, beside what they did cost.

A run tells of each round what was drafted, accepted and committed, and where, and of the whole how many heads were
read; that prices everything but the following. Splitting a scan into spans is free. Where a policy decided is not
known, only how often: each head read beyond those that draft is a decision, and for a policy with features every read
is. A search between rounds is left out, and with it, in a run that searched, all reads beyond those that draft. Of a
draft with gaps only the number of sublayers left out is known, so each of its tokens is charged the whole stack times
the share that ran, attention and MLP counting alike, and verification is charged all layers: what it takes over from
before the first gap is not credited.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from lede.bench_runs import ContenderSetup, PromptRun, RoundCounts
from lede.cost_model import CostModel
from lede.features import FeatureConfig


class RoundCosts:
    """Seconds of runs by a cost model; rounds that look alike are priced once.

    Args:
        costs: The model.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._plain = cache(costs.plain_seconds)
        self._round = cache(self._price)

    def seconds(self, run: PromptRun, features: FeatureConfig | None) -> float:
        """Modelled seconds after the first new token.

        Args:
            run: A decode on lede's engine.
            features: What its policy observes; None for one that looks at nothing.
        """
        costs = self._costs
        context, total, drafting_reads = run.prompt_tokens, 0.0, 0
        for counts in run.rounds:
            total += self._round(context, counts)
            drafting_reads += counts[0]
            context += counts[2]
        reads = drafting_reads if run.sections.get("search") else max(run.head_reads, drafting_reads)
        total += (reads - drafting_reads) * costs.head_seconds()
        if features is not None:
            decisions = reads / features.draft_head_reads
            total += decisions * (costs.decision_seconds(features) - costs.head_seconds())
            if "in_scan" in features.names:
                total += len(run.rounds) * costs.pre_scan_seconds(features)
        return total

    def plain_seconds(self, run: PromptRun) -> float:
        """Modelled seconds of writing the same tokens plainly."""
        return sum(self._plain(run.prompt_tokens + i) for i in range(len(run.token_ids) - 1))

    def _price(self, context: int, counts: RoundCounts) -> float:
        """A round without the reads that only inspect."""
        costs = self._costs
        drafted, accepted, committed, layer, skipped = counts
        if not drafted:
            return self._plain(context)
        # a drafted end of sequence that was accepted wrote no bonus, nor did it run any further
        ended = accepted == committed
        if not skipped:
            return costs.round_seconds(context, (), layer, drafted, "eos" if ended else "cap", features=None)
        share = 1 - skipped / (2 * costs.n_layers)
        total = (drafted + (not ended)) * costs.costs.embed
        for i in range(drafted):
            total += share * costs.again_seconds(costs.n_layers, context + i) + costs.head_seconds()
            total += costs.costs.choose
        return total + costs.verify_seconds(0, drafted + (not ended), context)


def modelled_seconds(
    runs: Iterable[PromptRun], costs: RoundCosts, features: FeatureConfig | None
) -> dict[int, tuple[float, float]]:
    """Seconds of one contender's rounds, and of plain decoding of the same tokens, by prompt; means over repetitions.

    Prompts that failed or were answered by a single token have none, nor have external contenders.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        if run.error is None and run.rounds and len(run.token_ids) > 1:
            pair = costs.seconds(run, features), costs.plain_seconds(run)
            found.setdefault(run.prompt_index, []).append(pair)
    return {
        index: (sum(own for own, _ in pairs) / len(pairs), sum(plain for _, plain in pairs) / len(pairs))
        for index, pairs in found.items()
    }


def observed_features(contender: ContenderSetup, out: Path | None = None) -> FeatureConfig | None:
    """What the policy of a contender observes.

    The copy that decoded, in the benchmark's folder `out`, is asked first: what was given may have changed since. The
    default set stands in where neither can be loaded.
    """
    from lede.bench_lineup import policy_folder
    from lede.checkpoint import load_policy
    from lede.policies import parse_policy

    if contender.kind != "policy":
        return None
    if out is not None:
        with suppress(ValueError, OSError):
            return load_policy(policy_folder(out, contender.suite, contender.name)).features
    try:
        policy = parse_policy(contender.settings)
    except ValueError:
        return FeatureConfig()
    return None if policy is None else policy.features
