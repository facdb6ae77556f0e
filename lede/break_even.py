"""The acceptance from which a draft is as fast as plain decoding, from what verification costs on this machine.

A round that drafts n tokens, each accepted with probability a if those before it were, writes 1 + a + ... + a^n tokens.
It breaks even where that is its seconds over those of a plain pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lede.bench_figures import PromptFigures
from lede.cost_profile import CostProfile, acceptance_for


def break_even_acceptance(
    verification_seconds: Sequence[float], layer: int, n_layers: int, n_drafted: int, profile: CostProfile | None = None
) -> float | None:
    """The break-even acceptance of blind drafts; None where not even drafts that are always accepted pay.

    With a cost profile it is `CostProfile.break_even`. Without one, a pass over one token is taken to cost as much in
    each layer, and the head reads of the draft nothing, so that the truth lies higher:
    `(n + 1) (l / L) V(1) + (1 - l / L) V(n + 1)` seconds a round.

    Args:
        verification_seconds: V(q), seconds of a full pass over q = 1, 2, ... tokens.
        layer: l, the exit layer.
        n_layers: L, the model's layers.
        n_drafted: n, drafted tokens a round, fewer than the longest pass that was measured.
        profile: The cost profile.
    """
    if profile is not None:
        return profile.break_even(layer, n_drafted)
    share = layer / n_layers
    ratio = verification_seconds[n_drafted] / verification_seconds[0]
    return acceptance_for((n_drafted + 1) * share + (1 - share) * ratio, n_drafted)


def layers_in_use(figures: Iterable[PromptFigures], n_layers: int) -> list[int]:
    """The three layers that drafted most, ascending; quarters of the stack where none did."""
    counts: dict[int, int] = {}
    for each in figures:
        for layer, n in each.exit_layers:
            counts[layer] = counts.get(layer, 0) + n
    most = sorted(counts, key=lambda layer: counts[layer], reverse=True)[:3]
    return sorted(most or {max(1, n_layers * i // 4) for i in (1, 2, 3)})
