"""The report of a benchmark: report.json, report.md and what the terminal shows.

Both files follow from what the run left in its folder (see `lede.bench_runs`), so a report can be made again at any
moment, of an unfinished run too. `docs/benchmark.md` has the schema.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Group
from rich.text import Text

from lede.atomic import write_atomically
from lede.bench_categories import CategoryRow, category_rows
from lede.bench_figures import PromptFigures
from lede.bench_row import BenchRow
from lede.bench_rows import baselines, figures_of, table
from lede.bench_runs import PROFILE, PROMPTS, Setup, read_prompts, read_runs, read_setup
from lede.bench_speed import Speedup
from lede.bench_tables import SuiteTables, markdown
from lede.bench_tables import terminal as show_tables
from lede.break_even import break_even_acceptance, layers_in_use
from lede.cost_profile import CostProfile

JSON, MARKDOWN = "report.json", "report.md"
SCHEMA, SCHEMA_VERSION = "lede-bench", 1


@dataclass(frozen=True)
class SuiteReport:
    """One suite of a report."""

    name: str
    """Name in every table."""
    spec: str
    """As the command line gave it."""
    n_test: int
    """Prompts that are timed."""
    n_validation: int
    """Prompts that contenders are tuned on."""
    too_long: int
    """Prompts left out for their length."""
    agreement: tuple[float, ...]
    """Share of the plain text's tokens that each layer's likeliest token foretells, from layer 1."""
    control: Speedup | None
    """Plain decoding again over plain decoding, after the prefill."""
    control_with_prefill: Speedup | None
    """The same of the whole call."""
    best_static: str | None
    """Name of the static contender chosen on validation prompts."""
    hindsight_static: str | None
    """Name of the static contender that is fastest on the test prompts."""
    too_short: int = 0
    """Documents left out because too little follows their prompt."""
    best_lookup: str | None = None
    """Name of the static lookup chosen on validation prompts."""
    hindsight_lookup: str | None = None
    """Name of the static lookup that is fastest on the test prompts."""
    prompt_lookup: str | None = None
    """Name of the contender that is transformers' prompt lookup."""

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Self:
        """From the object of a report."""
        found = dict(entry)
        for name in ("control", "control_with_prefill"):
            found[name] = None if entry[name] is None else Speedup(**entry[name])
        return cls(**{**found, "agreement": tuple(entry["agreement"])})


@dataclass(frozen=True)
class BenchReport:
    """Everything in a report.json."""

    facts: dict[str, Any]
    """Settings, model, versions, commit, device, dtype, seed, temperature, threads."""
    suites: tuple[SuiteReport, ...]
    """The suites."""
    rows: tuple[BenchRow, ...]
    """The table, one a suite and contender."""
    prompts: tuple[PromptFigures, ...]
    """Every contender on every prompt."""
    verification_seconds: tuple[float, ...]
    """Seconds of a full pass over 1, 2, ... tokens."""
    break_even: dict[str, tuple[float | None, ...]]
    """The acceptance from which blind drafts of 1, 2, ... tokens pay, by exit layer; see `lede.break_even`."""
    categories: tuple[CategoryRow, ...] = ()
    """Speed by category, where prompts have one."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        content = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            **self.facts,
            "verification_seconds": self.verification_seconds,
            "break_even": self.break_even,
            "suites": [asdict(suite) for suite in self.suites],
            "rows": [row.to_json() for row in self.rows],
            "categories": [asdict(each) for each in self.categories],
            "prompts": [each.to_json() for each in self.prompts],
        }
        plain: dict[str, Any] = json.loads(json.dumps(content, allow_nan=False))
        return plain

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """From what `to_json` gave.

        Raises:
            ValueError: It is no report, or one of another schema version.
        """
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError("is no report of `lede bench`")
        if content.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"has schema version {content.get('schema_version')}, wanted {SCHEMA_VERSION}; write it again with "
                "`lede bench` and the same --out"
            )
        try:
            return cls(
                facts={name: content[name] for name in FACTS},
                suites=tuple(SuiteReport.from_json(each) for each in content["suites"]),
                rows=tuple(BenchRow.from_json(each) for each in content["rows"]),
                prompts=tuple(PromptFigures.from_json(each) for each in content["prompts"]),
                verification_seconds=tuple(content["verification_seconds"]),
                break_even={layer: tuple(each) for layer, each in content["break_even"].items()},
                categories=tuple(CategoryRow.from_json(each) for each in content.get("categories", ())),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"is damaged: {error!r}") from None

    def tables(self) -> list[SuiteTables]:
        """The rows by suite."""
        return [
            SuiteTables(
                suite.name,
                suite.control,
                suite.best_static,
                suite.hindsight_static,
                [row for row in self.rows if row.suite == suite.name],
                suite.best_lookup,
                suite.hindsight_lookup,
            )
            for suite in self.suites
        ]


FACTS = ("model", "device", "dtype", "threads", "seed", "temperature", "commit", "versions", "config")
"""What a report says beside its figures."""


def write_report(out: Path) -> dict[str, Any]:
    """Write report.json and report.md into a benchmark's folder, each whole or not at all.

    Args:
        out: The folder, with setup.json, runs.jsonl, prompts.jsonl and, where there is one, profile.json.

    Returns:
        The content of report.json.

    Raises:
        ImportError: There are texts to compare, and the package `rouge-score` is not installed.
        ValueError: A file is missing or damaged.
    """
    report = make_report(out)
    content = report.to_json()
    write_atomically(out / JSON, _text(content).encode())
    write_atomically(out / MARKDOWN, _markdown(report).encode())
    return content


def _text(content: dict[str, Any]) -> str:
    """A report as JSON, with one line a prompt: there are thousands."""
    lines = ",\n  ".join(json.dumps(each) for each in content["prompts"])
    head = json.dumps({**content, "prompts": []}, indent=1)
    return head.removesuffix("[]\n}") + f"[\n  {lines}\n ]\n}}\n"


def make_report(out: Path) -> BenchReport:
    """The report of what a benchmark's folder holds by now; see `write_report`."""
    setup = read_setup(out)
    prompts = read_prompts(out) if (out / PROMPTS).exists() else []
    profile = CostProfile.load(out / PROFILE) if (out / PROFILE).exists() else None
    figures = figures_of(read_runs(out), setup, prompts, profile, out)
    held = {each.suite: each for each in baselines(figures, setup)}
    suites = [
        SuiteReport(
            name=suite.name,
            spec=suite.spec,
            n_test=len(suite.test),
            n_validation=len(suite.validation),
            too_long=suite.too_long,
            agreement=suite.agreement,
            control=held[suite.name].control,
            control_with_prefill=held[suite.name].control_with_prefill,
            best_static=held[suite.name].best_static,
            hindsight_static=held[suite.name].hindsight_static,
            too_short=suite.too_short,
            best_lookup=held[suite.name].best_lookup,
            hindsight_lookup=held[suite.name].hindsight_lookup,
            prompt_lookup=held[suite.name].prompt_lookup,
        )
        for suite in setup.suites
        if suite.name in held
    ]
    every = tuple(each for found in figures.values() for each in found)
    seconds, n_layers = setup.verification_seconds, int(setup.model["n_layers"])
    return BenchReport(
        facts=_facts(setup),
        suites=tuple(suites),
        rows=tuple(table(figures, setup)),
        prompts=every,
        verification_seconds=seconds,
        break_even={
            str(layer): tuple(
                break_even_acceptance(seconds, layer, n_layers, n, profile) for n in range(1, len(seconds))
            )
            for layer in layers_in_use(every, n_layers)
        },
        categories=tuple(category_rows(figures)),
    )


def read_report(path: Path) -> BenchReport:
    """Read a report.json.

    Raises:
        ValueError: The file can't be read, or holds no report.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    try:
        return BenchReport.from_json(content)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def terminal(content: dict[str, Any]) -> Group:
    """The tables of a report.json's content, for a terminal."""
    report = BenchReport.from_json(content)
    return Group(show_tables(report.tables()), *(Text(line, style="dim") for line in _verification(report)))


def _facts(setup: Setup) -> dict[str, Any]:
    facts = {
        "model": setup.model,
        "device": setup.device,
        "dtype": setup.model.get("dtype"),
        "threads": setup.threads,
        "seed": setup.config.get("seed"),
        "temperature": float(setup.config.get("temperature") or 0.0),
        "commit": setup.commit,
        "versions": setup.versions,
        "config": setup.config,
    }
    return {name: facts[name] for name in FACTS}


def _markdown(report: BenchReport) -> str:
    facts = report.facts
    versions = [f"{name} {version}" for name, version in facts["versions"].items() if isinstance(version, str)]
    heading = (
        "# Benchmark\n\n"
        f"{facts['model'].get('name')}, {facts['dtype']}, on {facts['device']}, {facts['threads']} threads; "
        f"temperature {facts['temperature']:g}, seed {facts['seed']}; commit {facts['commit'] or 'unknown'}; "
        f"{', '.join(versions)}\n\n"
    )
    parts = [heading + markdown(report.tables())]
    if facts["config"].get("preset") == "transfer":
        from lede.presets import transfer_table

        parts.append(f"## Transfer: speed over plain decoding, acceptance rate\n\n{transfer_table(report.rows)}")
    lines = "".join(f"- {line}\n" for line in _verification(report))
    return "\n".join([*parts, f"## Verification\n\n{lines}"] if lines else parts)


def _verification(report: BenchReport) -> list[str]:
    """What verification costs on this machine, a sentence each."""
    seconds = report.verification_seconds
    if len(seconds) < 2:
        return []
    shown = [q for q in (2, 4, 8, 16) if q <= len(seconds)]
    ratios = ", ".join(f"{q}: {seconds[q - 1] / seconds[0]:.2f}" for q in shown)
    lines = [f"A pass over q tokens over a pass over one: {ratios}."]
    for layer, found in report.break_even.items():
        values = [f"{q - 1}: {'never' if (each := found[q - 2]) is None else f'{each:.2f}'}" for q in shown]
        lines.append(f"Drafts of n tokens at layer {layer} pay from an acceptance of {', '.join(values)}.")
    return lines
