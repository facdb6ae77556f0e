"""A comparison of two benchmarks on the terminal, 80 columns."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lede.bench_cells import NOT_RESOLVED, NOTHING, exact_cell
from lede.bench_row import BenchRow
from lede.bench_runs import PLAIN
from lede.comparison import ComparedRow, Comparison
from lede.intervals import Interval

_LEGEND = (
    "first, second: speed over each report's own plain decoding, with 95 % intervals over prompts; change: second over "
    "first, on the prompts that both decoded. A change whose interval holds 1 or touches that of plain decoding "
    "against itself is not resolved. Without common prompts it has no interval, and is resolved where the speeds' own "
    "are apart."
)


def shown(found: Comparison) -> Group:
    """The rows by suite, then what differs beside them."""
    parts: list[RenderableType] = []
    for suite in dict.fromkeys(row.suite for row in found.rows):
        rows = [row for row in found.rows if row.suite == suite]
        parts += [Text(f"{suite}: {_prompts(rows)}", style="bold"), _table(rows)]
    parts.append(Text(_LEGEND, style="dim"))
    if found.differences:
        parts.append(Text("\ndiffers, first -> second:"))
        parts += [Text(f"  {line}") for line in found.differences]
    return Group(*parts)


def _table(rows: list[ComparedRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("policy", overflow="fold", min_width=12)
    for column in ("first", "second", "change", "exact"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        change = row.ratio if row.interval is None else row.interval.value  # what was resolved, and is shown
        changed = row.resolved and row.name != PLAIN
        colour = "" if not changed or change is None else "green" if change > 1 else "red"
        worse = row.second is not None and row.second.exact == "NO"
        table.add_row(
            Text(row.name),
            _speed(row.first),
            _speed(row.second),
            Text(_change(row), style=colour),
            Text(_exact(row), style="red" if worse else ""),
        )
    return table


def _prompts(rows: list[ComparedRow]) -> str:
    """How many prompts there are, and how fast plain decoding is."""
    columns = [[row.first for row in rows], [row.second for row in rows]]
    known = [[row for row in column if row is not None] for column in columns]
    counts = " and ".join(str(max((row.n_prompts for row in column), default=0)) for column in known)
    plain = " and ".join(next((_rate(row) for row in column if row.name == PLAIN), NOTHING) for column in known)
    paired = max(row.n_paired for row in rows)
    return f"{counts} prompts, {paired} in common; plain decoding {plain} tok/s"


def _rate(row: BenchRow) -> str:
    return NOTHING if row.tokens_per_second is None else f"{row.tokens_per_second.value:.1f}"


def _speed(row: BenchRow | None) -> str:
    if row is None:
        return "absent"
    found = row.speedup_over_plain
    if found is None:
        return NOTHING
    return "1" if row.name == PLAIN else _interval(found)


def _change(row: ComparedRow) -> str:
    if row.ratio is None or row.name == PLAIN:
        return NOTHING
    told = f"{row.ratio:.2f} unpaired" if row.interval is None else _interval(row.interval)
    return told if row.resolved else f"{told}\n{NOT_RESOLVED}"


def _exact(row: ComparedRow) -> str:
    verdicts = [exact_cell(each) for each in (row.first, row.second) if each is not None]
    return verdicts[0] if len(set(verdicts)) == 1 else "\n-> ".join(verdicts)


def _interval(found: Interval) -> str:
    return f"{found.value:.2f} ({found.lower:.2f}-{found.upper:.2f})"
