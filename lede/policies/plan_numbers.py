"""The numbers of the plans that a pre-scan chooses from, in values of networks and regressions and in rounds played."""

from __future__ import annotations

from collections.abc import Sequence

from lede.policies.base import ExitAt, Lookup, PreScan


def numbered_plans(candidates: Sequence[int], lookups: Sequence[Lookup]) -> tuple[PreScan | ExitAt | Lookup, ...]:
    """Every plan at the place of its action, as `lede.draft_rounds` plays them.

    CONTINUE skips the draft, EXIT scans, BLIND + k drafts at candidate k of K, BLIND + K + j copies by lookup j.

    Args:
        candidates: Layers that may draft from the start.
        lookups: Drafts from the text.
    """
    return (PreScan.SKIP, PreScan.SCAN, *map(ExitAt, candidates), *lookups)
