"""What the rows of a benchmark's table are held against: plain decoding again, and the best of those that are blind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lede.bench_figures import PromptFigures
from lede.bench_row import Exact
from lede.bench_runs import CONTROL, PLAIN, PROMPT_LOOKUP, ContenderSetup, Setup
from lede.bench_speed import Speedup, speedup

Figures = Mapping[tuple[str, str], list[PromptFigures]]
"""Figures of every prompt by suite and contender."""


@dataclass(frozen=True)
class Baselines:
    """What the rows of one suite are held against."""

    suite: str
    """Name of the suite."""
    control: Speedup | None
    """Plain decoding again over plain decoding, after the prefill: what nothing looks like on this machine."""
    control_with_prefill: Speedup | None
    """The same of the whole call."""
    best_static: str | None
    """Name of the static contender that was chosen on validation prompts; None when none was."""
    hindsight_static: str | None
    """Name of the static contender of the largest speedup over plain on the test prompts, of those without failures and
    with the plain text."""
    best_lookup: str | None = None
    """Name of the static lookup that was chosen on validation prompts; None when none was."""
    hindsight_lookup: str | None = None
    """Name of the static lookup that is fastest on the test prompts, as for `hindsight_static`."""
    prompt_lookup: str | None = None
    """Name of transformers' prompt lookup: the one chosen on validation prompts, or the first given."""


def baselines(figures: Figures, setup: Setup) -> list[Baselines]:
    """What each suite's rows are held against, in the order of the setup."""
    found = []
    for suite in dict.fromkeys(each.suite for each in setup.contenders):
        plain, again = figures.get((suite, PLAIN), []), figures.get((suite, CONTROL), [])
        static, lookup = _of_kind("static", suite, figures, setup), _of_kind("lookup", suite, figures, setup)
        rivals = _of_kind(PROMPT_LOOKUP, suite, figures, setup)
        found.append(
            Baselines(
                suite=suite,
                control=speedup(again, plain),
                control_with_prefill=speedup(again, plain, with_prefill=True),
                best_static=_chosen(static),
                hindsight_static=_fastest(static, figures, plain, setup),
                best_lookup=_chosen(lookup),
                hindsight_lookup=_fastest(lookup, figures, plain, setup),
                prompt_lookup=_chosen(rivals) or next((each.name for each in rivals), None),
            )
        )
    return found


def verdict(
    sound: Sequence[PromptFigures], contender: ContenderSetup, temperature: float
) -> tuple[Exact | None, int, int]:
    """What the texts are worth, and the positions of ties and of errors.

    Args:
        sound: Of prompts that did not fail.
        contender: Whose they are.
        temperature: Of the benchmark.
    """
    ties = sum(tie for each in sound for _, _, tie in each.divergences)
    wrong = sum(len(each.divergences) for each in sound) - ties
    if not sound:
        return None, 0, 0
    if temperature:
        return ("NO" if contender.lossy else "law"), 0, 0
    return ("NO" if wrong else "ties" if ties else "yes"), ties, wrong


def _of_kind(name: str, suite: str, figures: Figures, setup: Setup) -> list[ContenderSetup]:
    """The contenders of a suite that resolved to settings of that name and decoded anything."""
    return [
        each
        for each in setup.contenders
        if each.suite == suite and each.settings.partition(":")[0] == name and (suite, each.name) in figures
    ]


def _chosen(contenders: Sequence[ContenderSetup]) -> str | None:
    """The one that was chosen on validation prompts."""
    return next((each.name for each in contenders if each.cost.evaluations), None)


def _fastest(
    contenders: Sequence[ContenderSetup], figures: Figures, plain: Sequence[PromptFigures], setup: Setup
) -> str | None:
    """The one with the largest speedup over plain, of those that failed nowhere and wrote the plain text."""
    temperature = float(setup.config.get("temperature") or 0.0)
    speeds: dict[str, float] = {}
    for each in contenders:
        ours = figures[each.suite, each.name]
        told, _, _ = verdict(ours, each, temperature)
        faster = speedup(ours, plain)
        if faster is not None and told in ("yes", "ties", "law") and all(f.error is None for f in ours):
            speeds[each.name] = faster.value
    return max(speeds, key=lambda name: speeds[name], default=None)
