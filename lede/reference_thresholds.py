"""Thresholds on forecasts of acceptance and on the survival of the draft, searched on the simulator.

Every parameter is searched in turn on a grid while the others stand: the least survival, then the threshold of each
candidate, and so on until a turn of all improves nothing. The rate on training prompts decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lede.acceptance import DRAFTING, SCANNING, AcceptanceModel
from lede.cost_model import CostModel
from lede.cost_tables import CostTables
from lede.draft_rounds import DraftRounds, Stage
from lede.features import FeatureConfig
from lede.forecast import FORECAST_INPUTS, Forecast
from lede.policies.base import ExitAt
from lede.policies.static import StaticPolicy
from lede.policies.survival import SURVIVAL_FEATURES, SurvivalPolicy
from lede.rewards import EXIT
from lede.round_outcomes import RoundOutcomes
from lede.seeding import Purpose, numpy_stream
from lede.simulation import Decide, simulate
from lede.trace_table import TraceTable
from lede.visits import SurvivalMemory, fit_acceptance, join_visits, watch_plans

SURVIVALS = (0.05, 0.1, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9)
"""Least survivals that are tried."""
THRESHOLDS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 2.0)
"""Thresholds that are tried at each candidate; the last one never exits."""


@dataclass(frozen=True)
class FoundThresholds:
    """What a search found."""

    candidates: tuple[int, ...]
    """Layers inspected, or the one drafted at blind."""
    thresholds: tuple[float, ...]
    """Least probability to exit with at each."""
    survival: float
    """Least survival to draft on."""
    blind: int | None
    """Layer drafted at without a scan; None scans."""
    rate: float
    """Tokens a second on the prompts that were searched on."""
    fixed_length: int | None = None
    """Tokens drafted blind in every round without asking; None asks."""


def fit_forecasts(
    table: TraceTable,
    costs: CostModel,
    candidates: Sequence[int],
    features: FeatureConfig | None = None,
    max_draft: int = 12,
    passes: int = 3,
    seed: int = 0,
) -> AcceptanceModel:
    """Forecasts of acceptance, fitted where random plans lead."""
    chosen = FeatureConfig(names=SURVIVAL_FEATURES) if features is None else features
    rounds = DraftRounds(table, CostTables(costs, candidates, table.max_context, max_draft), chosen, seed=seed)
    parts = [watch_plans(rounds, numpy_stream(seed, Purpose.FORECAST, n), seed=seed)[0] for n in range(passes)]
    return fit_acceptance(join_visits(parts), chosen)


def fit_forecast(
    table: TraceTable, costs: CostModel, candidates: Sequence[int], max_draft: int = 12, seed: int = 0
) -> Forecast:
    """Coefficients of the features `chance` and `outlook`, fitted where random plans lead.

    Args:
        table: Traces of training prompts.
        costs: What operations cost.
        candidates: Candidate layers.
        max_draft: Most tokens drafted in a round.
        seed: Of the rounds that it is fitted on, and of the acceptance of sampled drafts.
    """
    inputs = FeatureConfig(names=FORECAST_INPUTS)
    model = fit_forecasts(table, costs, candidates, inputs, max_draft, seed=seed)
    first, later = (tuple(tuple(row) for row in model.weights[stage].tolist()) for stage in (SCANNING, DRAFTING))
    return Forecast(tuple(candidates), first, later)


def search_thresholds(
    outcomes: RoundOutcomes,
    candidates: Sequence[int],
    survivals: Sequence[float] = SURVIVALS,
    thresholds: Sequence[float] = THRESHOLDS,
    begin: FoundThresholds | None = None,
    sweeps: int = 4,
) -> FoundThresholds:
    """The best thresholds of a policy that scans `candidates`.

    Args:
        outcomes: All rounds of the training prompts.
        candidates: Layers inspected, ascending.
        survivals: Least survivals to try.
        thresholds: Thresholds to try.
        begin: Where to begin: a candidate that it has not starts at 0.8.
        sweeps: Most turns of all parameters.
    """
    known = {} if begin is None else dict(zip(begin.candidates, begin.thresholds, strict=True))
    limits = [known.get(layer, 0.8) for layer in candidates]
    survival = 0.5 if begin is None else begin.survival
    drafts = outcomes.drafts
    best = outcomes.play(drafts(survival), candidates, limits).rate
    for _ in range(sweeps):
        before = best
        for value in survivals:
            rate = outcomes.play(drafts(value), candidates, limits).rate
            if rate > best:
                best, survival = rate, value
        for k in range(len(limits)):
            for value in thresholds:
                tried = [*limits[:k], value, *limits[k + 1 :]]
                rate = outcomes.play(drafts(survival), candidates, tried).rate
                if rate > best:
                    best, limits = rate, tried
        if best <= before * (1 + 1e-6):
            break
    return FoundThresholds(tuple(candidates), tuple(limits), survival, None, best)


def search_blind(outcomes: RoundOutcomes, layer: int, survivals: Sequence[float] = SURVIVALS) -> FoundThresholds:
    """The best least survival of a policy that drafts blind at a layer."""
    rates = [outcomes.play_blind(outcomes.drafts(value, blind=True), layer).rate for value in survivals]
    place = int(np.argmax(rates))
    return FoundThresholds((layer,), (0.0,), survivals[place], layer, rates[place])


def search_fixed(
    table: TraceTable, costs: CostModel, layer: int, lengths: Sequence[int], seed: int = 0
) -> FoundThresholds:
    """The best length of drafts at a layer that nobody is asked about, as those of a static setting."""
    rates = [
        simulate(StaticPolicy(exit_layer=layer, draft_length=length, max_draft=length), table, costs, seed=seed).rate
        for length in lengths
    ]
    place = int(np.argmax(rates))
    return FoundThresholds((layer,), (0.0,), 1.0, layer, rates[place], lengths[place])


def reference_thresholds(
    table: TraceTable,
    costs: CostModel,
    candidates: Sequence[int],
    features: FeatureConfig | None = None,
    max_draft: int = 12,
    seed: int = 0,
    fixed_lengths: Sequence[int] = (),
    **settings: Any,
) -> SurvivalPolicy:
    """The best policy of its kind: forecasts fitted, scan or a blind layer and all thresholds searched.

    Args:
        table: Traces of training prompts.
        costs: What operations cost.
        candidates: Layers that may be inspected, or drafted at blind.
        features: What the forecasts look at, out of `lede.features.FOLLOWED`.
        max_draft: Most tokens drafted in a round.
        seed: Of the rounds that forecasts are fitted on, and of the acceptance of sampled drafts.
        fixed_lengths: Lengths of drafts that nobody is asked about, which are tried at each candidate as well.
        **settings: More settings of the policy, and the fingerprint that binds it.
    """
    model = fit_forecasts(table, costs, candidates, features, max_draft, seed=seed)
    outcomes = RoundOutcomes(table, costs, candidates, model, max_draft, seed)
    tried = [search_thresholds(outcomes, candidates)]
    tried += [search_blind(outcomes, layer) for layer in candidates]
    tried += [search_fixed(table, costs, layer, fixed_lengths, seed) for layer in candidates if fixed_lengths]
    found = max(tried, key=lambda each: each.rate)
    return SurvivalPolicy.from_model(
        model,
        candidates=tuple(candidates),
        thresholds=found.thresholds,
        survival=found.survival,
        blind=found.blind,
        fixed_length=found.fixed_length,
        max_draft=max_draft,
        **settings,
    )


def lane_decisions(policy: SurvivalPolicy, n_lanes: int, places: Sequence[int] | None = None) -> Decide:
    """The policy's decisions for many lanes at once, each with a memory of its own.

    Args:
        policy: Who decides.
        n_lanes: Lanes.
        places: Where the lanes' observations hold the policy's features; None if they hold nothing else.
    """
    memory, limits = SurvivalMemory(policy.model, n_lanes), np.log(np.maximum(policy.limits, 1e-300))
    least = np.log(max(policy.config.survival, 1e-300))
    blind = policy.config.blind
    plan = None if blind is None else ExitAt(blind, policy.config.fixed_length)

    def decide(lanes: DraftRounds) -> npt.NDArray[np.int64]:
        seen = lanes.observe()
        begin = EXIT if plan is None else lanes.action_of(plan)
        chance, survival = memory.look(lanes, seen if places is None else seen[:, places])
        on = np.where(lanes.stage == Stage.DRAFT, survival + chance >= least, chance >= limits[lanes.candidate])
        return np.where(lanes.stage == Stage.PRE_SCAN, begin, on).astype(np.int64)

    return decide
