"""How many words two texts share: ROUGE-1, ROUGE-2 and ROUGE-L.

Source: C.-Y. Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004, as the package `rouge-score` has it:
lower case, runs of ASCII letters and digits are words, no stemming.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any


@dataclass(frozen=True)
class Rouge:
    """F-measures, 0 to 1."""

    rouge1: float
    """Of words."""
    rouge2: float
    """Of pairs of words side by side."""
    rougeL: float  # what the package and every table call it
    """Of the longest common subsequence of words."""


_SAME = Rouge(1.0, 1.0, 1.0)


@lru_cache(maxsize=1 << 14)
def rouge(text: str | None, reference: str | None) -> Rouge | None:
    """The overlap of a text with a reference; None when one of them is missing.

    Equal texts overlap wholly, even where the package finds no word in them.

    Raises:
        ImportError: The package `rouge-score` is not installed.
    """
    if text is None or reference is None:
        return None
    if text == reference:
        return _SAME
    found = _scorer().score(reference, text)
    return Rouge(*(float(found[name].fmeasure) for name in ("rouge1", "rouge2", "rougeL")))


def mean_rouge(scores: list[Rouge]) -> Rouge | None:
    """Mean of each measure; None of nothing."""
    n = len(scores)
    if not n:
        return None
    return Rouge(*(sum(getattr(each, name) for each in scores) / n for name in ("rouge1", "rouge2", "rougeL")))


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]  # no py.typed

    return RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
