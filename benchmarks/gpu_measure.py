"""Decoding side by side on one model: exactness and speed of transformers, plain decoding and policies."""

from __future__ import annotations

import inspect
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lede.bench_runs import PLAIN, TRANSFORMERS
from lede.benchmark import Benchmark, BenchmarkRow
from lede.interleaving import Call, Contender, Decode, lede_contender, prepare, take_turns, warm_up
from lede.models import EarlyExitModel, load_model
from lede.policies import Policy
from lede.rivals import Rival, rival_contender

COMPILED = ", compiled"
"""Behind the name of a contender that decodes on the compiled engine."""

Row = dict[str, Any]
"""A line of the report's table."""


@dataclass
class Measured:
    """What came of one run."""

    rows: list[Row] = field(default_factory=list)
    """One a contender."""
    failures: list[str] = field(default_factory=list)
    """Contenders that failed, and how."""


def compiled(model: EarlyExitModel) -> tuple[EarlyExitModel | None, str]:
    """The same transformers model on the compiled engine, and how long that took; or None, and why not."""
    if "compile" not in inspect.signature(load_model).parameters:
        return None, "compile not available in this version of lede"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = load_model((model.hf_model, model.tokenizer), compile=True)
    if not engine.compile_seconds:  # it runs eagerly, and the last warning says why
        return None, str(said[-1].message) if said else "the layers were not compiled"
    return engine, f"compiled in {engine.compile_seconds:.1f} s"


def contenders(
    model: EarlyExitModel, policies: dict[str, Policy | None], n_tokens: int, fast: EarlyExitModel | None = None
) -> list[Contender]:
    """Plain decoding by transformers and by lede, and the policies; with `fast`, lede's on that engine too."""
    found = [rival_contender(model, Rival(TRANSFORMERS), n_tokens)]
    found += [lede_contender(model, name, policy, n_tokens) for name, policy in policies.items()]
    if fast is not None:
        found += [on_engine(fast, lede_contender(fast, name + COMPILED, p, n_tokens)) for name, p in policies.items()]
    return found


def on_engine(model: EarlyExitModel, contender: Contender) -> Contender:
    """A contender that prefills the prompt on its own engine first: a prefill belongs to one."""

    def decode(call: Call) -> Decode:
        return contender.decode(prepare(model, call.ids, call.seed, call.stream))

    return Contender(contender.name, decode, contender.reset)


def warm_up_seconds(model: EarlyExitModel, found: Sequence[Contender], ids: Sequence[int]) -> float:
    """Seconds of letting everybody decode a prompt once; a compiler's work is in it."""
    start = time.perf_counter()
    warm_up(model, found, ids)
    return time.perf_counter() - start


def measure(
    model: EarlyExitModel, found: Sequence[Contender], prompts: Sequence[list[int]], labels: dict[str, Any]
) -> Measured:
    """Let everybody decode every prompt in turns; who fails is left out from then on, and named.

    Args:
        model: The model, for the margins.
        found: Contenders, warmed up; one is called "plain".
        prompts: Token ids.
        labels: First columns of every row.
    """
    result, alive = Measured(), list(found)
    runs: dict[str, list[Decode]] = {contender.name: [] for contender in found}
    for number, ids in enumerate(prompts):
        for _, contender, done in take_turns(model, tuple(alive), prepare(model, ids), number):
            if done.error is None:
                runs[contender.name].append(done)
            else:
                result.failures.append(f"{contender.name}: {done.error}")
                alive.remove(contender)
    if PLAIN not in {contender.name for contender in alive}:
        return result
    bench = Benchmark(model, alive, list(prompts), {each.name: runs[each.name] for each in alive})
    result.rows = [_row(bench, figures, labels) for figures in bench.rows()]
    return result


def _row(bench: Benchmark, figures: BenchmarkRow, labels: dict[str, Any]) -> Row:
    """One line; `over_plain` is against plain decoding on the same engine."""
    name, over_plain = figures.name, figures.speedup
    engine = "transformers" if name == TRANSFORMERS else "compiled" if name.endswith(COMPILED) else "eager"
    if engine == "compiled":
        ratios = bench.ratios(name, PLAIN + COMPILED) if PLAIN + COMPILED in bench.runs else []
        over_plain = statistics.median(ratios) if ratios else None
    peaks = [run.peak_memory for run in bench.runs[name] if run.peak_memory is not None]
    return {
        **labels,
        "engine": engine,
        "policy": name.removesuffix(COMPILED) if name != TRANSFORMERS else PLAIN,
        "tokens_per_second": figures.tokens_per_second,
        "over_plain": over_plain if engine != "transformers" else None,
        "over_eager_plain": figures.speedup if engine != "transformers" else None,
        "over_transformers": figures.speedup_over_transformers,
        "acceptance": figures.acceptance_rate,
        "accepted_length": figures.mean_accepted_length,
        "exit_layer": figures.mean_exit_layer,
        "peak_gb": max(peaks) / 1e9 if peaks else None,
        "repetition": figures.repetition,
        "exact": figures.exact,
    }


@torch.inference_mode()
def smallest_margin(model: EarlyExitModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """The smallest top-2 margin at any new token of plain texts, as a share of the largest logit there."""
    margins = []
    for prompt, new in texts:
        ids = torch.tensor([[*prompt, *new[:-1]]], device=model.device)
        logits = model.hf_model(ids, logits_to_keep=len(new)).logits[0].float()
        best = logits.topk(2).values
        margins.append(float(((best[:, 0] - best[:, 1]) / logits.abs().amax(-1)).min()))
    return min(margins)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy within the device's memory moves, read and written, at best of a few."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        _wait(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.numel() / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
