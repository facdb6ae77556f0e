"""The table of a benchmark: one row a suite and contender, each column with a field and a formula of its own.

Rates and lengths come in two kinds that are easily mixed up: pooled, a ratio of sums over all rounds of all prompts,
and the mean over prompts of the ratio on each. `docs/benchmark.md` has every formula.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lede.bench_baselines import Baselines, baselines, verdict
from lede.bench_figures import PromptFigures, own_reference, prompt_figures, with_modelled_seconds
from lede.bench_modelled import RoundCosts, modelled_seconds, observed
from lede.bench_row import SHARES, BenchRow
from lede.bench_runs import CONTROL, PLAIN, TRANSFORMERS, ContenderSetup, PromptRecord, PromptRun, Setup
from lede.bench_speed import Speedup, break_even_tokens, rate, speedup
from lede.cost_profile import CostProfile
from lede.round_sources import add_counts, round_shares, token_shares
from lede.text_overlap import mean_rouge

__all__ = ["Baselines", "BenchRow", "Figures", "baselines", "figures_of", "rows", "table"]

Figures = dict[tuple[str, str], list[PromptFigures]]


def figures_of(
    runs: Sequence[PromptRun],
    setup: Setup,
    prompts: Sequence[PromptRecord] = (),
    profile: CostProfile | None = None,
    out: Path | None = None,
) -> Figures:
    """The figures of every prompt by suite and contender, with modelled seconds where there is a profile.

    Policies are looked up in the benchmark's folder `out` first, for what they observe.

    Raises:
        ValueError: A run is of a contender that the setup does not name.
    """
    known = {(each.suite, each.name): each for each in setup.contenders}
    figures = prompt_figures(runs, prompts)
    odd = next((key for key in figures if key not in known), None)
    if odd is not None:
        raise ValueError(f"the runs hold contender '{odd[1]}' on suite '{odd[0]}', which the setup does not name")
    if profile is None:
        return figures
    costs = RoundCosts(profile.costs)

    def modelled(key: tuple[str, str]) -> dict[int, tuple[float, float]]:
        own = (run for run in runs if (run.suite, run.policy) == key)
        return modelled_seconds(own, costs, observed(known[key], out))

    return {key: with_modelled_seconds(each, modelled(key)) for key, each in figures.items()}


def rows(
    runs: Sequence[PromptRun], setup: Setup, prompts: Sequence[PromptRecord] = (), profile: CostProfile | None = None
) -> list[BenchRow]:
    """The table, in the order of the setup's contenders.

    Args:
        runs: Decodes, in any order; those of an unfinished benchmark too.
        setup: What holds throughout.
        prompts: The prompts, for their reference answers.
        profile: Cost profile of the model on this machine, for the modelled speedup.

    Raises:
        ValueError: A run is of a contender that the setup does not name.
    """
    return table(figures_of(runs, setup, prompts, profile), setup)


def table(figures: Figures, setup: Setup) -> list[BenchRow]:
    """The table from the figures of every prompt."""
    held = {each.suite: each for each in baselines(figures, setup)}
    return [_row(each, figures, held[each.suite], setup) for each in setup.contenders]


def _row(contender: ContenderSetup, figures: Figures, held: Baselines, setup: Setup) -> BenchRow:
    ours = figures.get((contender.suite, contender.name), [])
    planned = next((len(suite.test) for suite in setup.suites if suite.name == contender.suite), 0)
    never_ran = contender.failed is not None and not ours
    sound = [each for each in ours if each.error is None]
    decoded = [each for each in sound if each.counts]
    exact, n_ties, n_wrong = verdict(sound, contender, float(setup.config.get("temperature") or 0.0))

    def over(name: str | None, with_prefill: bool = False) -> Speedup | None:
        control = held.control_with_prefill if with_prefill else held.control
        others = figures.get((contender.suite, name), []) if name is not None else []
        return speedup(ours, others, control, with_prefill)

    over_plain = over(PLAIN)
    row = BenchRow(
        suite=contender.suite,
        policy=contender.as_given if contender.name != CONTROL else CONTROL,
        name=contender.name,
        settings=contender.settings,
        kind=contender.kind,
        online=contender.online,
        lossy=contender.lossy,
        n_prompts=planned if never_ran else len(ours),
        n_failed=planned if never_ran else len(ours) - len(sound),
        n_empty=len(sound) - len(decoded),
        error=next((each.error for each in ours if each.error is not None), contender.failed),
        exact=exact,
        exact_against=own_reference(each.reference for each in sound),
        n_ties=n_ties,
        n_wrong=n_wrong,
        ranked=exact in ("yes", "ties", "law") and not contender.lossy and contender.name != CONTROL,
        tokens=sum(each.tokens for each in sound),
        tokens_per_second=rate(ours),
        tokens_per_second_with_prefill=rate(ours, with_prefill=True),
        speedup_over_plain=over_plain,
        speedup_over_plain_with_prefill=over(PLAIN, with_prefill=True),
        speedup_over_transformers=over(TRANSFORMERS),
        speedup_over_transformers_with_prefill=over(TRANSFORMERS, with_prefill=True),
        speedup_over_best_static=over(held.best_static),
        speedup_over_hindsight_static=over(held.hindsight_static),
        speedup_over_best_lookup=over(held.best_lookup),
        speedup_over_hindsight_lookup=over(held.hindsight_lookup),
        speedup_over_prompt_lookup=over(held.prompt_lookup),
        rouge_reference=mean_rouge([each.rouge_reference for each in decoded if each.rouge_reference is not None]),
        rouge_plain=mean_rouge([each.rouge_plain for each in decoded if each.rouge_plain is not None]),
        repetition_share=_mean(each.repetition for each in decoded),
        cost=contender.cost,
        cost_seconds=contender.cost.seconds,
        tokens_to_break_even=break_even_tokens(
            contender.cost.seconds, over_plain, rate(figures.get((contender.suite, PLAIN), []))
        ),
        peak_memory=max((each.peak_memory for each in sound if each.peak_memory is not None), default=None),
        modelled_speedup=_modelled(decoded),
    )
    return replace(row, **_counted(decoded, setup)) if any(each.n_rounds for each in decoded) else row


def _counted(decoded: Sequence[PromptFigures], setup: Setup) -> dict[str, Any]:
    """The columns that rest on rounds, for contenders on lede's engine."""

    def total(count: Callable[[PromptFigures], float]) -> float:
        return sum(count(each) for each in decoded)

    n_rounds, drafted, committed = total(lambda f: f.n_rounds), total(lambda f: f.drafted), total(lambda f: f.committed)
    accepted, n_drafting = total(lambda f: f.accepted), total(lambda f: f.n_drafting)
    head_reads, gap_drafted = total(lambda f: f.head_reads), total(lambda f: f.gap_drafted)
    at_layers = total(lambda f: sum(n for _, n in f.exit_layers))
    seconds = {name: sum(each.sections.get(name, 0.0) for each in decoded) for name in SHARES}
    spent = sum(seconds.values())
    n_sublayers = 2 * int(setup.model["n_layers"])
    sources = add_counts(each.sources for each in decoded)
    return {
        "acceptance_rate": _ratio(accepted, drafted),
        "acceptance_rate_by_prompt": _mean(each.acceptance_rate for each in decoded),
        "mean_accepted_length": _ratio(accepted, n_rounds),
        "mean_accepted_length_by_prompt": _mean(each.mean_accepted_length for each in decoded),
        "mean_length_with_bonus": _ratio(committed, n_rounds),
        "mean_length_with_bonus_by_prompt": _mean(each.mean_length_with_bonus for each in decoded),
        "mean_draft_length": _ratio(drafted, n_drafting),
        "mean_exit_layer": _ratio(total(lambda f: sum(layer * n for layer, n in f.exit_layers)), at_layers),
        "mean_skipped_share": _ratio(total(lambda f: f.gap_skipped), gap_drafted * n_sublayers),
        "full_passes": int(n_rounds),
        "full_passes_a_token": _ratio(n_rounds, committed),
        "head_reads": int(head_reads),
        "head_reads_a_token": _ratio(head_reads, committed),
        "round_shares": round_shares(sources) or None,
        "token_shares": token_shares(sources) or None,
        "acceptance_by_source": {name: each.acceptance_rate for name, each in sources.items() if name != "plain"},
        "time_shares": {name: each / spent for name, each in seconds.items()} if spent > 0 else None,
        "search_seconds": total(lambda f: f.sections.get("search", 0.0) / f.n_repeats),
    }


def _modelled(decoded: Sequence[PromptFigures]) -> float | None:
    pairs = [
        (each.modelled_plain_seconds, each.modelled_seconds)
        for each in decoded
        if each.modelled_seconds is not None and each.modelled_plain_seconds is not None
    ]
    return _ratio(sum(plain for plain, _ in pairs), sum(own for _, own in pairs))


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean of those that are there."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
