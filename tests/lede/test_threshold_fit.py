"""Fitted thresholds: rates against the simulator, a planted optimum, and a fit from prompts alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lede.buffers.settings import StoreSettings
from lede.buffers.store import TraceStore
from lede.checkpoint import fingerprint
from lede.cost_model import CostModel
from lede.cost_profile import CostProfile
from lede.generation import generate
from lede.policies import StaticPolicy, ThresholdPolicy
from lede.simulation import simulate
from lede.threshold_fit import fit_thresholds, fit_thresholds_on, layer_costs
from lede.threshold_search import NEVER, ThresholdSearch
from lede.trace_table import TraceTable
from tests.matched_texts import VOCAB_SIZE, random_texts, with_branches
from tests.planted_costs import AGAIN, BLOCKS, PLANTED
from tests.tiny_models import N_LAYERS, plain_generate, prompt, tiny_model

torch.set_num_threads(1)

COSTS = CostModel(N_LAYERS, (None, 5) * (N_LAYERS // 2), PLANTED, AGAIN, BLOCKS)
CANDIDATES = (1, 3, 4)
BUDGET, CAP = 24, 5


def a_table(branches: bool = False, n: int = 12) -> TraceTable:
    texts = random_texts(n, BUDGET, N_LAYERS, seed=1)
    if branches:
        texts = [with_branches(text, 1, CAP - 1) for text in texts]
    return TraceTable.from_traces(texts, BUDGET, VOCAB_SIZE)


@pytest.mark.parametrize("branches", [False, True])
def test_rates_are_those_of_the_simulator(branches: bool) -> None:
    table, rng = a_table(branches), np.random.default_rng(3)
    search = ThresholdSearch(table, COSTS, CANDIDATES, CAP)
    seen = np.exp(table.top1[:, :-1].astype(np.float64)).ravel()  # a probability at its threshold does not pass
    some = [tuple(rng.choice(seen, 4).tolist()) for _ in range(6)]
    for limits in [(0.0,) * 4, (NEVER,) * 4, (NEVER, 0.4, NEVER, 0.3), (0.3, 0.4, 0.5, NEVER), *some]:
        layers, thresholds = search.inspected(limits)
        policy = ThresholdPolicy(candidates=layers, thresholds=thresholds, draft_threshold=limits[-1], max_draft=CAP)
        assert search.rate(limits) == pytest.approx(simulate(policy, table, COSTS).rate, rel=1e-12)
    assert search.best == max(search.played, key=lambda limits: search.played[limits])


def test_candidates_where_nothing_exits_are_not_looked_at() -> None:
    search = ThresholdSearch(a_table(), COSTS, CANDIDATES, CAP)
    assert search.inspected((0.2, NEVER, 0.9, 0.5)) == ((1, 4), (0.2, 0.9))
    assert search.inspected((NEVER, NEVER, NEVER, 0.5)) == ((1,), (NEVER,))
    assert search.rate((0.2, NEVER, 0.9, 0.5)) > search.rate((0.2, 0.999999, 0.9, 0.5))


def test_a_setting_is_played_once() -> None:
    search = ThresholdSearch(a_table(), COSTS, CANDIDATES, CAP)
    assert search.rate((0.5,) * 4) == search.rate((0.5,) * 4)
    assert len(search.played) == 1


def test_grids_hold_quantiles_always_and_never() -> None:
    table = a_table()
    grids = ThresholdSearch(table, COSTS, CANDIDATES, CAP).grids(3)
    assert len(grids) == 4
    for grid in grids:
        assert (grid[0], grid[-1]) == (0.0, NEVER)
        assert grid == sorted(set(grid))
    for column, grid in ((0, grids[0]), (2, grids[1]), (3, grids[2])):
        middle = np.median(np.exp(table.top1[:, column].astype(np.float64)))
        assert min(abs(value - middle) for value in grid) < 1e-6


@pytest.mark.parametrize("branches", [False, True])
def test_fit_beats_simple_thresholds(branches: bool) -> None:
    texts = random_texts(12, BUDGET, N_LAYERS, seed=1)
    if branches:
        texts = [with_branches(text, 1, CAP - 1) for text in texts]
    fitted = fit_thresholds(texts, CANDIDATES, COSTS, max_new_tokens=BUDGET, max_draft=CAP, quantiles=6)
    table = TraceTable.from_traces(texts, BUDGET, VOCAB_SIZE)
    found = simulate(fitted.policy, table, COSTS)
    assert fitted.score == pytest.approx(found.rate, rel=1e-12)
    assert fitted.speedup == pytest.approx(found.speedup, rel=1e-12)
    assert fitted.unit == "tokens/s"
    assert fitted.evaluations > 100
    simple = [
        ThresholdPolicy(candidates=layers, thresholds=value, max_draft=CAP)
        for layers in (CANDIDATES, (1,), (3,), (4,), (3, 4))
        for value in (0.2, 0.25, 0.3, 0.35, 0.5, 0.8)
    ]
    assert fitted.score > max(simulate(policy, table, COSTS).rate for policy in simple)


def test_fit_finds_where_right_and_wrong_part() -> None:
    """Drafts are right exactly where their probability is above exp(-1.2)."""
    texts = random_texts(40, BUDGET, N_LAYERS, seed=4, shares=[0.5, 0.5, 0.5, 0.5, 0.5, 1.0])
    fitted = fit_thresholds(texts, (2,), max_new_tokens=BUDGET, quantiles=24)
    parting = pytest.approx(np.exp(-1.2), abs=0.02)
    assert isinstance(fitted.policy.config.thresholds, tuple)
    assert fitted.policy.config.draft_threshold == parting
    assert fitted.policy.config.thresholds[0] == parting
    assert fitted.unit == "tokens/layer"
    found = simulate(fitted.policy, TraceTable.from_traces(texts, BUDGET, VOCAB_SIZE), layer_costs(N_LAYERS))
    assert found.acceptance == pytest.approx(1.0, abs=0.02)
    assert found.speedup == pytest.approx(fitted.speedup)
    assert fitted.speedup > 1.2


def test_layers_are_counted_as_the_papers_do() -> None:
    """A draft of d tokens at layer l costs d l + L layers, a plain pass L, and no head read counts unless it shall."""
    log = simulate(StaticPolicy(exit_layer=2, draft_length=3), a_table(), layer_costs(N_LAYERS)).log
    drafts = (log.layer == 2) & (log.n_committed > log.n_accepted)
    assert drafts.any()
    np.testing.assert_allclose(log.seconds[drafts], log.n_drafted[drafts] * 2 + N_LAYERS)
    np.testing.assert_allclose(log.seconds[log.layer == 0], N_LAYERS)
    costs = layer_costs(N_LAYERS, head_cost=2.0)
    assert costs.round_seconds(9, (), 2, 3, features=None) == 3 * (2 + 2) + N_LAYERS + 2
    assert costs.plain_seconds(9) == N_LAYERS + 2


def a_profile() -> CostProfile:
    return CostProfile(
        model="planted", fingerprint={}, candidates=CANDIDATES, contexts=(8,), repeats=1, device="cpu",
        device_name="none", threads=1, dtype="float32", attention="eager", versions={}, measurements=(), costs=COSTS,
        residuals={},
    )  # fmt: skip


def test_store_and_profile_say_what_they_know(tmp_path: Path) -> None:
    model = tiny_model("llama")
    settings = StoreSettings(
        kind="traces", model="tiny", n_layers=N_LAYERS, vocab_size=VOCAB_SIZE, candidates=CANDIDATES,
        fingerprint=fingerprint(model), temperature=0.7, max_new_tokens=BUDGET,
    )  # fmt: skip
    store = TraceStore(settings, random_texts(6, BUDGET, N_LAYERS, seed=1))
    fitted = fit_thresholds(store, costs=a_profile(), quantiles=3, sweeps=1)
    config = fitted.policy.config
    assert config.trained_temperature == 0.7
    assert set(config.candidates or ()) <= set(CANDIDATES)
    assert fitted.policy.fingerprint == settings.fingerprint
    fitted.policy.save_pretrained(str(tmp_path))
    loaded = ThresholdPolicy.from_pretrained(str(tmp_path))
    assert loaded.config == config
    assert loaded.profile == a_profile()
    given = fit_thresholds(store, (2, 3), quantiles=3, sweeps=1, temperature=0.0)
    assert given.policy.config.trained_temperature == 0.0
    assert set(given.policy.config.candidates or ()) <= {2, 3}


def test_nothing_to_fit_on_is_refused() -> None:
    short = random_texts(1, 2, N_LAYERS, seed=0)
    with pytest.raises(ValueError, match="no trace decides anything"):
        fit_thresholds([])
    with pytest.raises(ValueError, match="quantiles and sweeps must be at least 1, got 0 and 4"):
        fit_thresholds(short, quantiles=0)
    with pytest.raises(ValueError, match="cost model is of 3 layers, the traces of 6"):
        fit_thresholds(short, costs=layer_costs(3))
    with pytest.raises(ValueError, match=r"candidates \[6\] must be"):
        fit_thresholds(short, (6,))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_fit_from_prompts_alone(temperature: float) -> None:
    model, prompts = tiny_model("llama"), [prompt(seed, 5 + seed) for seed in range(3)]
    fitted = fit_thresholds_on(model, prompts, 16, temperature, seed=2, costs=COSTS, quantiles=3, sweeps=1)
    assert fitted.policy.bound
    assert set(fitted.policy.config.candidates or ()) <= {1, 2, 3}
    assert fitted.policy.config.trained_temperature == temperature
    assert fitted.collecting_seconds > 0
    again = fit_thresholds_on(model, prompts, 16, temperature, seed=2, costs=COSTS, quantiles=3, sweeps=1)
    assert (again.policy.config, again.score) == (fitted.policy.config, fitted.score)
    if temperature == 0:
        out = generate(model, input_ids=prompts[0], policy=fitted.policy, max_new_tokens=16)
        assert out.sequences[0, 5:].tolist() == plain_generate(model, prompts[0], 16)


def test_fit_from_prompts_measures_costs_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    asked: list[object] = []

    def measured(*args: object) -> CostProfile:
        asked.extend(args)
        return a_profile()

    monkeypatch.setattr("lede.profiling.measured_profile", measured)
    fitted = fit_thresholds_on(model, [prompt(0, 5)], 12, candidates="all", quantiles=2, sweeps=1)
    assert asked == [model, (128,), (1, 2, 3, 4, 5), 3]  # 256 positions have no room for more
    assert fitted.policy.profile == a_profile()
    assert fitted.unit == "tokens/s"
