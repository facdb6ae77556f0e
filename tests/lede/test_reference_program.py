"""The reference program against optima that are known: every policy tried out, and a chain solved by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from lede.buffers.records import PromptTrace
from lede.cell_process import END, Steps, solve
from lede.cost_model import CostModel
from lede.cost_tables import CostTables
from lede.draft_rounds import DraftRounds, Stage
from lede.features import FeatureConfig
from lede.reference_program import ProgramConfig, ReferenceProgram
from lede.simulation import Decide, play
from lede.trace_table import TraceTable
from tests.matched_texts import VOCAB_SIZE, matched_text
from tests.planted_costs import PLANTED

CHANCES = (0.97, 0.8, 0.2)
SHARES = (0.5, 0.3, 0.2)
SURPRISALS = (0.05, 0.6, 2.0)
CAP, BUDGET, LAYERS, LAYER = 6, 120, 6, 1
COSTS = CostModel(LAYERS, (None,) * LAYERS, replace(PLANTED, layer_context=0.0, layer_pair=0.0))
SEEN = FeatureConfig(("surprisal", "drafted"))


@pytest.mark.parametrize("seed", range(6))
def test_no_policy_has_a_larger_ratio(seed: int) -> None:
    """Every deterministic policy of a small process, solved by linear algebra."""
    rng = np.random.default_rng(seed)
    n_cells, n_actions, n = 4, 3, 3000
    cell, action = rng.integers(0, n_cells, n), rng.integers(0, n_actions, n)
    odds = rng.dirichlet(np.ones(n_cells + 1), (n_cells, n_actions)).cumsum(axis=2)
    following = (rng.random(n)[:, None] > odds[cell, action]).sum(axis=1)
    following[following == n_cells] = END
    tokens = (rng.random((n_cells, n_actions)) * 5)[cell, action] + rng.random(n)
    seconds = (0.1 + rng.random((n_cells, n_actions)))[cell, action]
    found = solve(Steps(cell, action, following, tokens, seconds), [1, 0, 0, 2])

    def ratio(policy: tuple[int, ...]) -> float:
        moves, earned = np.zeros((n_cells, n_cells)), np.zeros((n_cells, 2))
        for c, a in enumerate(policy):
            rows = (cell == c) & (action == a)
            moves[c] = [(following[rows] == other).mean() for other in range(n_cells)]
            earned[c] = tokens[rows].mean(), seconds[rows].mean()
        worth = np.array([1, 0, 0, 2]) @ np.linalg.solve(np.eye(n_cells) - moves, earned)
        return float(worth[0] / worth[1])

    every = {policy: ratio(policy) for policy in itertools.product(range(n_actions), repeat=n_cells)}
    assert found.rate == pytest.approx(max(every.values()), rel=1e-4)
    assert every[tuple(found.action.tolist())] == pytest.approx(max(every.values()), rel=1e-9)


def test_rare_actions_are_left_out_and_unknown_cells_told() -> None:
    cell, action = np.array([0] * 30 + [0]), np.array([0] * 30 + [1])
    steps = Steps(cell, action, np.full(31, END), np.where(action == 1, 100.0, 1.0), np.ones(31))
    assert solve(steps, [1, 0], least=5).action.tolist() == [0, -1]
    assert solve(steps, [1, 0], least=1).action.tolist() == [1, -1]
    with pytest.raises(ValueError, match="no decision was recorded"):
        solve(Steps(*(column[:0] for column in vars(steps).values())), [1, 0])


def chain_texts(n: int, seed: int) -> list[PromptTrace]:
    """One layer's drafts are accepted by a state of each position, drawn by itself and shown in the surprisal."""
    texts = []
    for index in range(n):
        rng = np.random.default_rng((seed, index))
        state = rng.choice(len(SHARES), BUDGET - 1, p=SHARES)
        match = np.zeros((BUDGET - 1, LAYERS))
        match[:, :-1] = (rng.random(BUDGET - 1) < np.asarray(CHANCES)[state])[:, None]
        match[:, -1] = 1
        text = matched_text(match, index=index)
        top1 = np.repeat(-np.asarray(SURPRISALS, dtype=np.float32)[state][:, None], LAYERS, axis=1)
        texts.append(replace(text, top1=top1, top2=top1 - 1))
    return texts


def best_of_chain() -> tuple[float, Callable[[int, float, int], bool]]:
    """Tokens a second of the best policy on a text without end, and whether it drafts on after n tokens of a survival.

    A round is a renewal: its reward is tokens - rate * seconds, and the best rate is where the best round earns 0.
    """
    tables = CostTables(COSTS, (LAYER,), BUDGET, CAP)
    ask, draw, pass_, draft = (
        tables.decision(SEEN),
        tables.choice(SEEN),
        float(tables.scan[0, 0]),
        float(tables.draft[0, 0]),
    )

    def going_on(rate: float) -> tuple[Callable[[int, float, int], tuple[float, bool]], Callable[[int], float]]:
        @cache
        def after(n: int, alive: float) -> float:
            """Value once n tokens are drafted, all of them accepted with probability `alive`."""
            if n == CAP:
                return 1 - rate * (draft + float(tables.verify[0, n + 1, 0]))
            at_state = [p * decide(n, alive, s)[0] for s, p in enumerate(SHARES)]
            return sum(at_state) - rate * (draft + ask)

        @cache
        def decide(n: int, alive: float, state: int) -> tuple[float, bool]:
            stop = 1 - rate * float(tables.verify[0, n + 1, 0])
            on = alive * CHANCES[state] + after(n + 1, alive * CHANCES[state]) - rate * draw
            return max(stop, on), on > stop

        def first(state: int) -> float:
            give_up = 1 - rate * float(tables.verify[0, 1, 0])
            return max(give_up, CHANCES[state] + after(1, CHANCES[state]) - rate * draw)

        return decide, first

    low, high = 0.0, 1e6
    while high - low > 1e-6 * low:
        rate = (low + high) / 2
        _, first = going_on(rate)
        earned = sum(p * first(s) for s, p in enumerate(SHARES)) - rate * (pass_ + ask)
        low, high = (rate, high) if earned > 0 else (low, rate)
    decide, first = going_on(low)
    give_up = 1 - low * float(tables.verify[0, 1, 0])
    return low, lambda n, alive, state: decide(n, alive, state)[1] if n else first(state) > give_up


def play_chain(wants: Callable[[int, float, int], bool], n_lanes: int) -> Decide:
    alive = np.ones(n_lanes)

    def decide(lanes: DraftRounds) -> np.ndarray:
        surprisal = lanes.observe()[:, 0]
        action = np.ones(n_lanes, dtype=np.int64)
        for i in np.flatnonzero((lanes.stage == Stage.SCAN) | (lanes.stage == Stage.DRAFT)).tolist():
            n, state = int(lanes.n_drafted[i]), int(np.abs(np.asarray(SURPRISALS) - surprisal[i]).argmin())
            before = alive[i] if n else 1.0
            action[i] = wants(n, before, state)
            alive[i] = before * CHANCES[state]
        return action

    return decide


def test_the_program_reaches_the_optimum_of_a_chain() -> None:
    """Within 1 % of the best policy on texts that neither has seen, and that is where theory says."""
    rate, wants = best_of_chain()
    tables = [TraceTable.from_traces(chain_texts(120, seed), BUDGET, VOCAB_SIZE) for seed in (1, 2)]
    train, test = (
        DraftRounds(t, CostTables(COSTS, (LAYER,), t.max_context, CAP), SEEN, decides_pre_scan=False) for t in tables
    )
    best = play(test, play_chain(wants, 120))
    assert best.rate == pytest.approx(rate, rel=0.02)  # the budget cuts off the last rounds, and luck
    assert 2 < (best.draft_length or 0) < CAP  # neither always stops nor never
    assert 0.05 < (best.log.layer == 0).mean() < 0.5
    program = ReferenceProgram(train, ProgramConfig(passes=3, rounds=2, own_passes=2, history=(1, 1)))
    found = play(test, program.decisions(120))
    assert found.rate > 0.99 * best.rate
    assert program.rate == pytest.approx(play(train, program.decisions(120)).rate)
