"""Decisions that were asked for while rounds were played, with what a draft would have met, to fit forecasts on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from lede.acceptance import (
    DRAFTING,
    SCANNING,
    AcceptanceModel,
    Array,
    Bools,
    Ints,
    fit_logistic,
    inputs,
    log_odds_of,
)
from lede.draft_rounds import DraftRounds, Stage
from lede.features import FeatureConfig
from lede.round_behaviour import Greedy, RoundTransitions, record


@dataclass(frozen=True, eq=False)
class Visits:
    """Where decisions were asked for, and what a draft there would have met; no policy sees the latter."""

    observations: npt.NDArray[np.float32]  # (visit, feature)
    """What was seen."""
    stage: npt.NDArray[np.int8]  # (visit,)
    """`Stage` of the round."""
    candidate: Ints  # (visit,)
    """Candidate that was looked at; 0 in the pre-scan."""
    drafted: Ints  # (visit,)
    """Tokens drafted before."""
    accepted: Ints  # (visit,)
    """How many of them are accepted."""
    match: Bools  # (visit, candidate)
    """Whether a draft of each candidate would be accepted at the position, if those before are."""
    log_chance: Array  # (visit,)
    """Logarithm of the forecast at this position; 0 without a forecast or in the pre-scan."""
    log_survival: Array  # (visit,)
    """Sum of the logarithms over the positions drafted in this round before."""

    def __len__(self) -> int:
        return self.stage.size

    @property
    def on_text(self) -> Bools:
        """Whether all tokens drafted before are accepted, `(visit,)`."""
        return np.asarray(self.accepted == self.drafted)

    @property
    def here(self) -> Bools:
        """Whether a draft of the candidate that was looked at would be accepted, if those before are, `(visit,)`."""
        return np.asarray(self.match[np.arange(len(self)), self.candidate])

    def of(self, stage: int, candidate: int) -> Bools:
        """Visits on the target's text that one regression is about, `(visit,)`."""
        wanted = Stage.DRAFT if stage == DRAFTING else Stage.SCAN
        return np.asarray((self.stage == wanted) & (self.candidate == candidate) & self.on_text)


class SurvivalMemory:
    """Forecasts at the positions of lanes, and their products over what is drafted in a round.

    Look at every step of the lanes, once each.

    Args:
        model: Forecasts.
        n_lanes: Lanes.
    """

    def __init__(self, model: AcceptanceModel, n_lanes: int) -> None:
        self.model = model
        self._blind = -np.logaddexp(0, -model.blind)
        self._chance, self._survival = np.zeros(n_lanes), np.zeros(n_lanes)
        self._looked = np.zeros(n_lanes, dtype=np.bool_)

    def look(self, lanes: DraftRounds, observations: npt.NDArray[np.float32]) -> tuple[Array, Array]:
        """Logarithms of the forecast at each lane's position and of the survival before it, `(lane,)` each."""
        drafting, before = lanes.stage == Stage.DRAFT, lanes.stage == Stage.PRE_SCAN
        last = np.where(self._looked, self._chance, self._blind[lanes.candidate])
        self._survival = np.where(drafting, self._survival + last, 0.0)
        odds = self.model.log_odds(observations, drafting, lanes.candidate)
        self._chance = np.where(before, 0.0, -np.logaddexp(0, -odds))
        self._looked = ~before
        return self._chance, self._survival


class Watch:
    """Writes down where lanes stand whenever it is asked to choose; give it to `record` as the policy.

    Args:
        rounds: The process that is recorded.
        greedy: Who chooses; None to look on while plans are played.
        model: Forecasts that are written down too.
        seed: Of the acceptance of sampled drafts; the one of the rounds.
    """

    def __init__(
        self,
        rounds: DraftRounds,
        greedy: Callable[[DraftRounds, npt.NDArray[np.float32], Array, Array], Ints] | None = None,
        model: AcceptanceModel | None = None,
        seed: int = 0,
    ) -> None:
        self.rounds, self.greedy = rounds, greedy
        self._memory = None if model is None else SurvivalMemory(model, rounds.table.n_prompts)
        self._matches = rounds.table.matches(rounds.candidates - 1, seed)
        self._parts: list[tuple[npt.NDArray[np.generic], ...]] = []

    def __call__(self, observations: npt.NDArray[np.float32], legal: Bools) -> Ints:
        """Note the lanes that still decode, then choose."""
        rounds = self.rounds
        alive = rounds.stage != Stage.DONE
        nothing = np.zeros(alive.size)
        chance, survival = (nothing, nothing) if self._memory is None else self._memory.look(rounds, observations)
        columns = (
            observations, rounds.stage, rounds.candidate, rounds.n_drafted, rounds.n_accepted,
            self._matches[rounds.row], chance, survival,
        )  # fmt: skip
        self._parts.append(tuple(column[alive] for column in columns))
        if self.greedy is None:
            return np.zeros(alive.size, dtype=np.int64)
        return self.greedy(rounds, observations, chance, survival)

    def visits(self) -> Visits:
        """What was written down, in the order of the rows that `record` gives."""
        return Visits(*(np.concatenate(column) for column in zip(*self._parts, strict=True)))


def watch_plans(
    rounds: DraftRounds, rng: np.random.Generator, model: AcceptanceModel | None = None, seed: int = 0
) -> tuple[Visits, RoundTransitions]:
    """Decode every prompt once under random plans."""
    watch = Watch(rounds, None, model, seed)
    recorded = record(rounds, rng, watch)
    return watch.visits(), recorded


def watch_policy(rounds: DraftRounds, greedy: Greedy, rng: np.random.Generator, seed: int = 0) -> Visits:
    """Decode every prompt once with a policy that sees observations and nothing else: its own distribution."""
    watch = Watch(rounds, lambda lanes, seen, chance, survival: greedy(seen, lanes.legal()), None, seed)
    record(rounds, rng, watch, explore=0.0)
    return watch.visits()


def join_visits(parts: list[Visits]) -> Visits:
    """Several passes as one."""
    return Visits(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Visits)))


def fit_acceptance(visits: Visits, features: FeatureConfig, ridge: float = 1.0) -> AcceptanceModel:
    """The likeliest forecast of acceptance if all that was drafted before is accepted.

    Args:
        visits: Observations with what became of them.
        features: What was observed.
        ridge: Prior precision of every weight, on inputs of unit variance.

    Raises:
        ValueError: No position was looked at.
    """
    looked = (visits.stage != Stage.PRE_SCAN) & visits.on_text
    if not looked.any():
        raise ValueError("no position was looked at in a scan or a draft; record rounds that scan or draft")
    matrix, n_candidates = inputs(visits.observations, features), visits.match.shape[1]
    before = (visits.stage == Stage.PRE_SCAN) if (visits.stage == Stage.PRE_SCAN).any() else looked
    blind = log_odds_of(visits.match[before].mean(axis=0))
    weights = np.zeros((2, n_candidates, matrix.shape[1]))
    weights[..., -1] = blind
    for stage in (SCANNING, DRAFTING):
        for k in range(n_candidates):
            rows = np.flatnonzero(visits.of(stage, k))
            if rows.size:
                weights[stage, k] = fit_logistic(matrix[rows], visits.here[rows].astype(np.float64), ridge)
    return AcceptanceModel(features, weights, blind)
