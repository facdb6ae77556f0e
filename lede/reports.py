"""Tables and plots of results."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from lede.atomic import write_atomically
from lede.benchmark import BenchmarkRow
from lede.statistics import Round

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, GREY, INK = "#2a6f97", "#b8c4cc", "#22303c"
_COLUMNS = ("policy", "tok/s", "plain", "hf", "accepted", "rate", "layer", "repeats", "exact")
LEGEND = (
    "plain, hf: times lede's plain decoding and transformers' generate, median over prompts; accepted: drafted tokens "
    "kept a round; rate: accepted / drafted; layer: mean exit layer of drafted tokens; repeats: share of 4-grams that "
    "stood in the text before; exact: same text as transformers' generate"
)
_CURVE_COLOURS = (BLUE, "#d1495b", "#3f8f5b", "#e09f3e", "#7b5ea7", "#4d4d4d")
_LAYER_COLOURS = ("green", "cyan", "blue", "magenta", "yellow", "red")


def cells(row: BenchmarkRow) -> list[str]:
    """A row as text, in the order of the table's columns."""

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    def times(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}x"

    return [
        row.name,
        show(row.tokens_per_second, ".1f"),
        times(row.speedup),
        times(row.speedup_over_transformers),
        show(row.mean_accepted_length, ".2f"),
        show(row.acceptance_rate, ".2f"),
        show(row.mean_exit_layer, ".1f"),
        show(row.repetition, ".2f"),
        row.exact,
    ]


def table(rows: Sequence[BenchmarkRow], title: str) -> Table:
    """The rows for a terminal; inexact ones are red."""
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for number, column in enumerate(_COLUMNS):
        shown.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*cells(row), style="red" if row.exact == "NO" else None)
    return shown


def markdown(rows: Sequence[BenchmarkRow]) -> str:
    """The rows as a Markdown table."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + "|".join(["---", *["---:"] * (len(_COLUMNS) - 1)]) + "|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join([*lines, "", LEGEND]) + "\n"


def coloured(tokenizer: Any, prompt: Sequence[int], first: int, rounds: Sequence[Round]) -> Text:
    """A generated text whose accepted tokens are coloured by what drafted them: a layer, or the stack with gaps.

    Plain text was written by the whole model: the prompt, the first token, corrections and bonus tokens.
    """
    drafters = sorted({(r.exit_layer or 0, r.skipped) for r in rounds if r.drafted})
    colour = {drafter: _LAYER_COLOURS[i % len(_LAYER_COLOURS)] for i, drafter in enumerate(drafters)}
    spans: list[tuple[int, str]] = [(len(prompt), "dim"), (1, "")]
    for r in rounds:
        style = colour[r.exit_layer or 0, r.skipped] if r.drafted else ""
        spans += [(r.accepted, style), (len(r.tokens) - r.accepted, "")]
    ids = [*prompt, first, *(token for r in rounds for token in r.tokens)]
    text, end, shown = Text(), 0, ""
    for n_tokens, style in spans:
        end += n_tokens
        so_far = tokenizer.decode(ids[:end], skip_special_tokens=True).rstrip(
            "\ufffd"
        )  # a character may end in the next span
        text.append(so_far[len(shown) :], style=style)
        shown = so_far
    text.append("\n\ndrafted at layer: ", style="dim")
    for layer, skipped in drafters:
        text.append(f"without {skipped} sublayers " if skipped else f"{layer} ", style=colour[layer, skipped])
    return text


def plot_agreement(agreement: Sequence[float], candidates: Sequence[int], path: Path) -> None:
    """Agreement of each layer's likeliest token with the whole model's choice, `(layer,)` from layer 1."""
    figure, axes = _figure("Agreement with the last layer", "layer", "share of generated tokens")
    layers = range(1, len(agreement) + 1)
    axes.plot(layers, agreement, color=GREY, marker="o", markersize=4, zorder=1)
    axes.scatter(candidates, [agreement[c - 1] for c in candidates], color=BLUE, zorder=2, label="candidates")
    axes.set_ylim(0, 1.03)
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, loc="lower right")
    _save(figure, path)


def plot_speed(rows: Sequence[BenchmarkRow], path: Path) -> None:
    """Speed over plain decoding on the same engine, a bar a contender."""
    figure, axes = _figure("Speed over plain decoding", "", "times plain (median over prompts)")
    bars = axes.bar(
        [textwrap.fill(row.name, 12) for row in rows],  # long names side by side run into one another
        [row.speedup or 0.0 for row in rows],
        color=[BLUE if row.acceptance_rate is not None else GREY for row in rows],
        width=0.6,
    )
    axes.bar_label(bars, fmt="%.2f", padding=2, color=INK)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.margins(y=0.12)
    _save(figure, path)


@dataclass(frozen=True)
class Curve:
    """A quantity over training steps, for several seeds."""

    name: str
    """What the legend says."""
    steps: Sequence[int]
    """Updates so far, ascending."""
    values: Sequence[Sequence[float]]
    """The quantity, `(seed, step)`."""


def plot_curves(curves: Sequence[Curve], title: str, y: str, path: Path) -> None:
    """Mean and range over seeds; the first six curves in colour, best first, the others grey."""
    figure, axes = _figure(title, "updates", y)
    n_coloured = len(_CURVE_COLOURS)
    for place, curve in reversed([*enumerate(curves)]):  # the best on top
        coloured = place < n_coloured
        colour = _CURVE_COLOURS[place] if coloured else GREY
        mean = [sum(each) / len(each) for each in zip(*curve.values, strict=True)]
        axes.plot(curve.steps, mean, color=colour, linewidth=1.8 if coloured else 1, zorder=2 + (not place))
        if coloured and len(curve.values) > 1:
            low, high = ([f(each) for each in zip(*curve.values, strict=True)] for f in (min, max))
            axes.fill_between(curve.steps, low, high, color=colour, alpha=0.15, linewidth=0)
    handles = [*reversed(axes.lines)][:n_coloured]
    labels = [curve.name for curve in curves[:n_coloured]]
    if len(curves) > n_coloured:
        handles.append(axes.lines[0])
        labels.append(f"{len(curves) - n_coloured} more")
    figure.set_figheight(figure.get_figheight() + 0.2 * len(labels))
    figure.legend(handles, labels, frameon=False, loc="outside lower left", fontsize="small")
    _save(figure, path)


def _figure(title: str, x: str, y: str) -> tuple[Any, Axes]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6eaed")
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    content = io.BytesIO()
    figure.savefig(content, dpi=150, format="png")
    pyplot.close(figure)
    write_atomically(path, content.getvalue())
