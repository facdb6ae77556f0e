"""The simulator against the clock: policies decoded for real, interleaved, beside what the simulator says of them.

python -m benchmarks.simulation_check --traces test.zarr --profile profile.json --policy static:exit_layer=4 ...

Plain decoding runs twice under two names: what the two differ by is the noise of the machine. Times are those after the
prefill, which the simulator leaves out too; speedups are ratios of sums over prompts, with bootstrap intervals by
prompt.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lede.atomic import write_atomically
from lede.bench_runs import PLAIN, TRANSFORMERS
from lede.benchmark import Benchmark
from lede.buffers.store import TraceStore, open_store
from lede.checkpoint import versions
from lede.contenders import check_contenders, parse_contenders
from lede.cost_profile import CostProfile
from lede.interleaving import lede_contender
from lede.intervals import Bootstrap, Interval
from lede.models import load_model
from lede.rivals import Rival, rival_contender
from lede.simulation import Simulation, simulate
from lede.trace_table import TraceTable

AGAIN = "plain again"


@dataclass(frozen=True)
class SimulationCheck:
    """Settings."""

    traces: Path
    """Store of traces of test prompts; their prompts are decoded."""
    profile: Path
    """Cost profile of the model on this machine."""
    policy: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Policies, as `lede deploy` takes them; the first one is what others are compared with."""
    model: str = "demo"
    """Model, as `lede deploy` takes it."""
    prompts: int | None = None
    """Prompts that are decoded; all of the store's unless given."""
    repeats: int = 1
    """Times that everything is decoded; the faster time of a prompt counts."""
    out: Path | None = None
    """File for everything as JSON; replaced whole."""


@dataclass(frozen=True)
class CheckedPolicy:
    """One policy, measured and simulated."""

    name: str
    """As it was given."""
    measured: Interval
    """Speedup over plain decoding by the clock."""
    simulated: float | None
    """Speedup over plain decoding by the simulator; None for what it does not simulate."""
    over_first: Interval
    """Speedup over the first policy by the clock."""
    median: float
    """Median over prompts of the speedup over plain decoding, prompt included."""
    exact: str
    """Whether the text is the plain model's."""

    @property
    def error(self) -> float | None:
        """Simulated over measured, minus 1."""
        return None if self.simulated is None else self.simulated / self.measured.value - 1


def main(config: SimulationCheck) -> list[CheckedPolicy]:
    """Decode, simulate, print both and write them.

    Raises:
        ValueError: The store, the profile, the model and the policies do not belong together.
    """
    store, profile = open_store(config.traces), CostProfile.load(config.profile)
    if not isinstance(store, TraceStore):
        raise ValueError(f"{config.traces} holds {store.kind}, wanted traces (--collector teacher)")
    contenders = [each for each in parse_contenders(config.policy, ()) if each.policy is not None]
    check_contenders(store.settings, profile, contenders)
    model = load_model(config.model)
    traces = store.prompts[: config.prompts]
    budget = store.settings.max_new_tokens
    names = [PLAIN, AGAIN, *(each.name for each in contenders)]
    decoders = [lede_contender(model, PLAIN, None, budget), lede_contender(model, AGAIN, None, budget)]
    decoders += [lede_contender(model, each.name, each.policy, budget) for each in contenders]
    benchmark = Benchmark(model, [rival_contender(model, Rival(TRANSFORMERS), budget), *decoders])
    prompts = [trace.prompt_ids.tolist() for trace in traces for _ in range(config.repeats)]
    with Progress(transient=True) as progress:
        task = progress.add_task("decoding", total=len(prompts))
        benchmark.measure(prompts, lambda: progress.advance(task))
    table = TraceTable.from_traces(traces, budget, model.vocab_size)
    simulated: dict[str, Simulation] = {PLAIN: simulate(None, table, profile.costs)}
    simulated |= {each.name: simulate(each.policy, table, profile.costs) for each in contenders}
    spent = {name: _fastest(benchmark, name, config.repeats) for name in names}
    bootstrap, ones = Bootstrap(len(traces)), np.ones(len(traces))
    first = names[2] if contenders else PLAIN
    rows = {row.name: row for row in benchmark.rows()}
    found = [
        CheckedPolicy(
            name=name,
            measured=bootstrap.speedup(ones, spent[name], ones, spent[PLAIN]),
            simulated=simulated[name].speedup if name in simulated else None,
            over_first=bootstrap.speedup(ones, spent[name], ones, spent[first]),
            median=rows[name].speedup or 0.0,
            exact=rows[name].exact,
        )
        for name in names
    ]
    Console().print(_table(found, first))
    wrong = misordered(found)
    Console().print(
        f"plain: {rows[PLAIN].speedup_over_transformers:.2f}x transformers' generate; repetition "
        f"{rows[PLAIN].repetition:.2f}; pairs ordered against the clock: {', '.join(wrong) or 'none'}"
    )
    if config.out is not None:
        content = {"policies": [_json(each) for each in found], "misordered": wrong, "versions": versions()}
        content["transformers"] = {"tokens_per_second": rows[TRANSFORMERS].tokens_per_second}
        write_atomically(config.out, (json.dumps(content, indent=1) + "\n").encode())
    return found


def misordered(found: list[CheckedPolicy]) -> list[str]:
    """Pairs whose measured intervals do not overlap and whom the simulator orders the other way."""
    known = [(each.name, each.measured, each.simulated) for each in found if each.simulated is not None]
    ranked = sorted(known, key=lambda each: each[1].value)
    return [
        f"{slow} / {fast}"
        for (slow, below, a), (fast, above, b) in itertools.combinations(ranked, 2)
        if below.upper < above.lower and a >= b
    ]


def _fastest(benchmark: Benchmark, name: str, repeats: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Seconds after the prefill of each prompt, the least of its repeats."""
    seconds = np.asarray([run.decode_seconds for run in benchmark.runs[name]], dtype=np.float64)
    return np.asarray(seconds.reshape(-1, repeats).min(axis=1))


def _table(found: list[CheckedPolicy], first: str) -> Table:
    table = Table(title="speedup over plain decoding, after the prefill", title_justify="left")
    for column in ("policy", "by the clock", "simulated", "error", f"over {first}", "median, prompt included", "exact"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for each in found:
        table.add_row(
            each.name,
            _interval(each.measured),
            "-" if each.simulated is None else f"{each.simulated:.2f}",
            "-" if each.error is None else f"{each.error:+.1%}",
            _interval(each.over_first),
            f"{each.median:.2f}",
            each.exact,
        )
    return table


def _interval(interval: Interval) -> str:
    return f"{interval.value:.2f} ({interval.lower:.2f}-{interval.upper:.2f})"


def _json(each: CheckedPolicy) -> dict[str, Any]:
    intervals = {"measured": each.measured, "over_first": each.over_first}
    flat = {name: [one.value, one.lower, one.upper] for name, one in intervals.items()}
    return {"name": each.name, "simulated": each.simulated, "error": each.error, "exact": each.exact, **flat}


if __name__ == "__main__":
    main(tyro.cli(SimulationCheck))
