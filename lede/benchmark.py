"""The demo's table: speeds, acceptance and exactness of contenders that decoded the same prompts side by side.

Ratios are taken prompt by prompt and their median is reported, so a machine whose speed drifts does not decide. Times
are of the whole call, prompt included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lede.bench_runs import PLAIN, TRANSFORMERS
from lede.exactness import compare
from lede.interleaving import Contender, Decode, prepare, take_turns, warm_up
from lede.models import EarlyExitModel
from lede.statistics import weighted_mean


@dataclass(frozen=True)
class BenchmarkRow:
    """One contender's figures; None where there is nothing to count."""

    name: str
    """The contender."""
    tokens_per_second: float
    """All new tokens over all seconds."""
    speedup: float | None
    """Median over prompts of plain decoding's seconds a token over this one's, on lede's engine."""
    speedup_over_transformers: float | None
    """The same against transformers' `generate`."""
    acceptance_rate: float | None
    """Accepted over drafted tokens, pooled."""
    mean_accepted_length: float | None
    """Accepted tokens a round, pooled; the correction or bonus token is not counted."""
    mean_exit_layer: float | None
    """Mean over tokens drafted at an exit layer."""
    exact: Literal["yes", "ties", "NO"]
    """Texts against transformers' plain greedy `generate`: equal, apart at numerical ties only, or wrong."""
    repetition: float
    """Share of 4-grams of the new tokens that stood there before: a looping text flatters every draft."""


@dataclass
class Benchmark:
    """Runs of every contender on every prompt.

    Args:
        model: The model, for the verdict on exactness.
        contenders: Who decodes; one is called "plain", one may be called "transformers".
    """

    model: EarlyExitModel
    contenders: Sequence[Contender]
    prompts: list[list[int]] = field(default_factory=list)
    runs: dict[str, list[Decode]] = field(default_factory=dict)

    def measure(self, prompts: Sequence[list[int]], after_each: Callable[[], None] | None = None) -> None:
        """Decode the prompts by every contender, after one warm-up each; call `after_each` after every prompt.

        Raises:
            RuntimeError: A contender failed; a demo has no use for a part of its table.
        """
        warm_up(self.model, self.contenders, prompts[0])
        for number, prompt in enumerate(prompts):
            for _, contender, done in take_turns(self.model, self.contenders, prepare(self.model, prompt), number):
                if done.error is not None:
                    raise RuntimeError(f"{contender.name} failed on prompt {number + 1}: {done.error}")
                self.runs.setdefault(contender.name, []).append(done)
            self.prompts.append(prompt)
            if after_each is not None:
                after_each()

    def rows(self) -> list[BenchmarkRow]:
        """The table, in the order of the contenders."""
        return [self._row(contender.name) for contender in self.contenders]

    def ratios(self, name: str, over: str) -> list[float]:
        """Seconds a token of `over` over those of `name`, prompt by prompt.

        Prompts that one of them answered with a single token are left out: the prefill wrote it, nothing was decoded.
        """
        return [
            (b.seconds / len(b.token_ids)) / (a.seconds / len(a.token_ids))
            for a, b in zip(self.runs[name], self.runs[over], strict=True)
            if min(len(a.token_ids), len(b.token_ids)) > 1
        ]

    def _median(self, name: str, over: str) -> float | None:
        ratios = self.ratios(name, over)
        return statistics.median(ratios) if ratios else None

    def _row(self, name: str) -> BenchmarkRow:
        runs = self.runs[name]
        rounds = [r for run in runs for r in run.rounds]
        drafted = sum(r.drafted for r in rounds)
        accepted = sum(r.accepted for r in rounds)
        return BenchmarkRow(
            name=name,
            tokens_per_second=sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs),
            speedup=self._median(name, PLAIN),
            speedup_over_transformers=self._median(name, TRANSFORMERS) if TRANSFORMERS in self.runs else None,
            acceptance_rate=accepted / drafted if drafted else None,
            mean_accepted_length=accepted / len(rounds) if drafted else None,
            mean_exit_layer=weighted_mean([(r.exit_layer, r.drafted) for r in rounds if r.exit_layer is not None]),
            exact=self._verdict(name),
            repetition=statistics.fmean(repetition_share(run.token_ids) for run in runs),
        )

    def _verdict(self, name: str) -> Literal["yes", "ties", "NO"]:
        reference = self.runs.get(TRANSFORMERS, self.runs[PLAIN])
        found = [
            compare(self.model, prompt, run.token_ids, wanted.token_ids)
            for prompt, run, wanted in zip(self.prompts, self.runs[name], reference, strict=True)
        ]
        apart = [divergence for divergence in found if divergence is not None]
        if not apart:
            return "yes"
        return "ties" if all(divergence.tie for divergence in apart) else "NO"


def repetition_share(token_ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that occurred earlier in the same tokens; 0 when there are none."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def as_json(benchmark: Benchmark) -> dict[str, Any]:
    """Rows, and every run of every prompt."""
    return {
        "rows": [asdict(row) for row in benchmark.rows()],
        "runs": {
            name: [{"tokens": len(run.token_ids), "seconds": run.seconds} for run in runs]
            for name, runs in benchmark.runs.items()
        },
    }
