"""A sweep on the terminal, 80 columns, and as a picture."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lede.learning_curve import read_curve
from lede.reports import Curve, plot_curves
from lede.run_folder import RunFolder
from lede.sweep_results import SettingResult, SweepResults

MEASURES = {"speedup": "simulated speedup over plain decoding", "reward": "reward of a token"}
_LEGEND = (
    "{measure}, on the validation prompts: mean over seeds with Student's 95 % interval; seconds: of training a run. "
    "Checkpoints and settings are chosen by these prompts, so the best flatters itself: `lede evaluate` on others."
)


def report(results: SweepResults) -> Group:
    """What was found, as a table, and why settings failed."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("setting", overflow="fold")
    for column in ("seeds", results.measure or "score", "seconds"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("best run", overflow="fold")
    for each in results.settings:
        shown.add_row(
            Text(_name(each)),
            f"{each.n_finished}/{each.n_seeds}",
            _score(each),
            "-" if each.seconds is None else f"{each.seconds:.1f}",
            Text(_best(each)),
            style="red" if each.error is not None else None,
        )
    legend = _LEGEND.format(measure=MEASURES[results.measure or "reward"])
    failed = [
        Text(f"{_name(each)} failed: {each.error}", style="red") for each in results.settings if each.error is not None
    ]
    return Group(shown, Text(legend, style="dim"), *failed)


def plot_sweep(results: SweepResults, out: Path) -> None:
    """The learning curves by setting, mean and range over seeds, as sweep.png."""
    curves = []
    for each in results.settings:
        names = [run.name for run in results.runs if run.setting == each.setting and run.result is not None]
        known = [{p.step: p.score.merit for p in read_curve(RunFolder(out / name).curve)} for name in names]
        # steps that every seed has: after one has stopped early, the mean would be of others
        steps = sorted(set.intersection(*(set(values) for values in known))) if known else []
        if steps:
            values = [[values[step] for step in steps] for values in known]
            curves.append(Curve(_name(each), steps, values))
    measure = MEASURES[results.measure or "reward"]
    plot_curves(curves, "Learning curves: mean, and range over seeds", measure, out / "sweep.png")


def _name(each: SettingResult) -> str:
    """The setting with spaces, at which lines may break."""
    return each.setting.name.replace(",", " ") or "as given"


def _score(each: SettingResult) -> str:
    if each.mean is None:
        return "-"
    if each.interval is None:
        return f"{each.mean:.3f}"
    return f"{each.mean:.3f} ({each.interval.lower:.3f}..{each.interval.upper:.3f})"


def _best(each: SettingResult) -> str:
    """The best run's folder without the setting, which stands in the same row."""
    return "-" if each.best is None else each.best.rpartition(",")[2]
