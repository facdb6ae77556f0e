"""The arithmetic of ConfLayers against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from lede.layer_confidence import (
    adapt_strength,
    adaptive_windows,
    centred,
    fewest_layers,
    first_layers,
    layer_values,
    leading_ties,
    second_difference,
    select_layers,
    share_of,
    skipped_layers,
    standardise,
    thresholds,
)

# six layers; attention and MLP add up to 0, 2, 2, 0, 4, 4
CONFIDENCE = np.array([[0, 0], [1, 1], [0.5, 1.5], [0, 0], [1, 3], [2, 2]])
VALUES = np.array([0.0, 2, 2, 0, 4, 4])
# gradient: (2-0)/1, (2-0)/2, (0-2)/2, (4-2)/2, (4-0)/2, (4-4)/1 = 2, 1, -1, 1, 2, 0
# of it:    (1-2)/1, (-1-2)/2, (1-1)/2, (2+1)/2, (0-1)/2, (0-2)/1
G = np.array([-1, -1.5, 0, 1.5, -0.5, -2])
# min-max, range 3.5: 2/7, 1/7, 4/7, 1, 3/7, 0 = 12, 6, 24, 42, 18, 0 over 42, with mean 17/42
# widest map about the mean: 0.5 / (1 - 17/42) = 21/25, so 12/42 becomes 0.5 - 5/42 * 21/25 = 0.4 and so on
CENTRED = np.array([0.4, 0.28, 0.64, 1, 0.52, 0.16])
# one leading tie: alpha 5. 5 * 0.4 * 1/6 = 0.33, 5 * 0.28 * 2/6 = 0.47, 5 * 0.64 * 3/6 = 1.6, 5 * 1 * 4/6 = 3.33,
# 5 * 0.52 * 5/6 = 2.17, 5 * 0.16 * 6/6 = 0.8
WINDOWS = np.array([2, 2, 3, 5, 4, 2])


def test_values_and_z_scores() -> None:
    assert_allclose(layer_values(CONFIDENCE), VALUES)
    # mean 2, variance (4 + 0 + 0 + 4 + 4 + 4) / 6 = 8/3
    assert_allclose(standardise(VALUES), (VALUES - 2) / (np.sqrt(8 / 3) + 1e-6))
    assert_allclose(standardise(np.full(4, 0.7)), 0)
    assert standardise(np.array([0.5, 0.5 + 1e-9, 0.5]))[1] < 1e-2  # the 1e-6 keeps noise small


def test_second_difference_and_its_leading_ties() -> None:
    assert_allclose(second_difference(VALUES), G)
    assert leading_ties(G) == 1
    straight = np.array([0.0, 1, 2, 3, 4, 6, 3, 5])
    # gradient: 1, 1, 1, 1, 1.5, -0.5, -0.5, 2; of it: 0, 0, 0, 0.25, -0.75, ...
    assert leading_ties(second_difference(straight)) == 3
    noise = np.random.default_rng(0).normal(scale=1e-8, size=8)  # float32 rounding must not decide
    assert leading_ties(second_difference(straight + noise)) == 3
    assert leading_ties(second_difference(np.zeros(5))) == 5


def test_fluctuation_is_mapped_to_mean_one_half() -> None:
    assert_allclose(centred(G), CENTRED)
    # a mean above one half is bound by 0 instead: 1, 1, 1, 0 has mean 0.75, factor 0.5 / 0.75
    assert_allclose(centred(np.array([3.0, 3, 3, -1])), [2 / 3, 2 / 3, 2 / 3, 0])
    assert_allclose(centred(np.full(5, 2.0)), 0.5)


def test_windows_grow_with_depth_and_fluctuation() -> None:
    assert adaptive_windows(VALUES).tolist() == WINDOWS.tolist()
    # at most 6 // 3 = 2 for alpha: 2/5 of the growth above = 0.13, 0.19, 0.64, 1.33, 0.87, 0.32
    assert adaptive_windows(VALUES, capped=True).tolist() == [2, 2, 2, 3, 2, 2]
    # equal values: 4 ties, alpha 20, g 0.5: 20 * 0.5 * i / 4 = 2.5, 5, 7.5, 10
    assert adaptive_windows(np.zeros(4)).tolist() == [4, 7, 9, 12]


@pytest.mark.parametrize(
    ("strength", "limits"),
    [
        # half windows 1, 1, 1, 2, 2, 1. Layer 1 has the neighbour 2; layer 2 has 0, 2; layer 3 has 2, 0; layer 4 has
        # 2, 2, 4, 4; layer 5 has 2, 0, 4 (the window ends with the layers); layer 6 has 4
        (0.0, [2, 1, 1, 3, 2, 4]),
        # standard deviations 0, 1, 1, 1, sqrt(8/3), 0
        (0.5, [2, 0.5, 0.5, 2.5, 2 - 0.5 * np.sqrt(8 / 3), 4]),
        (-1.0, [2, 2, 2, 4, 2 + np.sqrt(8 / 3), 4]),
    ],
)
def test_thresholds_of_neighbours(strength: float, limits: list[float]) -> None:
    assert_allclose(thresholds(VALUES, WINDOWS, strength), limits)


def test_a_fixed_window_is_the_same_for_all() -> None:
    # half window 1: neighbours 2 | 0, 2 | 2, 0 | 2, 4 | 0, 4 | 4
    assert_allclose(thresholds(VALUES, 3, 0.0), [2, 1, 1, 3, 2, 4])
    # half window 5: all others, which add up to 12 less the value, over 5
    assert_allclose(thresholds(VALUES, 10, 0.0), (12 - VALUES) / 5)


@pytest.mark.parametrize(
    ("strength", "skipped"),
    [
        (0.0, {4}),  # 0 < 3; layer 1 (0 < 2) is never left out
        (-1.0, {4}),  # layers 2 and 3: 2 is not below 2; layer 5: 4 is not below 3.63
        (-1.5, {2, 3, 4, 5}),  # 2 < 2.5, 2 < 2.5, 0 < 4.5, 4 < 2 + 1.5 * 1.63 = 4.45
        (3.5, set()),  # 0 is not below 3 - 3.5
    ],
)
def test_layers_below_their_threshold_are_left_out(strength: float, skipped: set[int]) -> None:
    assert skipped_layers(VALUES, thresholds(VALUES, WINDOWS, strength)) == skipped
    assert select_layers(CONFIDENCE, strength) == skipped  # z-scores change nothing


def test_selection_with_a_fixed_window() -> None:
    # half window 5: 2 < 2 no, 2 < 2 no, 0 < 2.4 yes, 4 < 1.6 no
    assert select_layers(CONFIDENCE, 0.0, window=10) == {4}
    # half window 1, lambda -2: layer 5 has 0, 4: 4 < 2 + 2 * 2; layer 4 has 2, 4: 0 < 3 + 2; layers 2, 3: 2 < 1 + 2
    assert select_layers(CONFIDENCE, -2.0, window=2) == {2, 3, 4, 5}


def test_equal_confidence_leaves_nothing_out() -> None:
    assert select_layers(np.full((6, 2), 0.3), -5.0) == set()


def test_strength_follows_the_share_of_layers_left_out() -> None:
    # L = 12, so 10 layers; wanted 0.4, at least K = 5; too many above 0.65
    assert adapt_strength(0.1, 7, 12, 0.4) == pytest.approx(0.15)
    assert adapt_strength(0.1, 6, 12, 0.4) == 0.1
    assert adapt_strength(0.1, 5, 12, 0.4) == 0.1
    assert adapt_strength(0.1, 4, 12, 0.4) == pytest.approx(0.05)  # just the wanted share, but not tried
    assert adapt_strength(0.1, 3, 12, 0.4) == pytest.approx(0.05)
    # L = 32: 30 * 0.4 = 12, and K = 13; too many above 19.5
    found = [adapt_strength(0.1, n, 32, 0.4) for n in (12, 13, 19, 20)]
    assert found == pytest.approx([0.05, 0.1, 0.1, 0.15])


def test_sets_by_number_of_layers() -> None:
    assert first_layers(8) == {2, 4, 6}  # the papers' 1, 3, 5 of 0..7, 7 being the last
    assert first_layers(7) == {2, 4, 6}
    assert first_layers(3) == {2}
    assert [fewest_layers(n, 0.4) for n in (3, 6, 32, 40)] == [1, 2, 13, 16]  # 30 * 0.4 = 12, 38 * 0.4 = 15.2
    assert share_of(0.29, 100) == 29  # 28.999999999999996 in floating point


@pytest.mark.parametrize(
    ("confidence", "message"),
    [
        (np.zeros((2, 2)), r"\(layer, 2\) of at least 3 layers, got \(2, 2\)"),
        (np.zeros(6), r"got \(6,\)"),
        (np.array([[0, 0], [np.nan, 0], [0, np.inf]]), r"the confidence of layers \[2, 3\] is no number"),
    ],
)
def test_unusable_confidence_is_refused(confidence: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_layers(confidence, 0.0)
