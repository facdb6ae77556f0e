"""Bootstrap intervals: worked cases, and coverage under a law that is known."""

from __future__ import annotations

import numpy as np
import pytest

from lede.intervals import Bootstrap


def test_the_figure_is_the_ratio_of_the_sums() -> None:
    found = Bootstrap(3).ratio([2, 4, 6], [1, 1, 4])
    assert found is not None
    assert found.value == 12 / 6
    assert 1.5 <= found.lower < 2 < found.upper <= 4  # from the third prompt alone to the second alone


def test_equal_ratios_leave_no_doubt() -> None:
    found = Bootstrap(4).ratio([2, 4, 6, 200], [1, 2, 3, 100])
    assert found is not None
    assert (found.value, found.lower, found.upper) == (2, 2, 2)


def test_one_prompt_is_all_that_is_known() -> None:
    found = Bootstrap(1).ratio([3], [4])
    assert found is not None
    assert (found.value, found.lower, found.upper) == (0.75, 0.75, 0.75)


def test_pairs_of_prompts_stay_together() -> None:
    """Prompts differ by a factor of 30, the second policy is twice as fast on each of them."""
    rng = np.random.default_rng(0)
    tokens, seconds = rng.uniform(50, 100, 40), rng.uniform(1, 30, 40)
    boot = Bootstrap(40)
    found = boot.speedup(tokens, seconds, tokens, 2 * seconds)
    assert (found.value, found.lower, found.upper) == pytest.approx((2, 2, 2))
    rate = boot.ratio(tokens, seconds)
    assert rate is not None
    assert rate.upper / rate.lower > 1.2


def test_the_speedup_is_a_ratio_of_rates() -> None:
    found = Bootstrap(2).speedup([10, 30], [1, 1], [5, 15], [2, 2])
    assert found.value == pytest.approx((40 / 2) / (20 / 4))
    assert (found.lower, found.upper) == pytest.approx((4, 4))


def test_a_ratio_of_products_of_sums() -> None:
    found = Bootstrap(3).products(([2, 4, 6], [3, 3, 3], [1, 2, 3]), ([1, 2, 3],))
    assert found.value == pytest.approx(12 * 9 * 6 / 6)
    assert found.lower < found.value < found.upper
    assert Bootstrap(3).products(([2, 4, 6],), ([1, 2, 3],)).upper == pytest.approx(2)


def test_the_seed_decides() -> None:
    rng = np.random.default_rng(0)
    top, bottom = rng.exponential(1, 30), rng.exponential(1, 30)
    first, again, other = (Bootstrap(30, 200, seed).ratio(top, bottom) for seed in (0, 0, 1))
    assert first == again != other


def test_nothing_to_divide_by() -> None:
    assert Bootstrap(3).ratio([0, 0, 0], [0, 0, 0]) is None


def test_prompts_that_count_nothing_may_be_drawn_alone() -> None:
    found = Bootstrap(3, 500).ratio([3, 0, 0], [4, 0, 0])
    assert found is not None
    assert (found.value, found.lower, found.upper) == (0.75, 0.75, 0.75)


def test_many_prompts_are_resampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    top, bottom = rng.exponential(1, 50), rng.exponential(1, 50)
    whole = Bootstrap(50, 101).ratio(top, bottom)
    monkeypatch.setattr("lede.intervals._CHUNK", 7 * 50)
    parts = Bootstrap(50, 101).ratio(top, bottom)
    assert whole is not None
    assert parts is not None
    assert (parts.lower, parts.upper) == pytest.approx((whole.lower, whole.upper))


def test_coverage_under_a_known_law() -> None:
    """Seconds are gamma distributed, tokens 3 a second with noise: intervals hold the true 3 about 95 times in 100."""
    rng = np.random.default_rng(1)
    held = 0
    for seed in range(300):
        seconds = rng.gamma(2.0, 1.0, 40)
        found = Bootstrap(40, 400, seed).ratio(3 * seconds * rng.uniform(0.5, 1.5, 40), seconds)
        assert found is not None
        held += found.lower <= 3 <= found.upper
    assert 0.90 <= held / 300 <= 0.98


@pytest.mark.parametrize("wrong", [{"n_prompts": 0}, {"n_resamples": 0}, {"level": 1.0}])
def test_useless_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="needs prompts, resamples and a level"):
        Bootstrap(**{"n_prompts": 3, **wrong})  # type: ignore[arg-type]
