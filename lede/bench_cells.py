"""The columns of a benchmark's tables: what heads them and what a row shows in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lede.bench_row import SHARES, BenchRow
from lede.bench_runs import PLAIN
from lede.bench_speed import Speedup
from lede.round_sources import SOURCES
from lede.text_overlap import Rouge

NOT_RESOLVED = "not resolved"
NOTHING = "-"


@dataclass(frozen=True)
class Column:
    """One column."""

    short: str
    """Its head, lines as on the terminal."""
    cell: Callable[[BenchRow], str]
    """What a row shows; a dash for nothing. On the terminal, what follows a comma goes to a line of its own."""


def exact_cell(row: BenchRow) -> str:
    """The verdict on the texts; (own) where lede's own plain text stood in for transformers'."""
    told: str = row.exact or NOTHING
    if row.exact == "ties":
        told = f"ties at {row.n_ties}"
    elif row.exact == "NO" and row.n_wrong:
        told = f"NO at {row.n_wrong}"
    return f"{told} (own)" if row.exact_against == PLAIN and row.exact else told


def _over_plain(row: BenchRow) -> str:
    found = row.speedup_over_plain
    if found is None or _is_itself(found):
        return _times(found)
    shown = f"{found.value:.2f} ({found.lower:.2f}-{found.upper:.2f})"
    return shown if found.resolved else f"{shown}, {NOT_RESOLVED}"


def _times(found: Speedup | None) -> str:
    """A ratio; in brackets where it is not resolved."""
    if found is None:
        return NOTHING
    if _is_itself(found):
        return "1"
    return f"{found.value:.2f}" if found.resolved else f"({found.value:.2f})"


def _is_itself(found: Speedup) -> bool:
    """Whether a contender was compared with itself."""
    return found.value == found.lower == found.upper == found.median == 1


def _number(get: Callable[[BenchRow], float | None], form: str) -> Callable[[BenchRow], str]:
    def cell(row: BenchRow) -> str:
        value = get(row)
        return NOTHING if value is None else format(value, form)

    return cell


def _share(section: str) -> Callable[[BenchRow], str]:
    return lambda row: NOTHING if row.time_shares is None else f"{100 * row.time_shares[section]:.0f}"


def _source(get: Callable[[BenchRow], dict[str, float] | None], source: str) -> Callable[[BenchRow], str]:
    """A share by source; nothing where there is none of it."""

    def cell(row: BenchRow) -> str:
        shares = get(row)
        return NOTHING if shares is None or not shares[source] else f"{100 * shares[source]:.0f}"

    return cell


def _source_rate(source: str) -> Callable[[BenchRow], str]:
    return _number(lambda row: (row.acceptance_by_source or {}).get(source), ".2f")


def _count(get: Callable[[BenchRow], float | None]) -> Callable[[BenchRow], str]:
    """A count or seconds that most rows have none of."""

    def cell(row: BenchRow) -> str:
        value = get(row)
        return NOTHING if not value else f"{value:.0f}" if value >= 10 else f"{value:.1f}".removesuffix(".0")

    return cell


def _rouge(get: Callable[[BenchRow], Rouge | None]) -> Callable[[BenchRow], str]:
    def cell(row: BenchRow) -> str:
        found = get(row)
        return NOTHING if found is None else f"{found.rouge1:.2f} {found.rouge2:.2f} {found.rougeL:.2f}"

    return cell


MEDIAN = Column(
    "median", _number(lambda row: None if row.speedup_over_plain is None else row.speedup_over_plain.median, ".2f")
)
OPTIONAL = (
    Column("x static", lambda row: _times(row.speedup_over_best_static)),
    Column("x lookup", lambda row: _times(row.speedup_over_best_lookup)),
    Column("x hf\nlookup", lambda row: _times(row.speedup_over_prompt_lookup)),
)
"""What is left out of a terminal's narrow table where nobody was held against it."""
SPEED = (
    Column("tok/s", _number(lambda row: None if row.tokens_per_second is None else row.tokens_per_second.value, ".1f")),
    Column("x plain (95 %)", _over_plain),
    MEDIAN,
    Column("x hf", lambda row: _times(row.speedup_over_transformers)),
    *OPTIONAL,
    Column("rate", _number(lambda row: row.acceptance_rate, ".2f")),
    Column("tokens", _number(lambda row: row.mean_length_with_bonus, ".2f")),
    Column("exact", exact_cell),
)
"""The summary."""

SUMMARY = tuple(column for column in SPEED if column is not MEDIAN)
"""The same, narrow enough for a terminal."""

LENGTHS = (
    Column("rate", _number(lambda row: row.acceptance_rate, ".2f")),
    Column("rate by\nprompt", _number(lambda row: row.acceptance_rate_by_prompt, ".2f")),
    Column("accepted\na round", _number(lambda row: row.mean_accepted_length, ".2f")),
    Column("tokens\na round", _number(lambda row: row.mean_length_with_bonus, ".2f")),
    Column("tokens by\nprompt", _number(lambda row: row.mean_length_with_bonus_by_prompt, ".2f")),
    Column("drafted", _number(lambda row: row.mean_draft_length, ".1f")),
    Column("exit\nlayer", _number(lambda row: row.mean_exit_layer, ".1f")),
    Column("skipped", _number(lambda row: row.mean_skipped_share, ".2f")),
    Column("passes\na token", _number(lambda row: row.full_passes_a_token, ".2f")),
    Column("reads\na token", _number(lambda row: row.head_reads_a_token, ".1f")),
)
"""Lengths, layers and counts."""

BY_SOURCE = (
    *(Column(f"{source}\nrounds %", _source(lambda row: row.round_shares, source)) for source in SOURCES),
    *(Column(f"{source}\ntokens %", _source(lambda row: row.token_shares, source)) for source in SOURCES),
    *(Column(f"{source}\nrate", _source_rate(source)) for source in SOURCES if source != "plain"),
)
"""Where drafts come from."""

TIMES = tuple(Column(f"{section}\n%", _share(section)) for section in SHARES)
"""Where the time after the prefill goes."""

COSTS = (
    Column("with\nprefill", lambda row: _times(row.speedup_over_plain_with_prefill)),
    Column("x plain", lambda row: _times(row.speedup_over_plain)),
    Column("modelled", _number(lambda row: row.modelled_speedup, ".2f")),
    Column("x static\nin hindsight", lambda row: _times(row.speedup_over_hindsight_static)),
    Column("x lookup\nin hindsight", lambda row: _times(row.speedup_over_hindsight_lookup)),
    Column("settings\ntried", _count(lambda row: row.cost.evaluations)),
    Column("prompts", _count(lambda row: row.cost.prompts)),
    Column("collect\ns", _count(lambda row: row.cost.collecting_seconds)),
    Column("search\ns", _count(lambda row: row.cost.search_seconds)),
    Column("train\ns", _count(lambda row: row.cost.training_seconds)),
    Column("search\nin run s", _count(lambda row: row.search_seconds)),
    Column("even after\ntokens", _count(lambda row: row.tokens_to_break_even)),
    Column("peak\nMiB", _count(lambda row: row.peak_memory and row.peak_memory / 2**20)),
)
"""Costs, and what the cost profile foretold."""

TEXTS = (
    Column("prompts", lambda row: f"{row.n_prompts}"),
    Column("failed", _count(lambda row: row.n_failed)),
    Column("one\ntoken", _count(lambda row: row.n_empty)),
    Column("repeats", _number(lambda row: row.repetition_share, ".2f")),
    Column("rouge 1 2 L\nof reference", _rouge(lambda row: row.rouge_reference)),
    Column("rouge 1 2 L\nof plain", _rouge(lambda row: row.rouge_plain)),
    Column("exact", exact_cell),
)
"""What was written."""
