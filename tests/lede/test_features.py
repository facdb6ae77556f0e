"""The state, on worked values and as properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lede.features import (
    CALIBRATED,
    CALIBRATED_FEATURES,
    DEFAULT_FEATURES,
    FEATURES,
    MEMORY_FEATURES,
    PRE_SCAN,
    TEXT_FEATURES,
    WALL_CLOCK_FEATURES,
    ConfidenceTrace,
    FeatureConfig,
    default_candidates,
    parse_candidates,
    primitives,
)
from lede.rewards import RewardConfig, break_even


def test_primitives_of_a_known_distribution() -> None:
    p = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    read = primitives(p.log(), top_k=3)
    assert read.confidence.item() == pytest.approx(math.log(2) * (1 + 2 + 3) / 3)
    assert read.entropy.item() == pytest.approx(1.75 * math.log(2))
    assert read.top1.item() == pytest.approx(-math.log(2))
    assert read.top2.item() == pytest.approx(-2 * math.log(2))
    assert read.token.item() == 0
    assert read.confidence.dtype == torch.float32


def test_a_peaked_distribution_has_a_large_confidence() -> None:
    flat, peaked = torch.zeros(100), torch.zeros(100)
    peaked[7] = 30.0
    assert primitives(peaked).confidence > 5 * primitives(flat).confidence
    assert primitives(peaked).entropy < 1e-6


def test_banned_tokens_and_tiny_vocabularies_are_finite() -> None:
    read = primitives(torch.tensor([1.0, -float("inf"), 0.0]), top_k=2)
    assert all(torch.isfinite(value) for value in (read.confidence, read.entropy, read.top1, read.top2))
    assert torch.isfinite(primitives(torch.tensor([0.3]), top_k=5).confidence)


def test_ties_take_the_lowest_id() -> None:
    assert primitives(torch.tensor([0.0, 2.0, 2.0])).token.item() == 1


@given(
    st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=30),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_observations_stay_inside_the_bounds(logits: list[float], dtype: torch.dtype) -> None:
    config = FeatureConfig()
    read = primitives(torch.tensor(logits).to(dtype))
    values = {"confidence": float(read.confidence), "entropy": float(read.entropy), "trace": 1e9, "depth": 3 / 12}
    seen = config.observe(values, 12, len(logits))
    low, high = config.bounds(12, len(logits))
    assert seen.dtype == np.float32
    assert (low <= seen).all()
    assert (seen <= high).all()


def test_observation_is_in_the_order_of_the_names() -> None:
    config = FeatureConfig(("depth", "entropy"))
    seen = config.observe({"confidence": 1.0, "entropy": [0.5, 0.25], "depth": [0.25, 0.5]}, 12, 100)
    np.testing.assert_allclose(seen, [[0.25, 0.5], [0.5, 0.25]])


@pytest.mark.parametrize("names", [(), ("confidence", "confidence"), ("hidden",)])
def test_odd_features_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="distinct names"):
        FeatureConfig(names)


def test_missing_features_are_masked_and_others_give_the_shape_alone() -> None:
    config = FeatureConfig(("trace", "survival", "agreement"))
    seen = config.observe({"trace": 1.0, "entropy": np.ones((2, 3)), "agreement": [1.0, -1.0, -9.0]}, 12, 100)
    assert seen.shape == (2, 3, 3)
    np.testing.assert_array_equal(seen[0], [[1, 0, 1], [1, 0, -1], [1, 0, -1]])
    assert FeatureConfig(("depth",)).observe({}, 12, 100).tolist() == [0.0]
    with pytest.raises(ValueError, match=r"values \['layer'\] belong to no feature"):
        config.observe({"layer": 3}, 12, 100)


def test_the_registry() -> None:
    by_layers = set(DEFAULT_FEATURES) | set(CALIBRATED_FEATURES) | set(TEXT_FEATURES)
    assert by_layers.isdisjoint(MEMORY_FEATURES)
    assert by_layers | set(MEMORY_FEATURES) == set(FEATURES)
    assert set(CALIBRATED_FEATURES) - set(WALL_CLOCK_FEATURES) == set(CALIBRATED)
    before = {name for name, feature in FEATURES.items() if PRE_SCAN in feature.stages}
    assert before == {"trace", "acceptance", "since_draft", *MEMORY_FEATURES}
    assert [name for name, feature in FEATURES.items() if feature.draft_head_reads] == ["agreement"]
    low, high = FeatureConfig(tuple(FEATURES)).bounds(12, 100)
    assert (low <= 0).all()  # what a stage does not define is 0
    assert (high >= 1).all()
    low[:] = 5
    assert FeatureConfig(tuple(FEATURES)).bounds(12, 100)[0].max() == 0


def test_a_second_head_read_needs_a_feature_that_it_pays_for() -> None:
    assert FeatureConfig(("agreement",), draft_agreement=True).draft_head_reads == 2
    assert FeatureConfig(("agreement",)).draft_head_reads == 1
    with pytest.raises(ValueError, match="draft_agreement pays for the feature 'agreement'"):
        FeatureConfig(draft_agreement=True)


def test_token_level_processes_refuse_what_they_do_not_define() -> None:
    FeatureConfig(TEXT_FEATURES).check_token_level("playback")
    with pytest.raises(ValueError, match="playback decides token by token and does not define drafted, in_scan; leave"):
        FeatureConfig(("trace", "drafted", "in_scan")).check_token_level("playback")


@given(st.lists(st.one_of(st.floats(0, 9), st.integers(-3, -1)), max_size=40), st.integers(1, 9))
def test_trace_is_the_mean_of_the_last_positions(moves: list[float], window: int) -> None:
    """Pushes and drops in any order, against a plain list."""
    trace, kept = ConfidenceTrace(anchor=4.5, window=window), list[float]()
    for move in moves:
        if move < 0:
            n = min(len(kept), -int(move))
            trace.drop(n)
            kept = kept[: len(kept) - n]
        else:
            trace.push(move)
            kept.append(move)
        wanted = float(np.mean(kept[-window:])) if kept else 4.5
        assert trace.value() == pytest.approx(wanted)


def test_candidates() -> None:
    assert default_candidates(32) == (4, 8, 12, 16)
    assert default_candidates(16) == (2, 4, 6, 8)
    assert default_candidates(2) == (1,)
    assert default_candidates(3) == (1,)
    assert parse_candidates("all", 4) == (1, 2, 3)
    assert parse_candidates("2,5", 6) == (2, 5)
    for bad in ("0,1", "3,2", "2,2", "6", "x", ""):
        with pytest.raises(ValueError, match="candidates"):
            parse_candidates(bad, 6)
    with pytest.raises(ValueError, match="at least 2 layers"):
        parse_candidates(None, 1)


def test_rewards_of_the_paper() -> None:
    reward = RewardConfig()
    assert reward.exit(8, 32, 1) == pytest.approx(1.75)
    assert reward.exit(8, 32, 0) == pytest.approx(-1.25)
    assert reward.going_on(False) == pytest.approx(-0.01)
    assert RewardConfig(final_reward=1).going_on(True) == pytest.approx(0.99)
    assert float(reward.exit(8, 32, break_even(8, 32))) == pytest.approx(0, abs=1e-6)
    assert break_even(7, 32) == pytest.approx(0.41, abs=0.005)


def test_default_features() -> None:
    assert DEFAULT_FEATURES == ("confidence", "entropy", "trace", "depth")
