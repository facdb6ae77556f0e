"""Speed by category of the prompts, as papers on Spec-Bench and its like have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from lede.bench_figures import PromptFigures
from lede.bench_runs import CONTROL, PLAIN
from lede.bench_speed import Speedup, speedup


@dataclass(frozen=True)
class CategoryRow:
    """One contender on the prompts of one category."""

    suite: str
    """Name of the suite."""
    category: str
    """The category."""
    name: str
    """Name of the contender."""
    n_prompts: int
    """Prompts of the category that it was given."""
    speedup_over_plain: Speedup | None
    """Over plain decoding on them, after the prefill; resolved against the control on the same prompts."""

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Self:
        """From the object of a report."""
        faster = entry["speedup_over_plain"]
        return cls(**{**entry, "speedup_over_plain": None if faster is None else Speedup(**faster)})


def category_rows(figures: Mapping[tuple[str, str], Sequence[PromptFigures]]) -> list[CategoryRow]:
    """Rows by suite, category and contender; none for suites whose prompts have no category.

    Args:
        figures: Of every prompt, by suite and contender.
    """
    found = []
    for suite in dict.fromkeys(suite for suite, _ in figures):
        of_suite = {name: each for (where, name), each in figures.items() if where == suite}
        categories = dict.fromkeys(each.category for every in of_suite.values() for each in every)
        for category in filter(None, categories):
            within = {name: [f for f in every if f.category == category] for name, every in of_suite.items()}
            plain = within.get(PLAIN, [])
            control = speedup(within.get(CONTROL, []), plain)
            found += [
                CategoryRow(suite, category, name, len(every), speedup(every, plain, control))
                for name, every in within.items()
                if every
            ]
    return found
