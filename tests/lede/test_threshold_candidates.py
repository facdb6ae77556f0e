"""Thresholds fitted for several sets of candidates."""

from __future__ import annotations

import numpy as np
import pytest

from lede.policies import ThresholdPolicy, parse_policy
from lede.threshold_candidates import FITS, fit_candidates, fit_sets, threshold_text
from lede.threshold_fit import layer_costs
from lede.tuning import Tuner
from tests.matched_texts import random_texts
from tests.tiny_models import N_LAYERS, prompt, tiny_model

SHARES = (0.05, 0.9, 0.1, 0.1, 0.1, 1.0)
"""How often the layers of the made-up model are right: drafts come from layer 2 or not at all."""


def test_the_layer_that_is_right_is_found_from_every_set_that_holds_it() -> None:
    traces = random_texts(6, 20, N_LAYERS, seed=1, shares=SHARES)
    fits = fit_sets(traces, (1, 2, 3), (2, 3), layer_costs(N_LAYERS, 0.5))
    assert len(fits) == 5  # all, default, and three single layers
    assert [fit.policy.config.candidates for fit in fits[:3]] == [(2,)] * 3
    assert {fit.policy.config.candidates for fit in fits[3:]} == {(1,), (3,)}
    assert [fit.score for fit in fits] == sorted((fit.score for fit in fits), reverse=True)
    assert fits[0].speedup > 1.2
    assert len({threshold_text(fit) for fit in fits}) == 3


def test_a_fit_reads_back_from_its_text() -> None:
    traces = random_texts(4, 20, N_LAYERS, seed=2, shares=np.linspace(0.4, 0.9, N_LAYERS))
    model = tiny_model("llama")
    for fit in fit_sets(traces, (1, 2, 3), (1, 2), layer_costs(N_LAYERS)):
        policy = parse_policy(threshold_text(fit))
        assert isinstance(policy, ThresholdPolicy)
        policy.check_model(model)
        fit.policy.check_model(model)
        assert (policy.config.candidates, policy._limits) == (fit.policy.config.candidates, fit.policy._limits)
        assert policy.config.draft_threshold == fit.policy.config.draft_threshold


@pytest.mark.slow
def test_threshold_by_name_is_fitted_and_raced_on_a_real_model() -> None:
    model, prompts = tiny_model("llama"), [prompt(n, 6) for n in range(3)]
    found = fit_candidates(model, prompts, 16)
    assert 1 < len(found.texts) <= FITS
    assert found.evaluations % 3 == 0
    tuned = Tuner(model, prompts, 16, budget=found.evaluations).tune("threshold")
    assert isinstance(tuned.policy, ThresholdPolicy)
    assert tuned.cost.evaluations >= found.evaluations
    assert "played on traces" in tuned.cost.note
    assert tuned.cost.collecting_seconds > 0
