"""Speed, measured side by side: every contender decodes every prompt, interleaved, in rotating order.

Ratios are taken prompt by prompt and their median is reported, so a machine whose speed drifts does not decide. Times
are of the whole call, prompt included, because that is all that transformers' `generate` can be asked for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from lede.exactness import compare
from lede.generation import generate
from lede.models import EarlyExitModel
from lede.policies import Policy
from lede.statistics import Round

TRANSFORMERS = "transformers"
PLAIN = "plain"


@dataclass(frozen=True)
class Run:
    """One call on one prompt."""

    token_ids: tuple[int, ...]
    """New tokens."""
    seconds: float
    """Wall-clock of the call, prompt included."""
    rounds: tuple[Round, ...] = ()
    """Rounds after the prefill; none for transformers."""
    decode_seconds: float | None = None
    """Wall-clock after the prefill; None where the engine does not tell."""


@dataclass(frozen=True)
class Contender:
    """Something that decodes a prompt."""

    name: str
    """What the table calls it."""
    decode: Callable[[list[int]], Run]
    """From prompt ids to a run."""


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
    """Mean over drafted tokens."""
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
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def measure(self, prompts: Sequence[list[int]], after_each: Callable[[], None] | None = None) -> None:
        """Decode the prompts by every contender, after one warm-up each; call `after_each` after every prompt."""
        for contender in self.contenders:
            contender.decode(prompts[0])
        for number, prompt in enumerate(prompts):
            turn = number % len(self.contenders)
            for contender in [*self.contenders[turn:], *self.contenders[:turn]]:
                self.runs.setdefault(contender.name, []).append(contender.decode(prompt))
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
            mean_exit_layer=sum(r.drafted * (r.exit_layer or 0) for r in rounds) / drafted if drafted else None,
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


def lede_contender(model: EarlyExitModel, name: str, policy: Policy | None, max_new_tokens: int) -> Contender:
    """Greedy decoding on lede's engine under a policy; None is plain decoding."""

    def decode(prompt: list[int]) -> Run:
        _synchronize(model)
        start = time.perf_counter()
        out = generate(model, input_ids=prompt, policy=policy, max_new_tokens=max_new_tokens)
        new = tuple(out.sequences[0, len(prompt) :].tolist())
        elapsed = time.perf_counter() - start
        return Run(new, elapsed, out.rounds, out.stats.seconds.total - out.stats.seconds.prefill)

    return Contender(name, decode)


def transformers_contender(model: EarlyExitModel, max_new_tokens: int) -> Contender:
    """Transformers' own plain greedy `generate` on the same model object."""

    def decode(prompt: list[int]) -> Run:
        ids = torch.tensor([prompt], device=model.device)
        eos = list(model.eos_token_ids)
        _synchronize(model)
        start = time.perf_counter()
        out = model.hf_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
        )
        new = tuple(out[0, len(prompt) :].tolist())
        return Run(new, time.perf_counter() - start)

    return Contender(TRANSFORMERS, decode)


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


def _synchronize(model: EarlyExitModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
