"""`lede compare`: two reports of `lede bench` side by side, and which of their differences can be told from noise.

Reports may come from different machines, so what is compared is the speed over each report's own plain decoding, not
seconds. Where both decoded the same prompts (equal token ids), the change is the ratio of the two speedups on those
prompts, with a bootstrap interval by prompt; the control is the same ratio of plain decoding against itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from lede.bench_figures import PromptFigures
from lede.bench_report import JSON, BenchReport, read_report
from lede.bench_row import BenchRow
from lede.bench_runs import CONTROL, PLAIN
from lede.bench_speed import FEWEST_PROMPTS, bootstrap, is_clear
from lede.intervals import Interval

_ABSENT = "absent"


@dataclass(frozen=True)
class CompareConfig:
    """Settings of a comparison."""

    first: tyro.conf.Positional[Path]
    """A report.json, or the folder that holds it."""
    second: tyro.conf.Positional[Path]
    """Another one, which is told as a change from the first."""


@dataclass(frozen=True)
class ComparedRow:
    """One contender of one suite in both reports."""

    suite: str
    """Name of the suite."""
    name: str
    """Name of the contender."""
    first: BenchRow | None
    """Its row in the first report; None where it takes no part."""
    second: BenchRow | None
    """Its row in the second."""
    ratio: float | None
    """Its speedup over plain in the second report over that in the first; None where one is missing."""
    interval: Interval | None
    """The same on the prompts that both reports decoded; None where they share none."""
    n_paired: int
    """Prompts that both reports decoded."""
    resolved: bool
    """Whether the change is told from noise: paired, as a speedup is; otherwise whether the intervals are apart."""

    @property
    def exactness_changed(self) -> bool:
        """Whether the verdict on the texts is another one, where there are two."""
        return self.first is not None and self.second is not None and self.first.exact != self.second.exact


@dataclass(frozen=True)
class Comparison:
    """Two reports side by side."""

    rows: tuple[ComparedRow, ...]
    """Every contender of either, in the order of the second report, then of the first."""
    differences: tuple[str, ...]
    """Settings, versions and so on that differ, as `name: first -> second`."""


def compare(config: CompareConfig) -> Comparison:
    """Compare two reports and print the result.

    Raises:
        ValueError: A file can't be read or holds no report; the message names it.
    """
    from rich.console import Console

    from lede.comparison_table import shown

    first, second = (read_report(path / JSON if path.is_dir() else path) for path in (config.first, config.second))
    found = compare_reports(first, second)
    Console().print(shown(found))
    return found


def compare_reports(first: BenchReport, second: BenchReport) -> Comparison:
    """Compare two reports."""
    before, after = _rows(first), _rows(second)
    figures = _figures(first), _figures(second)
    keys = dict.fromkeys([*after, *before])
    compared = [_compared(key, before.get(key), after.get(key), *figures) for key in keys if key[1] != CONTROL]
    return Comparison(tuple(compared), tuple(_differences(first, second, before, after)))


Key = tuple[str, str]
Figures = dict[Key, dict[str, PromptFigures]]


def _rows(report: BenchReport) -> dict[Key, BenchRow]:
    return {(row.suite, row.name): row for row in report.rows}


def _figures(report: BenchReport) -> Figures:
    """Figures by suite and contender, and by the hash of the prompt."""
    found: Figures = {}
    for each in report.prompts:
        if each.prompt_digest is not None and each.counts:
            found.setdefault((each.suite, each.name), {})[each.prompt_digest] = each
    return found


def _compared(
    key: Key, before: BenchRow | None, after: BenchRow | None, first: Figures, second: Figures
) -> ComparedRow:
    old, new = (None if row is None else row.speedup_over_plain for row in (before, after))
    if old is None or new is None:
        return ComparedRow(*key, before, after, None, None, 0, False)
    interval, n_paired = _change(key, first, second)
    if interval is not None:
        control, _ = _change((key[0], CONTROL), first, second)
        resolved = is_clear(interval, control, n_paired)
    else:
        apart = new.lower > old.upper or new.upper < old.lower
        resolved = apart and min(old.n_prompts, new.n_prompts) >= FEWEST_PROMPTS
    return ComparedRow(*key, before, after, new.value / old.value, interval, n_paired, resolved)


def _change(key: Key, first: Figures, second: Figures) -> tuple[Interval | None, int]:
    """Speedup over plain in the second report over that in the first, on prompts that all four decoded."""
    plain = (key[0], PLAIN)
    columns = [found.get(each, {}) for found in (first, second) for each in (key, plain)]
    shared = [digest for digest in columns[0] if all(digest in column for column in columns)]
    old, old_plain, new, new_plain = ([column[digest] for digest in shared] for column in columns)
    if not all(sum(_seconds(each)) > 0 for each in (old, old_plain, new, new_plain)):
        return None, 0
    tops = [_tokens(new), _seconds(new_plain), _seconds(old), _tokens(old_plain)]
    bottoms = [_seconds(new), _tokens(new_plain), _tokens(old), _seconds(old_plain)]
    return bootstrap(len(shared)).products(tops, bottoms), len(shared)


def _tokens(figures: Sequence[PromptFigures]) -> list[float]:
    return [each.decoded for each in figures]


def _seconds(figures: Sequence[PromptFigures]) -> list[float]:
    return [each.seconds for each in figures]


def _differences(
    first: BenchReport, second: BenchReport, before: Mapping[Key, BenchRow], after: Mapping[Key, BenchRow]
) -> Iterator[str]:
    """What differs beside the figures, a line each."""
    old, new = (dict(_flat(report.facts)) for report in (first, second))
    for name in dict.fromkeys([*old, *new]):
        if old.get(name, _ABSENT) != new.get(name, _ABSENT):
            yield f"{name}: {_said(old.get(name, _ABSENT))} -> {_said(new.get(name, _ABSENT))}"
    prints = [report.facts["model"].get("fingerprint") for report in (first, second)]
    if all(prints):
        from lede.fingerprints import compare_fingerprints

        yield from (f"model: {line}" for line in compare_fingerprints(*prints))
    for key in after:
        if key in before and before[key].settings != after[key].settings:
            yield f"{key[0]}, {key[1]}: {before[key].settings} -> {after[key].settings}"


def _flat(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Facts by dotted name, without the model's fingerprint, which is compared in its own way."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items() if inner != "fingerprint")
        else:
            yield name, value


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else "none" if value is None else str(value)
