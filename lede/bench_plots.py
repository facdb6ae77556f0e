"""Pictures of a benchmark: speed, accepted lengths, exit layers, agreement by layer, and what verification costs."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lede.atomic import write_atomically
from lede.bench_figures import PromptFigures
from lede.bench_report import BenchReport
from lede.bench_row import BenchRow
from lede.bench_runs import CONTROL, PLAIN
from lede.reports import BLUE, GREY, INK
from lede.round_sources import SOURCES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RED = "#d1495b"
_LINES = (BLUE, RED, "#3f8f5b", "#e09f3e", "#7b5ea7", "#4d4d4d")
_BINS = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 9), (10, 10**9))
"""Accepted tokens, first and last of each colour."""
_MOST_COLUMNS = 3
_SOURCES = dict(zip(SOURCES, (BLUE, "#3f8f5b", "#e09f3e", GREY), strict=True))


def write_plots(out: Path, content: dict[str, Any]) -> list[Path]:
    """Draw what a report has figures for, as PNG files in the benchmark's folder.

    Args:
        out: The folder.
        content: Of report.json.

    Returns:
        The files that were written.

    Raises:
        ImportError: The package `matplotlib` is not installed.
        ValueError: The content is of no report.
    """
    report = BenchReport.from_json(content)
    plots = {
        "speed.png": any(row.speedup_over_plain for row in report.rows) and plot_speed,
        "accepted_lengths.png": any(each.n_drafting for each in report.prompts) and plot_lengths,
        "sources.png": any("lookup" in each.sources for each in report.prompts) and plot_sources,
        "exit_layers.png": any(each.exit_layers for each in report.prompts) and plot_exit_layers,
        "agreement.png": any(suite.agreement for suite in report.suites) and plot_agreement,
        "verification.png": len(report.verification_seconds) > 1 and plot_verification,
    }
    written = []
    for name, draw in plots.items():
        if draw:
            draw(report, out / name)
            written.append(out / name)
    return written


def plot_speed(report: BenchReport, path: Path) -> None:
    """Speed over plain decoding with its interval, a panel a suite; the band is plain decoding against itself."""
    names = [name for name in _order(report) if name not in (PLAIN, CONTROL)]
    figure, panels = _panels([suite.name for suite in report.suites], len(names), "times plain decoding")
    for suite, axes in zip(report.suites, panels, strict=True):
        rows = {row.name: row for row in report.rows if row.suite == suite.name}
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=":", zorder=1)
        if suite.control is not None:
            axes.axvspan(suite.control.lower, suite.control.upper, color=GREY, alpha=0.35, linewidth=0, zorder=0)
        for place, name in enumerate(names):
            found = rows[name].speedup_over_plain if name in rows else None
            if found is None:
                continue
            colour = RED if not rows[name].ranked else BLUE if found.resolved else "#7d8b95"
            axes.hlines(place, found.lower, found.upper, color=colour, linewidth=2, zorder=2)
            axes.plot(found.value, place, "o", color=colour, markersize=5, zorder=3)
            axes.annotate(
                f"{found.value:.2f}",
                (1, place),
                xycoords=("axes fraction", "data"),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color=colour,
                fontsize="small",
            )
        _label(axes, names)
        axes.margins(x=0.06)
    _legend(figure, [("resolved", BLUE), ("not resolved", "#7d8b95"), ("inexact or lossy", RED), ("control", GREY)])
    _save(figure, path, "Speed over plain decoding, 95 % intervals over prompts")


def plot_lengths(report: BenchReport, path: Path) -> None:
    """How many tokens verification kept, of the rounds that drafted: a bar a contender, a panel a suite."""
    drafting = {each.name for each in report.prompts if each.n_drafting}
    names = [name for name in _order(report) if name in drafting]
    figure, panels = _panels([suite.name for suite in report.suites], len(names), "share of rounds that drafted, %")
    from matplotlib import colormaps

    colours = [colormaps["Blues"](0.08 + 0.85 * i / (len(_BINS) - 1)) for i in range(len(_BINS))]
    for suite, axes in zip(report.suites, panels, strict=True):
        for place, name in enumerate(names):
            counts = _accepted_lengths(each for each in report.prompts if (each.suite, each.name) == (suite.name, name))
            left = 0.0
            for (first, last), colour in zip(_BINS, colours, strict=True):
                share = 100 * sum(counts[first : last + 1]) / max(sum(counts), 1)
                axes.barh(place, share, left=left, color=colour, height=0.7)
                left += share
            if sum(counts):
                mean = sum(length * n for length, n in enumerate(counts)) / sum(counts)
                axes.annotate(
                    f"{mean:.1f}",
                    (100, place),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    color=INK,
                    fontsize="small",
                )
        _label(axes, names)
        axes.set_xlim(0, 100)
    labels = [str(a) if a == b else f"{a}+" if b >= 10**9 else f"{a}-{b}" for a, b in _BINS]
    _legend(figure, list(zip(labels, colours, strict=True)))
    _save(figure, path, "Accepted tokens in rounds that drafted, and their mean")


def plot_sources(report: BenchReport, path: Path) -> None:
    """Where the written tokens come from: a bar a contender, a panel a suite."""
    shares = {(row.suite, row.name): row.token_shares for row in report.rows}
    drafting = {each.name for each in report.prompts if each.n_drafting}
    names = [name for name in _order(report) if name in drafting]
    figure, panels = _panels([suite.name for suite in report.suites], len(names), "share of the tokens, %")
    for suite, axes in zip(report.suites, panels, strict=True):
        for place, name in enumerate(names):
            left, found = 0.0, shares.get((suite.name, name)) or {}
            for source, share in found.items():
                axes.barh(place, 100 * share, left=left, color=_SOURCES[source], height=0.7)
                left += 100 * share
        _label(axes, names)
        axes.set_xlim(0, 100)
    _legend(figure, list(_SOURCES.items()))
    _save(figure, path, "Tokens by where the draft of their round came from")


def plot_exit_layers(report: BenchReport, path: Path) -> None:
    """Mean exit layer of drafted tokens by contender and category."""
    drafted: dict[tuple[str, str], list[tuple[int, int]]] = {}
    several = len(report.suites) > 1
    for each in report.prompts:
        place = f"{each.suite}: {each.category}" if several and each.category else each.category or each.suite
        drafted.setdefault((each.name, place), []).extend(each.exit_layers)
    drafted = {key: counts for key, counts in drafted.items() if counts}
    names = [name for name in _order(report) if any(key[0] == name for key in drafted)]
    places = list(dict.fromkeys(place for _, place in drafted))
    means = np.full((len(names), len(places)), np.nan)
    for (name, place), counts in drafted.items():
        total = sum(n for _, n in counts)
        means[names.index(name), places.index(place)] = sum(layer * n for layer, n in counts) / total
    figure, (axes,) = _panels([""], len(names), "", width=max(4.8, 0.42 * len(places) + 3.0), extra=1.3)
    deepest = float(np.nanmax(means)) + 1
    image = axes.imshow(means, cmap="Blues", aspect="auto", vmin=1, vmax=deepest)
    for (row, column), mean in np.ndenumerate(means):
        if not math.isnan(mean):
            colour = "white" if mean > 1 + 0.55 * (deepest - 1) else INK
            axes.text(column, row, f"{mean:.1f}", ha="center", va="center", color=colour, fontsize="x-small")
    axes.set_xticks(range(len(places)), [textwrap.shorten(place, 30) for place in places], rotation=45, ha="right")
    axes.tick_params(axis="x", labelsize="small")
    axes.grid(False)
    _label(axes, names)
    figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02).set_label("layer", fontsize="small")
    _save(figure, path, "Mean exit layer of drafted tokens, by category")


def plot_agreement(report: BenchReport, path: Path) -> None:
    """Share of the plain text that each layer's likeliest token foretells, a line a suite."""
    figure, (axes,) = _panels([""], 8, "layer")
    for place, suite in enumerate(each for each in report.suites if each.agreement):
        layers = range(1, len(suite.agreement) + 1)
        colour = _LINES[place % len(_LINES)]
        axes.plot(layers, suite.agreement, color=colour, marker="o", markersize=3, label=suite.name)
    axes.set_ylim(0, 1.03)
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel("share of generated tokens", fontsize="small")
    axes.grid(axis="y", color="#e6eaed")
    axes.legend(frameon=False, loc="lower right", fontsize="small")
    _save(figure, path, "Agreement with the last layer")


def plot_verification(report: BenchReport, path: Path) -> None:
    """What a pass over q tokens costs, and the acceptance from which drafts of so many tokens pay."""
    seconds = report.verification_seconds
    figure, (cost, acceptance) = _panels(["cost of a pass", "break-even acceptance"], 9, "", share=False)
    blocks = range(1, len(seconds) + 1)
    cost.plot(blocks, [each / seconds[0] for each in seconds], color=BLUE, marker="o", markersize=3)
    cost.plot(blocks, blocks, color=GREY, linestyle=":", label="one at a time")
    cost.set_ylim(0, 1.15 * max(each / seconds[0] for each in seconds))
    cost.set_xlabel("tokens in the pass", fontsize="small")
    cost.set_ylabel("times a pass over one token", fontsize="small")
    for (layer, found), colour in zip(report.break_even.items(), _LINES, strict=False):
        values = [math.nan if each is None else each for each in found]
        name = f"layer {layer}" + (": never" if all(each is None for each in found) else "")
        acceptance.plot(range(1, len(found) + 1), values, color=colour, marker="o", markersize=3, label=name)
    acceptance.set_ylim(0, 1.03)
    acceptance.set_xlabel("drafted tokens", fontsize="small")
    acceptance.set_ylabel("probability that a token is accepted", fontsize="small")
    for axes in (cost, acceptance):
        axes.grid(axis="y", color="#e6eaed")
        axes.legend(frameon=False, loc="lower right", fontsize="small")
    _save(figure, path, "What verification costs, and when drafts pay")


def _accepted_lengths(figures: Iterable[PromptFigures]) -> list[int]:
    counts: list[int] = []
    for each in figures:
        counts += [0] * (len(each.accepted_lengths) - len(counts))
        for length, n in enumerate(each.accepted_lengths):
            counts[length] += n
    return counts


def _order(report: BenchReport) -> list[str]:
    """Names of contenders, fastest first: by the mean of their speedups over the suites."""

    def speed(row: BenchRow) -> float:
        return row.speedup_over_plain.value if row.speedup_over_plain is not None else 0.0

    speeds: dict[str, list[float]] = {}
    for row in report.rows:
        speeds.setdefault(row.name, []).append(speed(row))
    return sorted(speeds, key=lambda name: sum(speeds[name]) / len(speeds[name]), reverse=True)


def _panels(
    titles: Sequence[str], n_bars: int, x: str, share: bool = True, width: float | None = None, extra: float = 0.0
) -> tuple[Any, list[Axes]]:
    """A figure with a panel a title, at most three side by side; as high as the bars need.

    Args:
        titles: Of the panels.
        n_bars: Bars or lines of labels in a panel.
        x: Label of the horizontal axis.
        share: Whether the panels of a row share the labels of their bars.
        width: Of the figure in inches; by the panels unless given.
        extra: More height in inches.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    n_columns = min(len(titles), _MOST_COLUMNS)
    n_rows = math.ceil(len(titles) / n_columns)
    size = (
        width or max(6.4, 2.0 + 2.6 * n_columns if share else 4.2 * n_columns),
        n_rows * (0.3 * n_bars + 1.0) + 0.8 + extra,
    )
    figure, grid = pyplot.subplots(n_rows, n_columns, figsize=size, layout="constrained", squeeze=False, sharey=share)
    panels = list(grid.flat)
    for axes, title in zip(panels, titles, strict=False):
        axes.set_title(title, loc="left", color=INK, fontsize="medium")
        axes.set_xlabel(x, fontsize="small")
        axes.tick_params(labelsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#e6eaed")
        axes.set_axisbelow(True)
    for axes in panels[len(titles) :]:
        axes.remove()
    return figure, panels[: len(titles)]


def _label(axes: Axes, names: Sequence[str]) -> None:
    """Name the bars, the first one on top."""
    axes.set_yticks(range(len(names)), [_wrapped(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)


def _wrapped(name: str) -> str:
    """A name in lines that break between settings."""
    return textwrap.fill(name.replace(":", ": ").replace(";", "; "), 26) if len(name) > 26 else name


def _legend(figure: Any, entries: Sequence[tuple[str, Any]]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in entries]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize="small",
        handlelength=1.2,
        columnspacing=1.2,
    )


def _save(figure: Any, path: Path, title: str) -> None:
    from matplotlib import pyplot

    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize="large")
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format="png")
    pyplot.close(figure)
    write_atomically(path, content.getvalue())
