"""The survival of a draft by hand, and the numbers of plans against the rounds that play them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lede.acceptance import AcceptanceModel
from lede.features import FeatureConfig
from lede.policies import ExitAt, Lookup, PreScan
from lede.policies.base import BLIND
from lede.policies.draft_survival import DraftSurvival, check_thresholds
from lede.policies.plan_numbers import numbered_plans
from lede.rewards import CONTINUE, EXIT

SCANNED, DRAFTED, BLINDLY = (0.9, 0.6), (0.8, 0.5), (0.7, 0.75)
"""Probabilities of acceptance at the layers 2 and 5, whatever is seen."""
SEEN = np.array([0.3], dtype=np.float32)


def odds(probabilities: tuple[float, ...]) -> list[float]:
    return [math.log(p / (1 - p)) for p in probabilities]


def draft(thresholds: tuple[float, ...] = (0.65,), survival: float = 0.5) -> DraftSurvival:
    weights = np.zeros((2, 2, 3))  # of the entropy, of its root, and the constant
    weights[0, :, -1], weights[1, :, -1] = odds(SCANNED), odds(DRAFTED)
    model = AcceptanceModel(FeatureConfig(("entropy",)), weights, odds(BLINDLY))
    return DraftSurvival(model, (2, 5), thresholds, survival)


def test_a_draft_survives_with_the_product_of_its_positions() -> None:
    held = draft()
    assert held.exits(2, SEEN)
    assert [held.goes_on(2, SEEN) for _ in range(3)] == [True, True, False]  # .72, .576, .461
    assert not held.exits(5, SEEN)
    assert not held.goes_on(5, SEEN)  # .6 * .5: the scan begins anew
    held.begin_blind(5)
    assert [held.goes_on(2, SEEN) for _ in range(2)] == [True, False]  # .75 * .8 = .6, .48
    held.reset()
    assert [held.goes_on(2, SEEN) for _ in range(4)] == [True, True, True, False]  # .8, .64, .512, .41


def test_each_candidate_may_have_a_threshold_and_above_1_none_exits() -> None:
    held = draft((0.95, 0.55))
    assert held.limits.tolist() == [0.95, 0.55]
    assert (held.exits(2, SEEN), held.exits(5, SEEN)) == (False, True)
    assert not draft((1.01,)).exits(2, SEEN)
    anything = draft((0.0,), survival=0.0)
    assert anything.exits(5, SEEN)
    assert all(anything.goes_on(5, SEEN) for _ in range(50))


def test_what_does_not_fit_is_refused() -> None:
    model = draft().model
    for candidates, given in ((None, "none are given"), ((2, 3, 5), r"they are \[2, 3, 5\]")):
        with pytest.raises(ValueError, match=f"the forecasts are for 2 candidates, but {given}"):
            DraftSurvival(model, candidates, (0.5,), 0.5)
    with pytest.raises(ValueError, match="3 thresholds for 2 candidates; give 1 or 2"):
        draft((0.1, 0.2, 0.3))
    with pytest.raises(ValueError, match=r"candidates \[5, 2\] must be ascending"):
        DraftSurvival(model, (5, 2), (0.5,), 0.5)
    for thresholds, survival in (((), 0.5), ((0.5, -0.1), 0.5), ((0.5,), -0.1)):
        with pytest.raises(ValueError, match="must not be negative, and there is at least one threshold"):
            check_thresholds(thresholds, survival)


def test_plans_have_the_numbers_of_their_actions() -> None:
    lookups = (Lookup(2), Lookup(8, prune_at=3))
    plans = numbered_plans((2, 5), lookups)
    assert (plans[CONTINUE], plans[EXIT]) == (PreScan.SKIP, PreScan.SCAN)
    assert plans[BLIND:] == (ExitAt(2), ExitAt(5), *lookups)
    assert numbered_plans((), lookups)[BLIND:] == lookups
