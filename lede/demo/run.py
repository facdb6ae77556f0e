"""`lede demo`: the whole of lede on the bundled model, offline, in a few minutes on a CPU.

Collect both kinds of experience, measure what decoding costs here, train a policy for the paper's reward and two for
seconds, choose the best static setting on validation prompts, and decode held-out prompts with plain decoding,
transformers' `generate`, that static setting and the three policies.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lede.bench_runs import PLAIN, TRANSFORMERS
from lede.benchmark import Benchmark, as_json, repetition_share
from lede.buffers import TraceStore
from lede.checkpoint import versions
from lede.demo.learning import RUNS, STORES, Effort, gather, learn, price
from lede.features import default_candidates
from lede.interleaving import Contender, lede_contender
from lede.models import EarlyExitModel, load_model
from lede.policies import Policy, StaticPolicy
from lede.prompts import encode_prompts
from lede.reports import LEGEND, coloured, markdown, plot_agreement, plot_speed, table
from lede.rivals import Rival, rival_contender

PROMPTS = Path(__file__).parent / "prompts.jsonl"


@dataclass(frozen=True)
class DemoConfig:
    """Settings of the demo."""

    out: Path = Path("runs/demo")
    """Folder of everything it writes; an earlier demo's results in it are replaced."""
    quick: bool = False
    """A smaller run, under a minute."""
    seed: int = 0
    """Seed of collection and training."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    effort: Effort
    """What is learned from, and for how long."""
    validation_prompts: int
    """Prompts that the static setting is chosen on."""
    test_prompts: int
    """Prompts that are timed."""
    draft_lengths: tuple[int, ...]
    """Lengths of the static sweep; layers are compared at the first."""
    sweep_all_layers: bool
    """Whether the sweep goes over every layer up to half depth, not over candidates alone."""


LEARNED, PAPER, THRESHOLDS = "learned, for seconds", "learned, paper's reward", "thresholds, for seconds"

FULL = Sizes(Effort(104, 16, 96, 9, {"wall-clock": 8000, "paper": 4000}), 8, 24, (4, 2, 3, 6, 8), True)
QUICK = Sizes(Effort(24, 4, 48, 3, {"wall-clock": 800, "paper": 400}), 2, 6, (4,), False)

_OURS = (*STORES, *RUNS.values(), "policy")

_MARK = ".lede-demo"
"""File that tells a demo's folder, in which `_OURS` may be replaced, from one with stores and runs of the user's."""


def demo(config: DemoConfig) -> dict[str, Any]:
    """Run the demo; returns what report.json holds.

    Raises:
        ValueError: The folder holds something that no demo wrote.
    """
    console = Console()
    try:
        return _demo(config, console)
    except KeyboardInterrupt:
        console.print("stopped; the demo begins anew when it is run again", soft_wrap=True)
        raise


def _demo(config: DemoConfig, console: Console) -> dict[str, Any]:
    began = time.perf_counter()
    sizes = QUICK if config.quick else FULL
    out = _prepare(config.out)
    model = load_model("demo")
    console.print(f"bundled model: {model.n_layers} layers, vocabulary {model.vocab_size}; results go to {out}")
    prompts = _prompts()

    console.rule("1. collect", align="left")
    traces, validation = gather(model, prompts, sizes.effort, config.seed, out)

    console.rule("2. train", align="left")
    costs = price(model, sizes.effort, console, out)
    policy = learn("wall-clock", sizes.effort, config.seed, out, None)
    candidates = policy.candidates_for(model.n_layers)
    paper = learn("paper", sizes.effort, config.seed, out, candidates)
    thresholds = learn("thresholds", sizes.effort, config.seed, out, candidates)

    console.rule("3. decode", align="left")
    encoded = {split: encode_prompts(model.tokenizer, texts) for split, texts in prompts.items()}
    static, sweep = _best_static(model, encoded["validation"][: sizes.validation_prompts], sizes)
    contenders = {"best static": static, PAPER: paper, LEARNED: policy, THRESHOLDS: thresholds}
    benchmark = _measure(model, encoded["test"][: sizes.test_prompts], contenders, sizes)
    rows = benchmark.rows()

    agreement = _agreement(traces)
    plot_agreement(agreement, policy.candidates_for(model.n_layers), out / "agreement.png")
    plot_speed(rows, out / "speed.png")
    report = {
        **as_json(benchmark),
        "best_static": asdict(static.config),
        "static_sweep": sweep,
        "candidates": list(candidates),
        "head_read_over_layer": costs.head_over_layer(),
        "agreement_by_layer": agreement,
        "repetition_of_validation_texts": statistics.fmean(repetition_share(t.token_ids.tolist()) for t in validation),
        "quick": config.quick,
        "seed": config.seed,
        "max_new_tokens": sizes.effort.max_new_tokens,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "seconds": time.perf_counter() - began,
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "report.md").write_text(markdown(rows), encoding="utf-8")

    prompt, run = max(
        zip(benchmark.prompts, benchmark.runs[LEARNED], strict=True), key=lambda pair: len(pair[1].token_ids)
    )
    console.print(coloured(model.tokenizer, prompt, run.token_ids[0], run.rounds), soft_wrap=True)
    console.print()
    title = f"{len(benchmark.prompts)} held-out prompts, {sizes.effort.max_new_tokens} tokens, greedy, float32"
    console.print(table(rows, title))
    console.print(LEGEND, style="dim")
    console.print(
        f"best static setting on validation prompts: layer {static.config.exit_layer}, "
        f"length {static.config.draft_length}; the learned policies may draft at {', '.join(map(str, candidates))}\n"
        f"{out / 'report.json'}, agreement.png, speed.png; tensorboard --logdir {out / 'run' / 'logs'}\n"
        f"decode with it: lede deploy --policy {out / 'policy'} --prompt 'def main():'\n"
        f"{report['seconds']:.0f} seconds",
        soft_wrap=True,
    )
    return report


def _prepare(out: Path) -> Path:
    """Make the folder, and clear an earlier demo's results from it."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder as --out")
    if out.exists() and any(out.iterdir()) and not (out / _MARK).exists():
        raise ValueError(f"{out} holds something that no demo wrote; give a new or empty folder as --out")
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).touch()
    for name in _OURS:
        shutil.rmtree(out / name, ignore_errors=True)
    return out


def _prompts() -> dict[str, list[str]]:
    """The bundled prompts by split; training, validation and test share none."""
    splits: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        splits[entry["split"]].append(entry["prompt"])
    return splits


def _best_static(
    model: EarlyExitModel, prompts: Sequence[list[int]], sizes: Sizes
) -> tuple[StaticPolicy, list[dict[str, Any]]]:
    """The fastest static setting on validation prompts, first the layer, then the length; and the speed of each."""
    layers = range(2, model.n_layers // 2 + 1) if sizes.sweep_all_layers else default_candidates(model.n_layers)
    first, *others = sizes.draft_lengths
    best, rows = _fastest(model, prompts, [(layer, first) for layer in layers], sizes)
    if others:
        layer = best.config.exit_layer or 1
        best, more = _fastest(model, prompts, [(layer, length) for length in sizes.draft_lengths], sizes)
        rows += more
    return best, rows


def _fastest(
    model: EarlyExitModel, prompts: Sequence[list[int]], settings: Sequence[tuple[int, int]], sizes: Sizes
) -> tuple[StaticPolicy, list[dict[str, Any]]]:
    """The fastest of some settings (exit layer, draft length), and the speed of each over plain decoding."""
    budget = sizes.effort.max_new_tokens
    policies = {f"{layer}x{n}": StaticPolicy(exit_layer=layer, draft_length=n) for layer, n in settings}
    contenders = [lede_contender(model, PLAIN, None, budget)]
    contenders += [lede_contender(model, name, policy, budget) for name, policy in policies.items()]
    rows = _run("choosing the static setting", model, contenders, prompts).rows()[1:]
    best = max(rows, key=lambda row: row.speedup or 0.0)
    return policies[best.name], [{"setting": row.name, "speedup": row.speedup} for row in rows]


def _measure(
    model: EarlyExitModel, prompts: Sequence[list[int]], policies: dict[str, Policy], sizes: Sizes
) -> Benchmark:
    """Everyone on the held-out prompts, in one interleaved run."""
    budget = sizes.effort.max_new_tokens
    contenders = [
        rival_contender(model, Rival(TRANSFORMERS), budget),
        lede_contender(model, PLAIN, None, budget),
        *(lede_contender(model, name, policy, budget) for name, policy in policies.items()),
    ]
    return _run("decoding held-out prompts", model, contenders, prompts)


def _run(what: str, model: EarlyExitModel, contenders: Sequence[Contender], prompts: Sequence[list[int]]) -> Benchmark:
    benchmark = Benchmark(model, contenders)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(what, total=len(prompts))
        benchmark.measure(prompts, lambda: progress.advance(task))
    return benchmark


def _agreement(traces: TraceStore) -> list[float]:
    """Share of decided tokens at which each layer's likeliest token was the whole model's choice, from layer 1."""
    matched = sum(trace.match.sum(0) for trace in traces)
    decided = sum(len(trace.match) for trace in traces)
    return [float(share) for share in matched / decided]
