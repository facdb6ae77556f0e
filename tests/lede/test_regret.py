"""The regret split: what each part is, by hand, and that the parts add up whatever the policy does."""

from __future__ import annotations

import numpy as np
import pytest

from lede.ceilings import Clairvoyant, solve
from lede.cost_model import CostModel
from lede.cost_tables import CostTables
from lede.draft_rounds import DraftRounds
from lede.features import FeatureConfig
from lede.regret import PARTS, Regret, split
from lede.round_log import RoundLog
from lede.simulation import Simulation, play
from lede.trace_table import TraceTable
from tests.matched_texts import VOCAB_SIZE, matched_text, random_texts
from tests.planted_costs import AGAIN, BLOCKS, PLANTED
from tests.tiny_models import N_LAYERS

COSTS = CostModel(N_LAYERS, (None,) * N_LAYERS, PLANTED, AGAIN, BLOCKS)
FEATURES = FeatureConfig(("entropy", "depth", "in_scan"))
PROMPT = 3

# layer 1 is right at the first and at the last two of six decisions, layer 2 but for the last, layer 3 nowhere
MATCH = np.zeros((6, N_LAYERS))
MATCH[[0, 4, 5], 0] = MATCH[:5, 1] = MATCH[:, -1] = 1


@pytest.fixture
def table() -> TraceTable:
    return TraceTable.from_traces([matched_text(MATCH, prompt_length=PROMPT)], 7, VOCAB_SIZE)


@pytest.fixture
def clairvoyant(table: TraceTable) -> Clairvoyant:
    return solve(table, COSTS, (1, 2, 3))


def blind(t: int, layer: int, n: int) -> float:
    return COSTS.round_seconds(PROMPT + t - 1, (), layer, n, features=None)


def plain(t: int) -> float:
    return COSTS.plain_seconds(PROMPT + t - 1)


def simulated(table: TraceTable, *rounds: tuple[int, int, int, int, float]) -> Simulation:
    """A simulation of one prompt from rounds of (decision, layer, drafted, accepted, seconds)."""
    log = RoundLog()
    for t, layer, drafted, accepted, seconds in rounds:
        prompt, decision, exit_layer, n, a, committed = (
            np.asarray([each]) for each in (0, t, layer, drafted, accepted, accepted + 1)
        )
        ending = "stop" if layer else "plain"
        log.write(prompt, decision, exit_layer, np.zeros_like(n), n, a, committed, ending, np.asarray([seconds]))
    log.finish()
    total = np.asarray([float(log.seconds.sum())])
    return Simulation(log.n_committed.sum(keepdims=True), total, total, np.zeros(1, dtype=np.int64), log)


def value(clairvoyant: Clairvoyant, t: int) -> float:
    return float(clairvoyant.value_at(np.asarray([0]), np.asarray([t]))[0])


def lost(found: Regret) -> dict[str, float]:
    return {name: float(parts[0]) for name, parts in found.parts.items() if abs(parts[0]) > 1e-12}


def test_the_clairvoyant_loses_nothing(table: TraceTable, clairvoyant: Clairvoyant) -> None:
    assert clairvoyant.plan[0].tolist() == [2]  # five at layer 2 and the bonus
    assert clairvoyant.plan[1].tolist() == [5]
    found = split(simulated(table, (1, 2, 5, 5, blind(1, 2, 5))), clairvoyant)
    assert lost(found) == {}
    assert found.of_clairvoyant == pytest.approx(1)


def test_stopped_too_early(table: TraceTable, clairvoyant: Clairvoyant) -> None:
    found = split(simulated(table, (1, 2, 2, 2, blind(1, 2, 2)), (4, 2, 2, 2, blind(4, 2, 2))), clairvoyant)
    wanted = blind(1, 2, 2) + blind(4, 2, 2) - blind(1, 2, 5)
    assert lost(found) == pytest.approx({"stopped_early": wanted})


def test_drafted_too_far(table: TraceTable, clairvoyant: Clairvoyant) -> None:
    rounds = (1, 1, 4, 1, blind(1, 1, 4)), (3, 2, 3, 3, blind(3, 2, 3))
    found = split(simulated(table, *rounds), clairvoyant)
    far = blind(1, 1, 4) - blind(1, 1, 1)
    layer = blind(1, 1, 1) + value(clairvoyant, 3) - value(clairvoyant, 1)
    assert lost(found) == pytest.approx({"drafted_far": far, "wrong_layer": layer})
    assert sum(lost(found).values()) == pytest.approx(found.seconds[0] - found.fewest[0])


def test_a_layer_that_is_wrong_at_once(table: TraceTable, clairvoyant: Clairvoyant) -> None:
    """One token was enough to be wrong; the rest of the draft was too far, drafting there at all the wrong layer."""
    found = split(simulated(table, (1, 3, 3, 0, blind(1, 3, 3)), (2, 2, 4, 4, blind(2, 2, 4))), clairvoyant)
    far = blind(1, 3, 3) - blind(1, 3, 1)
    layer = blind(1, 3, 1) + value(clairvoyant, 2) - value(clairvoyant, 1)
    assert lost(found) == pytest.approx({"drafted_far": far, "wrong_layer": layer})


def test_inspection(table: TraceTable, clairvoyant: Clairvoyant) -> None:
    found = split(simulated(table, (1, 2, 5, 5, blind(1, 2, 5) + 0.25)), clairvoyant)
    assert lost(found) == pytest.approx({"inspection": 0.25})
    assert found.shares()["inspection"] == pytest.approx(0.25 / found.seconds[0])


def test_should_have_drafted(table: TraceTable, clairvoyant: Clairvoyant) -> None:
    """A plain pass that also looked at candidates in vain."""
    found = split(simulated(table, (1, 0, 0, 0, plain(1) + 0.5), (2, 2, 4, 4, blind(2, 2, 4))), clairvoyant)
    draft = plain(1) + value(clairvoyant, 2) - value(clairvoyant, 1)
    assert draft > 0
    assert lost(found) == pytest.approx({"inspection": 0.5, "should_draft": draft})


def test_should_have_skipped() -> None:
    table = TraceTable.from_traces([matched_text(np.zeros((2, N_LAYERS)), prompt_length=PROMPT)], 3, VOCAB_SIZE)
    found = split(simulated(table, (1, 2, 1, 0, blind(1, 2, 1)), (2, 0, 0, 0, plain(2))), solve(table, COSTS, (1, 2)))
    assert lost(found) == pytest.approx({"should_skip": blind(1, 2, 1) - plain(1)})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("features", [None, FEATURES])
def test_parts_add_up_and_none_is_negative(features: FeatureConfig | None, seed: int) -> None:
    """Random decisions, sampled and greedy text, ends of sequence, rounds of all kinds."""
    texts = random_texts(30, 20, N_LAYERS, seed)
    if seed % 2:
        rng = np.random.default_rng(seed)
        texts = [matched_text(rng.random(t.match.shape), t.ended_by_eos, 5, i) for i, t in enumerate(texts)]
    table = TraceTable.from_traces(texts, 20, VOCAB_SIZE)
    candidates, cap = (1, 2, 4), 6
    costs = CostTables(COSTS, candidates, table.max_context, cap)
    rng = np.random.default_rng(seed)

    def decide(rounds: DraftRounds) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        wish = rng.random((rounds.stage.size, rounds.n_actions)) * rounds.legal()
        return np.asarray(wish.argmax(axis=1))

    played = play(DraftRounds(table, costs, features, seed=3), decide)
    found = split(played, solve(table, COSTS, (1, 2, 3, 4), 12, seed=3))
    total = np.sum(list(found.parts.values()), axis=0)
    assert found.fewest + total == pytest.approx(found.seconds, rel=1e-12)
    assert all((parts >= -1e-12).all() for parts in found.parts.values())
    assert found.parts.pop("wrong_source").sum() == 0  # there is one
    assert all(parts.sum() > 1e-6 for name, parts in found.parts.items() if features or name != "inspection")
    assert sum(found.shares().values()) + found.of_clairvoyant == pytest.approx(1)
    assert {*found.parts, "wrong_source"} == set(PARTS)


def test_a_clairvoyant_that_may_do_less_is_refused(table: TraceTable) -> None:
    done = simulated(table, (1, 2, 5, 5, blind(1, 2, 5)))
    with pytest.raises(ValueError, match=r"layers \[2\]"):
        split(done, solve(table, COSTS, (1, 3)))
    with pytest.raises(ValueError, match="drafts 5 tokens in a round"):
        split(done, solve(table, COSTS, (1, 2), max_draft=4))
