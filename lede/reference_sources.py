"""The best policy over both sources that is known for its features: what each plan saves, by policy iteration.

1. Prompts are played, by plans drawn at random at first and by the policy itself later, and what it sees before rounds
   is noted.
2. On the table of all plans at all rows (`lede.reference_sources_table`) the policy's own seconds to the end of every
   text follow, and from them what each plan saves there; regressions on what was seen forecast it
   (`lede.plan_values`).
3. The thresholds of scan and draft are searched with the plans as they are, then a constant for each plan, which is
   its price: what is forecast best on average is not what decides best.

This is repeated, and the policy that is fastest on the training prompts is kept.

Source: Howard, Dynamic programming and Markov processes (1960), for policy iteration; Lagoudakis and Parr,
Reinforcement learning as classification (2003), for values by rollouts from every state. Departs from the latter: the
rollouts are exact, and values are forecast instead of the best action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lede.cost_model import CostModel
from lede.cost_tables import CostTables
from lede.draft_rounds import DraftRounds, Stage
from lede.features import FeatureConfig
from lede.lookup import LookupConfig
from lede.lookup_table import lookups_of
from lede.observation_parts import before_round, of_copies, of_layers
from lede.plan_values import PlanValues, fit_values
from lede.policies.base import Lookup
from lede.policies.source_value import SourceValuePolicy, source_features
from lede.reference_lookups import fit_forecast_of_copies
from lede.reference_sources_lanes import LayerThresholds
from lede.reference_sources_table import PlannedRounds, SourceOutcomes
from lede.reference_thresholds import SURVIVALS, THRESHOLDS, fit_forecasts
from lede.rewards import EXIT
from lede.round_outcomes import Array, Ints
from lede.seeding import Purpose, numpy_stream
from lede.simulation import play, simulate
from lede.trace_table import TraceTable

if TYPE_CHECKING:
    from lede.phrases import PhraseMemory

PRICES = (-0.4, -0.2, -0.1, -0.05, 0.05, 0.1, 0.2, 0.4)
"""Tokens by which the constant of a plan is moved in the search."""
_ROUNDS = 3  # of play and policy iteration
_FITS = 3  # of values, thresholds and prices, for each of them
_EXPLORED = (0.3, 0.3, 0.0)  # share of random plans in each pass of play
_KEPT = 6  # passes of play that are learned from
_STEP = 1e-4  # share of the seconds that a move of a price must save


def reference_sources(
    table: TraceTable,
    costs: CostModel,
    candidates: Sequence[int],
    lookup: LookupConfig,
    lookups: Sequence[Lookup],
    features: FeatureConfig | None = None,
    max_draft: int = 12,
    seed: int = 0,
    memory: PhraseMemory | None = None,
    **settings: Any,
) -> SourceValuePolicy:
    """The best policy of its kind.

    Args:
        table: Traces of training prompts.
        costs: What operations cost.
        candidates: Layers that are inspected, or drafted at blind.
        lookup: How the text is searched.
        lookups: Drafts from the text to choose from.
        features: What is observed: what the pre-scan knows, and of layers what `lede.features.FOLLOWED` names.
        max_draft: Most tokens drafted in a round.
        seed: Of what is played, and of the acceptance of sampled drafts.
        memory: Of other texts, which the policy carries.
        **settings: More settings of the policy, and the fingerprint that binds it.

    Raises:
        ValueError: The features lack what is needed, or name what nothing looks at.
    """
    search = SourceSearch(table, costs, candidates, lookup, lookups, features, max_draft, seed, memory, **settings)
    tried = [search.improve() for _ in range(_ROUNDS)]
    return max(tried, key=lambda policy: simulate(policy, table, costs, seed=seed).rate)


class SourceSearch:
    """The search, one round of policy iteration after the other; arguments as of `reference_sources`.

    Attributes:
        outcomes: What every plan brings at every row.
        known: Rows that were seen on some way, `(row,)`.
        policy: The policy of the last round; None before the first.
    """

    def __init__(
        self,
        table: TraceTable,
        costs: CostModel,
        candidates: Sequence[int],
        lookup: LookupConfig,
        lookups: Sequence[Lookup],
        features: FeatureConfig | None = None,
        max_draft: int = 12,
        seed: int = 0,
        memory: PhraseMemory | None = None,
        **settings: Any,
    ) -> None:
        observed = FeatureConfig(names=source_features(memory is not None)) if features is None else features
        layers, self._before = of_layers(observed), before_round(observed)
        lengths = sorted({plan.length for plan in lookups})
        found = lookups_of(table, lookup, lengths[-1], memory)
        self._model = fit_forecasts(table, costs, candidates, layers, max_draft, seed=seed)
        self._copies = fit_forecast_of_copies(table, costs, lookup, lengths, of_copies(observed), seed, memory=memory)
        self.outcomes = SourceOutcomes(table, costs, candidates, self._model, found, lookups, observed, max_draft, seed)
        tables = CostTables(costs, candidates, table.max_context, max_draft)
        self._rounds = DraftRounds(table, tables, observed, seed=seed, lookup=found, plans=lookups)
        self._settings = {
            **settings,
            "features": observed,
            "candidates": tuple(candidates),
            "lookup": lookup,
            "lookups": tuple(lookups),
            "max_draft": max_draft,
            "memory": memory,
        }
        self._seed, self._passes = seed, 0
        self._thresholds, self._survival = [0.8] * len(candidates), 0.5
        self._places = [observed.names.index(name) for name in self._before.names]
        self._n_features = len(observed.names)
        self._layer_places = [observed.names.index(name) for name in layers.names]
        self._seen: list[tuple[Ints, npt.NDArray[np.float32]]] = []  # rows and what was seen there, of each pass
        # what a policy would see at each row, on one of the ways there
        self._at = np.zeros((len(self.outcomes.forced), len(self._places)), dtype=np.float32)
        self.known = np.zeros(len(self._at), dtype=np.bool_)
        self._values: PlanValues | None = None
        self.policy: SourceValuePolicy | None = None

    def improve(self) -> SourceValuePolicy:
        """Play, and fit to it: the next policy."""
        for explore in _EXPLORED if self.policy is not None else (1.0,) * len(_EXPLORED):
            self._play(explore)
        self._seen = self._seen[-_KEPT:]
        for _ in range(_FITS):
            self._values = self._fit()
        assert self._values is not None  # fitted just now
        self.policy = SourceValuePolicy.from_models(
            self._model, self._values, thresholds=tuple(self._thresholds), survival=self._survival, **self._settings
        )
        return self.policy

    def seen(self) -> npt.NDArray[np.float32]:
        """What the pre-scan would see at each row on one of the ways there, `(row, feature)`; 0 where none led there.

        Features that the pre-scan does not know are 0.
        """
        return self._whole(self._at)

    def visits(self) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Rows of all rounds that are learned from, `(visit,)`, and what was seen there, `(visit, feature)`."""
        rows = np.concatenate([rows for rows, _ in self._seen])
        asked = ~self.outcomes.forced[rows]
        return rows[asked], self._whole(np.concatenate([seen for _, seen in self._seen])[asked])

    def choices(self) -> Ints:
        """Plan at each row, `(row,)`; a scan where nothing was seen, and everywhere before the first values."""
        choice = np.full(len(self._at), EXIT, dtype=np.int64)
        if self._values is not None:
            choice[self.known] = self._values(self._at[self.known], len(self.outcomes.lookups)).argmax(axis=1)
        return choice

    def _whole(self, seen: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        whole = np.zeros((len(seen), self._n_features), dtype=np.float32)
        whole[:, self._places] = seen
        return whole

    def _play(self, explore: float) -> None:
        self._passes += 1
        rng = numpy_stream(self._seed, Purpose.SOURCES_REFERENCE, self._passes)
        n_lanes, n_plans = self._rounds.table.n_prompts, self.outcomes.n_plans
        parts: list[tuple[Ints, npt.NDArray[np.float32]]] = []
        later = LayerThresholds(self._model, self._layer_places, n_lanes, self._thresholds, self._survival)
        policy = self.policy

        def decide(lanes: DraftRounds) -> Ints:
            seen = lanes.observe()
            actions, before = later(lanes, seen), np.flatnonzero(lanes.stage == Stage.PRE_SCAN)
            parts.append((lanes.row[before], seen[before][:, self._places]))
            plans = rng.integers(0, n_plans, before.size)
            if policy is not None:
                plans = np.where(rng.random(before.size) < explore, plans, policy.decide(seen[before]))
            actions[before] = plans
            return actions

        play(self._rounds, decide)
        self._rounds.log = None
        rows, seen = (np.concatenate(column) for column in zip(*parts, strict=True))
        self._seen.append((rows, seen))
        self._at[rows], self.known[rows] = seen, True

    def _fit(self) -> PlanValues:
        """One round of policy iteration on the table."""
        outcomes, choice = self.outcomes, self.choices()
        if self._values is not None:
            self._search_thresholds(choice)
        rounds = outcomes.planned(self._thresholds, self._survival)
        left = outcomes.to_go(rounds, choice)
        saved = outcomes.saved(rounds, left) * len(left) / outcomes.total(left)  # in tokens' worth of time
        rows, seen = self.visits()
        found = fit_values(self._before, self._copies, seen[:, self._places], saved[rows, 1:])
        return self._priced(found, rounds, choice)

    def _search_thresholds(self, choice: Ints) -> None:
        def spent(thresholds: Sequence[float], survival: float) -> float:
            rounds = self.outcomes.planned(thresholds, survival)
            return self.outcomes.total(self.outcomes.to_go(rounds, choice))

        self._survival = min((self._survival, *SURVIVALS), key=lambda survival: spent(self._thresholds, survival))
        for k in range(len(self._thresholds)):
            tried = [self._with(k, value) for value in (self._thresholds[k], *THRESHOLDS)]
            self._thresholds = min(tried, key=lambda thresholds: spent(thresholds, self._survival))

    def _with(self, k: int, value: float) -> list[float]:
        return [*self._thresholds[:k], value, *self._thresholds[k + 1 :]]

    def _priced(self, values: PlanValues, rounds: PlannedRounds, choice: Ints) -> PlanValues:
        """The values with the constants that save most time."""
        before = values(self._at[self.known], len(self.outcomes.lookups))
        shift = np.zeros(before.shape[1])

        def spent(by: Array) -> float:
            chosen = choice.copy()
            chosen[self.known] = (before + by).argmax(axis=1)
            return self.outcomes.total(self.outcomes.to_go(rounds, chosen))

        least = spent(shift)
        for _ in range(2):
            for plan in range(1, shift.size):
                for step in PRICES:
                    moved = shift.copy()
                    moved[plan] += step
                    seconds = spent(moved)
                    if seconds < least * (1 - _STEP):
                        least, shift = seconds, moved
        return values.raised(shift[1:])
