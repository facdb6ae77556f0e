"""The best policy for given features, by an exact dynamic program on a discretised state.

What a policy can know is sorted into cells by what matters for a decision: in the pre-scan by the history; in the scan
by the candidate and the forecast of acceptance; in the draft by the candidate, the tokens drafted, the forecast, and
the survival of the draft up to and with this token. Tokens, seconds and where each action leads are counted on recorded
rounds, and the program is solved exactly for the ratio of tokens to seconds: policy iteration for tokens - rate *
seconds with gamma = 1, the rate being the policy's own.

A policy that sees the same features may still do better in so far as a cell mixes what it can tell apart.

Source: Dinkelbach, On nonlinear fractional programming (1967), for the ratio; Howard, Dynamic programming and Markov
processes (1960), for policy iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lede.acceptance import AcceptanceModel
from lede.cell_process import END, Solution, Steps, solve
from lede.draft_rounds import DraftRounds, Stage
from lede.policies.base import BLIND
from lede.rewards import CONTINUE, EXIT
from lede.round_behaviour import RoundTransitions, record
from lede.seeding import Purpose, numpy_stream
from lede.simulation import Decide, play
from lede.visits import SurvivalMemory, Visits, Watch, fit_acceptance, join_visits, watch_plans

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ProgramConfig:
    """How fine the state is cut, and on what the program counts."""

    history: tuple[int, int] = (2, 2)
    """Cells of the pre-scan, by `trace` and by `acceptance`, as far as they are observed."""
    scan: int = 16
    """Cells of the forecast at each candidate of the scan."""
    draft: tuple[int, int] = (3, 16)
    """Cells of the draft at each candidate and length, by forecast and by survival with this token."""
    lengths: tuple[int, ...] = (1, 4)
    """Tokens drafted at which a new cell begins."""
    least: int = 50
    """Fewest recorded steps that an action needs in a cell to be considered there."""
    passes: int = 6
    """Times that every prompt is recorded under random plans."""
    rounds: int = 3
    """Times that the program is solved again on rounds of its own policy."""
    own_passes: int = 4
    """Times that every prompt is recorded for each of these."""
    explore: float = 0.3
    """Share of these rounds that follow random plans."""
    flips: float = 0.05
    """Share of the policy's decisions in them that are replaced at random."""


class StateCells:
    """Sorts what policies know into cells.

    Args:
        model: Forecasts.
        visits: What the quantiles are taken of.
        config: How fine the cells are.
    """

    def __init__(self, model: AcceptanceModel, visits: Visits, config: ProgramConfig) -> None:
        self.config = config
        names, each = model.features.names, range(visits.match.shape[1])
        self._history = [names.index(name) if name in names else None for name in ("trace", "acceptance")]
        before = visits.observations[visits.stage == Stage.PRE_SCAN]
        self._pre_scan = [
            _quantiles(before[:, place], n) if place is not None else np.zeros(0)
            for place, n in zip(self._history, config.history, strict=True)
        ]
        scans = [(visits.stage == Stage.SCAN) & (visits.candidate == k) for k in each]
        drafts = [(visits.stage == Stage.DRAFT) & (visits.candidate == k) for k in each]
        chance, whole = visits.log_chance, visits.log_chance + visits.log_survival
        self._scan = [_quantiles(chance[rows], config.scan) for rows in scans]
        self._chance = [_quantiles(chance[rows], config.draft[0]) for rows in drafts]
        self._whole = [_quantiles(whole[rows], config.draft[1]) for rows in drafts]
        self._first_scan = config.history[0] * config.history[1]
        self._first_draft = self._first_scan + len(each) * config.scan
        self._per_length = config.draft[0] * config.draft[1]
        self.n_cells = self._first_draft + len(each) * len(config.lengths) * self._per_length

    def __call__(
        self,
        observations: npt.NDArray[np.float32],
        stage: npt.NDArray[np.int8],
        candidate: Ints,
        drafted: Ints,
        log_chance: Array,
        log_survival: Array,
    ) -> Ints:
        """Cells `(n,)`."""
        config = self.config
        cell = np.zeros(stage.size, dtype=np.int64)
        for place, edges, n in zip(self._history, self._pre_scan, config.history, strict=True):
            cell = cell * n
            if place is not None:
                cell += np.searchsorted(edges, observations[:, place], side="right")
        length = np.maximum(np.searchsorted(config.lengths, drafted, side="right") - 1, 0)
        whole = log_chance + log_survival
        for k in range(len(self._scan)):
            scan = np.flatnonzero((stage == Stage.SCAN) & (candidate == k))
            by_chance = np.searchsorted(self._scan[k], log_chance[scan], side="right")
            cell[scan] = self._first_scan + k * config.scan + by_chance
            draft = np.flatnonzero((stage == Stage.DRAFT) & (candidate == k))
            by_chance = np.searchsorted(self._chance[k], log_chance[draft], side="right")
            by_whole = np.searchsorted(self._whole[k], whole[draft], side="right")
            place_of_length = (k * len(config.lengths) + length[draft]) * self._per_length
            cell[draft] = self._first_draft + place_of_length + by_chance * config.draft[1] + by_whole
        return cell


class ReferenceProgram:
    """The best policy that the cells of a state allow.

    Attributes:
        model: Forecasts.
        cells: What sorts observations into cells.
        solution: What to do in each.
        rate: Tokens a second of that on the training prompts, played.

    Args:
        rounds: Rounds on training prompts, with the features that are observed.
        config: Fineness; None for the defaults.
        seed: Of what is explored, and of the acceptance of sampled drafts.

    Raises:
        ValueError: The rounds observe nothing, or leave no room for a draft.
    """

    def __init__(self, rounds: DraftRounds, config: ProgramConfig | None = None, seed: int = 0) -> None:
        if rounds.features is None:
            raise ValueError("the rounds observe nothing; give them features")
        self.config = config = ProgramConfig() if config is None else config
        self._rounds, self._seed = rounds, seed
        self._passes = 0
        self.model = fit_acceptance(
            join_visits([watch_plans(rounds, self._rng(), None, seed)[0] for _ in range(2)]), rounds.features
        )
        parts = [watch_plans(rounds, self._rng(), self.model, seed) for _ in range(config.passes)]
        self.cells = StateCells(self.model, join_visits([visits for visits, _ in parts]), config)
        self.rate = 0.0
        self._improve(parts)
        for _ in range(config.rounds):
            own = [self._watch_own() for _ in range(config.own_passes)]
            parts += own
            for pool in (own, parts):
                self._improve(pool)

    def decisions(self, n_lanes: int, solution: Solution | None = None) -> Decide:
        """What to do where lanes stand, each with a memory of its own; for `lede.simulation.play`.

        Args:
            n_lanes: Lanes.
            solution: What to do in each cell; None for the best.
        """
        memory = SurvivalMemory(self.model, n_lanes)

        def decide(lanes: DraftRounds) -> Ints:
            seen = lanes.observe()
            return self._decide(lanes, seen, *memory.look(lanes, seen), solution)

        return decide

    def _decide(
        self,
        lanes: DraftRounds,
        seen: npt.NDArray[np.float32],
        chance: Array,
        survival: Array,
        solution: Solution | None = None,
    ) -> Ints:
        cell = self.cells(seen, lanes.stage, lanes.candidate, lanes.n_drafted, chance, survival)
        action = (solution or self.solution).action[cell]
        # where nothing is known: begin a scan, go on with it, stop a draft
        unknown = np.where(lanes.stage == Stage.PRE_SCAN, EXIT, CONTINUE)
        return np.where(action < 0, unknown, action)

    def _rng(self) -> np.random.Generator:
        self._passes += 1
        return numpy_stream(self._seed, Purpose.REFERENCE, self._passes)

    def _watch_own(self) -> tuple[Visits, RoundTransitions]:
        watch = Watch(self._rounds, self._decide, self.model, self._seed)
        recorded = record(self._rounds, self._rng(), watch, self.config.explore, self.config.flips)
        return watch.visits(), recorded

    def _cells_of(self, visits: Visits) -> Ints:
        return self.cells(
            visits.observations, visits.stage, visits.candidate, visits.drafted, visits.log_chance, visits.log_survival
        )

    def _improve(self, parts: list[tuple[Visits, RoundTransitions]]) -> None:
        """Solve on these recordings, and keep the solution if it plays faster than those before.

        The estimate of the program itself flatters what it chose, the more so the finer the cells.
        """
        found = self._solve(parts)
        rate = play(self._rounds, self.decisions(self._rounds.table.n_prompts, found)).rate
        self._rounds.log = None
        if rate > self.rate:
            self.rate, self.solution = rate, found

    def _solve(self, parts: list[tuple[Visits, RoundTransitions]]) -> Solution:
        steps = [self._steps(*part) for part in parts]
        start = np.zeros(self.cells.n_cells)
        for visits, _ in parts:  # the prompts' first decisions come first
            first = visits.stage[: self._rounds.table.n_prompts] == Stage.PRE_SCAN
            np.add.at(start, self._cells_of(visits)[: first.size][first], 1)
        return solve(Steps.join(steps), start, self.config.least)

    def _steps(self, visits: Visits, recorded: RoundTransitions) -> Steps:
        """Decisions by cell; a token counts where it is drafted, which is known here though no policy knows it."""
        moves, cell = recorded.transitions, self._cells_of(visits)
        action = moves.actions.astype(np.int64)
        blind = action >= BLIND
        drafts = blind | ((action == EXIT) & (visits.stage != Stage.PRE_SCAN))
        which = np.where(blind, action - BLIND, visits.candidate)
        earned = drafts & visits.on_text & visits.match[np.arange(len(visits)), which]
        bonus = np.where(recorded.tokens > 0, recorded.tokens - visits.accepted - earned, 0)
        following = np.where(moves.episode_end, END, cell[moves.next_row])
        return Steps(cell, action, following, earned + bonus, recorded.seconds)


def _quantiles(values: npt.NDArray[np.floating], n: int) -> Array:
    """The n - 1 edges of n bins of about as many values; equal edges leave bins empty."""
    if not values.size:
        return np.zeros(n - 1)
    return np.quantile(values.astype(np.float64), np.arange(1, n) / n)
