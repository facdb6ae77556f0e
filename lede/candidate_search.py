"""Which layers are worth inspecting: subsets searched on the simulator with a policy of thresholds as a fast stand-in.

Every inspection costs a head read and a decision, so more candidates are not better. From the best single layer, the
layer that gains most is added until none gains enough, then layers are taken out again while that costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lede.acceptance import AcceptanceModel
from lede.cost_model import CostModel
from lede.reference_thresholds import FoundThresholds, fit_forecasts, search_thresholds
from lede.round_outcomes import RoundOutcomes
from lede.trace_table import TraceTable

COARSE_SURVIVALS = (0.2, 0.35, 0.5, 0.65)
"""Least survivals that are tried for every subset."""
COARSE_THRESHOLDS = (0.0, 0.4, 0.6, 0.75, 0.85, 0.95)
"""Thresholds that are tried for every subset."""


@dataclass(frozen=True)
class CandidateSearch:
    """What a search of candidates found."""

    candidates: tuple[int, ...]
    """The best subset found, ascending."""
    thresholds: FoundThresholds
    """What the stand-in does there."""
    model: AcceptanceModel
    """Forecasts at `layers`."""
    layers: tuple[int, ...]
    """Layers that were considered."""
    rates: dict[tuple[int, ...], float]
    """Tokens a second by subset, in the order in which they were tried."""

    def table(self) -> str:
        """Subsets and rates, the best first, as text."""
        ranked = sorted(self.rates.items(), key=lambda item: -item[1])
        return "\n".join(f"{rate:10.2f} tokens/s  {','.join(map(str, layers))}" for layers, rate in ranked)


def search_candidates(
    table: TraceTable,
    costs: CostModel,
    layers: Sequence[int] | None = None,
    max_draft: int = 12,
    most: int = 4,
    least_gain: float = 0.002,
    seed: int = 0,
) -> CandidateSearch:
    """The candidates that decode fastest.

    Args:
        table: Traces of training prompts.
        costs: What operations cost.
        layers: Layers to choose from; None for all below the last.
        max_draft: Most tokens drafted in a round.
        most: Most candidates.
        least_gain: Share of the rate that a further candidate must gain.
        seed: Of the rounds that forecasts are fitted on, and of the acceptance of sampled drafts.

    Raises:
        ValueError: There is no layer to choose from, or no candidate is allowed.
    """
    chosen_from = tuple(range(1, table.n_layers)) if layers is None else tuple(sorted(set(layers)))
    if not chosen_from or most < 1:
        raise ValueError(f"there is nothing to choose from: layers {list(chosen_from)}, at most {most} candidates")
    model = fit_forecasts(table, costs, chosen_from, max_draft=max_draft, seed=seed)
    outcomes = RoundOutcomes(table, costs, chosen_from, model, max_draft, seed)
    tried: dict[tuple[int, ...], FoundThresholds] = {}

    def rated(subset: tuple[int, ...], begin: FoundThresholds | None) -> FoundThresholds:
        if subset not in tried:
            tried[subset] = search_thresholds(outcomes, subset, COARSE_SURVIVALS, COARSE_THRESHOLDS, begin, sweeps=1)
        return tried[subset]

    best = max((rated((layer,), None) for layer in chosen_from), key=lambda found: found.rate)
    while len(best.candidates) < most:
        rest = [layer for layer in chosen_from if layer not in best.candidates]
        if not rest:
            break
        more = max((rated(tuple(sorted((*best.candidates, layer))), best) for layer in rest), key=lambda f: f.rate)
        if more.rate < best.rate * (1 + least_gain):
            break
        best = more
    while len(best.candidates) > 1:
        fewer = [tuple(other for other in best.candidates if other != layer) for layer in best.candidates]
        less = max((rated(subset, best) for subset in fewer), key=lambda found: found.rate)
        if less.rate * (1 + least_gain) < best.rate:
            break
        best = less
    final = search_thresholds(outcomes, best.candidates, begin=best)
    rates = {subset: found.rate for subset, found in tried.items()}
    rates[final.candidates] = max(final.rate, rates[final.candidates])
    return CandidateSearch(final.candidates, final, model, chosen_from, rates)
