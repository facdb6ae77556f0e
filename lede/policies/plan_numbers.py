"""The numbers of the plans that a pre-scan chooses from, in values of networks and regressions and in rounds played."""

from __future__ import annotations

from collections.abc import Sequence

from lede.policies.base import ExitAt, Lookup, PreScan


def numbered_plans(
    candidates: Sequence[int], lookups: Sequence[Lookup], fixed_drafts: Sequence[ExitAt] = ()
) -> tuple[PreScan | ExitAt | Lookup, ...]:
    """Every plan at the place of its action, as `lede.draft_rounds` plays them.

    CONTINUE skips the draft, EXIT scans, BLIND + k drafts at candidate k of K, BLIND + K + j copies by lookup j
    of J, BLIND + K + J + f is fixed draft f.

    Args:
        candidates: Layers that may draft from the start.
        lookups: Drafts from the text.
        fixed_drafts: Drafts of a fixed layer and length.
    """
    return (PreScan.SKIP, PreScan.SCAN, *map(ExitAt, candidates), *lookups, *fixed_drafts)
