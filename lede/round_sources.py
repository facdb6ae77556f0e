"""Rounds and tokens by where their drafts came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass

SOURCES = ("exit", "lookup", "gaps", "plain")
"""Layers up to an exit, the text itself, a stack with gaps, and nowhere: a plain pass."""


@dataclass(frozen=True)
class SourceCounts:
    """What the rounds of one source came to."""

    rounds: int = 0
    """Rounds."""
    drafted: int = 0
    """Drafted tokens that were verified."""
    accepted: int = 0
    """Those that verification kept."""
    committed: int = 0
    """Tokens that the rounds wrote, the correction or bonus included."""

    def __add__(self, other: SourceCounts) -> SourceCounts:
        """Both together."""
        return SourceCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


Counts = dict[str, SourceCounts]
"""Counts by source, in the order of `SOURCES`; sources without a round are left out."""


def count_sources(rounds: Iterable[tuple[str | None, int, int, int]]) -> Counts:
    """Count rounds.

    Args:
        rounds: Source (None for a plain pass), drafted, accepted and committed tokens of each.
    """
    return add_counts({source or "plain": SourceCounts(1, *tokens)} for source, *tokens in rounds)


def add_counts(every: Iterable[Mapping[str, SourceCounts]]) -> Counts:
    """All counts together."""
    found = dict.fromkeys(SOURCES, SourceCounts())
    for counts in every:
        for source, each in counts.items():
            found[source] += each
    return {source: each for source, each in found.items() if each.rounds}


def round_shares(counts: Mapping[str, SourceCounts]) -> dict[str, float]:
    """Share of the rounds by source, of all `SOURCES`; of nothing, nothing."""
    total = sum(each.rounds for each in counts.values())
    return {source: counts[source].rounds / total if source in counts else 0.0 for source in SOURCES} if total else {}


def token_shares(counts: Mapping[str, SourceCounts]) -> dict[str, float]:
    """Share of the written tokens by source, of all `SOURCES`; of nothing, nothing."""
    total = sum(each.committed for each in counts.values())
    if not total:
        return {}
    return {source: counts[source].committed / total if source in counts else 0.0 for source in SOURCES}
