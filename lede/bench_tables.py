"""A benchmark's rows for people: a summary for the terminal, 80 columns, and all of it as Markdown.

Each suite has tables of speed, lengths and shares, costs, and texts. Rows are sorted by the speedup over plain
decoding. Those whose text is not the plain one, or which make no promise about it, stand apart, in red, and take no
part in the ranking.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lede.bench_cells import BY_SOURCE, COSTS, LENGTHS, NOTHING, OPTIONAL, SPEED, SUMMARY, TEXTS, TIMES, Column
from lede.bench_row import BenchRow
from lede.bench_runs import CONTROL, PLAIN
from lede.bench_speed import FEWEST_PROMPTS, Speedup

TABLES = {
    "speed": SPEED,
    "lengths and shares": (*LENGTHS, *TIMES),
    "rounds and tokens by source": BY_SOURCE,
    "costs": COSTS,
    "texts": TEXTS,
}
"""The tables and their columns."""

LEGEND = (
    "Speed is of the tokens after the first over the seconds after the prefill, a ratio of sums over prompts with a "
    "95 % bootstrap interval by prompt; median: of the prompts' own ratios. A ratio whose interval holds 1 or touches "
    "that of plain decoding against itself is not resolved, nor is any of fewer than "
    f"{FEWEST_PROMPTS} prompts. hf: transformers' generate; static: the static setting "
    "chosen on validation prompts; lookup: the static lookup chosen there; hf lookup: transformers' prompt lookup; "
    "rate: accepted / drafted tokens, pooled; tokens: written a round, the correction or "
    "bonus token included; in brackets: not resolved; exact: same text as transformers' generate, "
    "(own): as lede's own plain decoding on prompts where transformers failed."
)


@dataclass(frozen=True)
class SuiteTables:
    """What one suite's tables show."""

    name: str
    """Name of the suite."""
    control: Speedup | None
    """Plain decoding against itself."""
    best_static: str | None
    """The static contender chosen on validation prompts."""
    hindsight_static: str | None
    """The fastest one on the test prompts."""
    rows: Sequence[BenchRow]
    """Its rows."""
    best_lookup: str | None = None
    """The static lookup chosen on validation prompts."""
    hindsight_lookup: str | None = None
    """The fastest one on the test prompts."""

    @property
    def ranking(self) -> list[BenchRow]:
        """Rows that are compared, fastest first."""
        return _fastest_first(row for row in self.rows if row.ranked)

    @property
    def apart(self) -> list[BenchRow]:
        """Rows that answered some prompt, but not with the plain text, or without a promise of it."""
        return _fastest_first(
            row for row in self.rows if not row.ranked and row.exact is not None and row.name != CONTROL
        )

    @property
    def failed(self) -> list[BenchRow]:
        """Rows with prompts that failed."""
        return [row for row in self.rows if row.n_failed]

    def notes(self) -> list[str]:
        """What the tables rest on, a sentence each."""
        n_prompts = next((row.n_prompts for row in self.rows if row.name == PLAIN), 0)
        notes = [f"{n_prompts} prompts."]
        if self.control is None:
            notes.append("Plain decoding was not run twice: nothing is resolved.")
        else:
            notes.append(f"Plain decoding against itself: {_interval(self.control)}.")
        if self.best_static is None:
            notes.append("No static setting was chosen on validation prompts.")
        else:
            notes.append(f"Best static on validation prompts: {self._described(self.best_static)}.")
        if self.hindsight_static is not None:
            notes.append(f"Best static in hindsight: {self._described(self.hindsight_static)}.")
        if self.best_lookup is not None:
            notes.append(f"Best static lookup on validation prompts: {self._described(self.best_lookup)}.")
        if self.hindsight_lookup is not None:
            notes.append(f"Best static lookup in hindsight: {self._described(self.hindsight_lookup)}.")
        return notes

    def settings(self) -> list[tuple[str, str]]:
        """Name and settings of contenders whose name does not say them."""
        return [(row.name, row.settings) for row in self.rows if row.kind != PLAIN and row.settings != row.name]

    def cost_notes(self) -> list[tuple[str, str]]:
        """Name of each contender whose cost needs a word, and the word."""
        return [(row.name, row.cost.note) for row in self.rows if row.cost.note]

    def failures(self) -> list[str]:
        """A sentence for each contender that failed."""
        return [f"{r.name} failed on {r.n_failed} of {r.n_prompts} prompts: {r.error}" for r in self.failed]

    def _described(self, name: str) -> str:
        row = next(row for row in self.rows if row.name == name)
        faster = row.speedup_over_plain
        shown = name if row.settings == name else f"{name} ({row.settings})"
        return shown if faster is None else f"{shown}, {_interval(faster)} times plain"


def terminal(suites: Sequence[SuiteTables]) -> Group:
    """The speed of everybody for a terminal, and who failed."""
    parts: list[RenderableType] = []
    for suite in suites:
        parts += [Text(f"{suite.name}: {' '.join(suite.notes())}", style="bold"), _summary(suite)]
        if suite.apart:
            parts.append(Text("red: not the plain text, or no promise of it; out of the ranking", style="red"))
        parts += [Text(line, style="red") for line in suite.failures()]
        parts += [Text(f"{name} = {settings}", style="dim") for name, settings in suite.settings()]
        parts.append(Text())
    return Group(*parts, Text(LEGEND, style="dim"))


def markdown(suites: Sequence[SuiteTables]) -> str:
    """All tables as Markdown."""
    parts: list[str] = []
    for suite in suites:
        parts.append(f"## {suite.name}\n\n{' '.join(suite.notes())}")
        for title, columns in TABLES.items():
            if lines := _lines(suite.ranking, columns):
                parts.append(f"### {suite.name}: {title}\n\n{lines}")
        if suite.apart:
            parts.append(
                f"### {suite.name}: not the plain text (out of the ranking)\n\n"
                "Texts that differ from plain decoding at no numerical tie, or contenders that make no promise."
            )
            parts += [lines for columns in TABLES.values() if (lines := _lines(suite.apart, columns))]
        if suite.failed:
            parts.append("Failures:\n\n" + "\n".join(f"- {line}" for line in suite.failures()))
        if suite.cost_notes():
            notes = "\n".join(f"- {_bare(name)}: {note}" for name, note in suite.cost_notes())
            parts.append(f"Notes on costs:\n\n{notes}")
        if suite.settings():
            settings = "\n".join(f"- {_bare(name)}: `{settings}`" for name, settings in suite.settings())
            parts.append(f"Settings:\n\n{settings}")
    return "\n\n".join([*parts, LEGEND]) + "\n"


def _summary(suite: SuiteTables) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    shown.add_column("policy", overflow="fold", min_width=12)
    every = [*suite.ranking, *suite.apart]
    columns = [each for each in SUMMARY if each not in OPTIONAL or any(each.cell(row) != NOTHING for row in every)]
    for column in columns:
        shown.add_column(column.short, justify="right", no_wrap=True)
    for rows in (suite.ranking, suite.apart):
        for row in rows:
            cells = [column.cell(row).replace(", ", "\n") for column in columns]
            shown.add_row(Text(row.name), *cells, style=None if row.ranked else "red")
        shown.add_section()
    return shown


def _lines(rows: Sequence[BenchRow], columns: Sequence[Column]) -> str:
    """A table of the rows and columns that show anything; empty where none does."""
    cells = {(row.name, column.short): column.cell(row) for row in rows for column in columns}
    used = [column.short for column in columns if any(cells[row.name, column.short] != NOTHING for row in rows)]
    told = [row.name for row in rows if any(cells[row.name, short] != NOTHING for short in used)]
    if not told:
        return ""
    head = ["policy", *(short.replace("\n", " ") for short in used)]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---", *["---:"] * len(used)]) + "|"]
    lines += ["| " + " | ".join([_bare(name), *(cells[name, short] for short in used)]) + " |" for name in told]
    return "\n".join(lines)


def _bare(text: str) -> str:
    """Text that breaks no table of Markdown."""
    return text.replace("|", "\\|")


def _fastest_first(rows: Iterable[BenchRow]) -> list[BenchRow]:
    """By the paired speedup over plain decoding; where there is none, by tokens a second."""

    def speed(row: BenchRow) -> tuple[float, float]:
        faster, rate = row.speedup_over_plain, row.tokens_per_second
        return 0.0 if faster is None else faster.value, 0.0 if rate is None else rate.value

    return sorted(rows, key=speed, reverse=True)


def _interval(found: Speedup) -> str:
    return f"{found.value:.2f} ({found.lower:.2f}-{found.upper:.2f})"
