"""The clairvoyant against every plan there is, by hand, and against policies."""

from __future__ import annotations

import numpy as np
import pytest

from lede.buffers.records import PromptTrace
from lede.ceilings import Clairvoyant, blind_seconds, solve
from lede.cost_model import CostModel
from lede.cost_tables import CostTables
from lede.policies import RandomPolicy, StaticPolicy, ThresholdPolicy
from lede.simulation import simulate
from lede.trace_table import TraceTable
from tests.matched_texts import VOCAB_SIZE, matched_text, random_texts
from tests.planted_costs import AGAIN, BLOCKS, PLANTED
from tests.tiny_models import N_LAYERS

COSTS = CostModel(N_LAYERS, (None, 5) * (N_LAYERS // 2), PLANTED, AGAIN, BLOCKS)


def table_of(texts: list[PromptTrace], max_new_tokens: int) -> TraceTable:
    return TraceTable.from_traces(texts, max_new_tokens, VOCAB_SIZE)


def fewest_seconds(
    text: PromptTrace, costs: CostModel, candidates: tuple[int, ...], max_draft: int, budget: int
) -> float:
    """Every plan of rounds, wrong drafts among them, priced by the cost model itself."""
    last = text.n_decided

    def from_decision(t: int) -> float:
        if t > last:
            return 0.0
        context = text.prompt_ids.size + t - 1
        best = costs.plain_seconds(context) + from_decision(t + 1)
        for layer in candidates:
            for n in range(1, min(max_draft, budget - t - 1) + 1):
                accepted = 0
                while accepted < n and t + accepted <= last and text.match[t - 1 + accepted, layer - 1]:
                    accepted += 1
                ends = text.ended_by_eos and t + accepted == last + 1
                if ends and n > accepted:
                    break  # nothing is drafted after an end of sequence
                ending = "eos" if ends else "cap"
                seconds = costs.round_seconds(context, (), layer, n, ending, features=None)  # type: ignore[arg-type]
                best = min(best, seconds + from_decision(t + accepted + (not ends)))
        return best

    return from_decision(1)


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_is_faster_not_even_with_wrong_drafts(seed: int) -> None:
    candidates, cap, budget = (1, 3, 5), 3, 7
    texts = random_texts(6, budget, N_LAYERS, seed, shares=[0.5, 0.6, 0.6, 0.7, 0.8, 1.0])
    found = solve(table_of(texts, budget), COSTS, candidates, cap)
    wanted = [fewest_seconds(text, COSTS, candidates, cap, budget) for text in texts]
    assert found.seconds == pytest.approx(wanted, rel=1e-12)


def test_by_hand() -> None:
    """Layer 1 is right twice, then wrong, then right at the EOS; layer 2 is right in the middle."""
    match = np.zeros((4, N_LAYERS))
    match[[0, 1, 3], 0] = match[[0, 1, 2], 1] = match[:, -1] = 1
    found = solve(table_of([matched_text(match, ended_by_eos=True)], 9), COSTS, (1, 2))

    def blind(*plan: int, ending: str = "cap") -> float:
        return COSTS.round_seconds(plan[0], (), plan[1], plan[2], ending, features=None)  # type: ignore[arg-type]

    options = {
        "three at layer 2, the EOS as bonus": blind(3, 2, 3),
        "two at layer 1, then the EOS alone": blind(3, 1, 2) + blind(6, 1, 1, ending="eos"),
        "two at layer 1, then plain": blind(3, 1, 2) + COSTS.plain_seconds(6),
    }
    assert found.seconds == pytest.approx([min(options.values())], rel=1e-12)
    assert found.draft_length[0].tolist() == [2, 3]
    assert found.rate == pytest.approx(4 / min(options.values()))
    # at the wrong token of layer 1 the best of the bad drafts is one token, and its correction
    assert found.draft_value[2, 0] == pytest.approx(blind(5, 1, 1) + found.value[3], rel=1e-12)


def test_nothing_can_be_drafted_at_the_budget() -> None:
    found = solve(table_of([matched_text(np.ones((3, N_LAYERS)))], 4), COSTS, (1,))
    assert np.isinf(found.draft_value[2]).all()  # decision 3 writes the 4th token
    assert found.draft_length[:2, 0].tolist() == [2, 1]
    layer, length = found.plan
    assert layer.tolist() == [1]
    assert length.tolist() == [2]


def test_layers_that_are_never_right_leave_plain_decoding() -> None:
    match = np.zeros((5, N_LAYERS))
    found = solve(table_of([matched_text(match), matched_text(match, index=1, prompt_length=5)], 6), COSTS, (1, 2))
    summary = found.summary()
    assert summary.speedup == pytest.approx(1, rel=1e-12)
    assert summary.layer_shares == {0: 1.0}
    assert summary.exit_layer is summary.draft_length is None


def test_the_plan_takes_the_seconds_that_the_values_say() -> None:
    texts = random_texts(12, 30, N_LAYERS, 3)
    found = solve(table_of(texts, 30), COSTS, (1, 2, 4), 5)
    summary, (layer, length) = found.summary(), found.plan
    assert sum(summary.layer_shares.values()) == pytest.approx(1)
    assert summary.exit_layer == pytest.approx(layer[layer > 0].mean())
    assert length.max() <= 5
    plain = sum(COSTS.plain_seconds(t.prompt_ids.size + i) for t in texts for i in range(t.n_decided))
    assert summary.speedup == pytest.approx(plain / found.seconds.sum())
    assert summary.rate == pytest.approx(sum(t.n_decided for t in texts) / found.seconds.sum())


def test_blind_rounds_cost_what_the_cost_model_says() -> None:
    blind = blind_seconds(CostTables(COSTS, (2, 5), 20, 4))
    for k, layer in enumerate((2, 5)):
        for n in (1, 3, 4):
            for context in (0, 7, 20):
                for ending in ("cap", "eos"):
                    wanted = COSTS.round_seconds(context, (), layer, n, ending, features=None)
                    assert blind[int(ending == "eos"), k, n, context] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("sampled", [False, True])
def test_no_policy_is_faster(sampled: bool) -> None:
    texts = random_texts(20, 24, N_LAYERS, 5)
    if sampled:
        rng = np.random.default_rng(0)
        texts = [matched_text(rng.random(t.match.shape), t.ended_by_eos, 4, i) for i, t in enumerate(texts)]
    table = table_of(texts, 24)
    ceiling = solve(table, COSTS, (1, 2, 3, 4, 5), seed=7)
    policies = [
        StaticPolicy(exit_layer=3, draft_length=2),
        ThresholdPolicy(candidates=(2, 4)),
        RandomPolicy(candidates=(1, 3, 5)),
    ]
    for policy in policies:
        played = simulate(policy, table, COSTS, seed=7)
        assert played.tokens.tolist() == table.n_decided.tolist()
        assert (played.seconds >= ceiling.seconds - 1e-12).all()


def test_sampled_drafts_are_drawn_as_the_simulator_draws_them() -> None:
    """A static policy that drafts 1 token at the only layer worth it: where that pays always, both do the same."""
    rng = np.random.default_rng(1)
    chance = rng.random((40, N_LAYERS))
    table = table_of([matched_text(chance, prompt_length=2)], 41)
    values = {solve(table, COSTS, (2,), seed=seed).seconds.sum() for seed in range(4)}
    assert len(values) == 4


def test_useless_arguments_are_refused() -> None:
    table = table_of([matched_text(np.ones((3, N_LAYERS)))], 4)
    for candidates in ((), (0,), (N_LAYERS,)):
        with pytest.raises(ValueError, match="must be layers within"):
            solve(table, COSTS, candidates)
    with pytest.raises(ValueError, match="neither"):
        solve(table_of([matched_text(np.ones((3, N_LAYERS)))], 8), COSTS, (1,))


def test_a_prompt_without_decisions_costs_nothing() -> None:
    texts = [matched_text(np.ones((0, N_LAYERS)), ended_by_eos=True), matched_text(np.ones((5, N_LAYERS)), index=1)]
    found: Clairvoyant = solve(table_of(texts, 6), COSTS, (1,))
    assert found.seconds[0] == 0
    assert found.seconds[1] > 0
