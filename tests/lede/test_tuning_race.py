"""Choosing among settings: which are tried, on how many prompts, and what the budget asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lede.tuning_log import TuningDecode
from lede.tuning_race import Axis, Race, Setting, Space, first_rung, halving_evaluations

GRID = Space(
    (
        Axis("layer", tuple(range(1, 16)), (2, 4, 6, 8, 12)),
        Axis("length", (1, 2, 3, 4, 5, 6, 7, 8, 10, 12), (2, 4, 8)),
    )
)


def at(layer: int, length: int) -> Setting:
    return ("layer", layer), ("length", length)


class Course:
    """Settings whose speed over plain decoding is known."""

    def __init__(self, speed: Callable[[dict[str, int], int], float]) -> None:
        self.speed = speed
        self.made: list[tuple[Setting, int, int]] = []

    def __call__(self, settings: Sequence[Setting], prompt: int, repeat: int) -> list[TuningDecode]:
        self.made += [(setting, prompt, repeat) for setting in settings]
        found = []
        for setting in settings:
            speed = self.speed({key: int(value) for key, value in setting}, prompt)
            error = "out of memory" if speed == 0 else None
            seconds = 0.0 if error else 10 / (100 * speed)
            found.append(TuningDecode(str(setting), prompt, repeat, 10, seconds, 10, 0.1, error))
        return found


def hill(setting: dict[str, int], prompt: int) -> float:
    """Fastest at layer 5 with 6 tokens."""
    return 2 - 0.05 * abs(setting["layer"] - 5) - 0.02 * abs(setting["length"] - 6)


def test_the_top_of_a_hill_is_found_though_it_is_on_no_coarse_point() -> None:
    course = Course(hill)
    race = Race(GRID, 8, course)
    assert at(5, 6) not in GRID.coarse
    assert race.run() == at(5, 6)
    assert race.ranking()[0] == at(5, 6)
    assert race.speedup(at(5, 6)) == pytest.approx(2.0)
    assert race.n_evaluations == len(course.made) == len(set(course.made))
    assert len(course.made) < len(GRID.everything) * 8 / 3  # it is affordable
    assert {prompt for setting, prompt, _ in course.made if setting == at(5, 6)} == set(range(8))
    assert {prompt for setting, prompt, _ in course.made if setting == at(12, 2)} == {0, 1}  # put aside early


def test_halving_is_counted_by_hand() -> None:
    """15 settings on 2 prompts, 8 on 4, 4 on 8: 30 + 16 + 16."""
    assert halving_evaluations(15, 8, 2) == 62
    assert halving_evaluations(15, 8, 8) == 120
    assert halving_evaluations(3, 1, 1) == 3
    assert first_rung(15, 8, 0) == 2
    assert first_rung(15, 8, 63) == 3
    assert first_rung(15, 8, 10_000) == 8
    assert first_rung(15, 1, 0) == 1
    course = Course(hill)
    best = Race(GRID, 8, course)._halve(GRID.coarse)
    assert (best, len(course.made)) == (at(4, 4), 62) or (best, len(course.made)) == (at(6, 4), 62)


@pytest.mark.parametrize("budget", [1, 63, 200, 400, 1500])
def test_the_budget_is_spent_to_the_last_decode_that_it_asks_for(budget: int) -> None:
    course = Course(hill)
    race = Race(GRID, 8, course, budget)
    assert race.run() == at(5, 6)
    assert len(course.made) == race.n_evaluations >= budget
    assert len(set(course.made)) == len(course.made)  # a decode that is made again is another repetition
    most = max(repeat for _, _, repeat in course.made)
    assert (most > 0) == (budget > len(GRID.everything) * 8)


def test_a_larger_budget_leaves_a_local_top() -> None:
    """Two hills: the coarse points lead to the lower one, looking further finds the higher."""

    def two_hills(setting: dict[str, int], prompt: int) -> float:
        return 3.0 if setting == {"layer": 14, "length": 12} else hill(setting, prompt)

    assert Race(GRID, 4, Course(two_hills)).run() == at(5, 6)
    assert Race(GRID, 4, Course(two_hills), budget=600).run() == at(14, 12)


def test_speeds_are_ratios_of_sums_over_prompts_that_tell() -> None:
    def evaluate(settings: Sequence[Setting], prompt: int, repeat: int) -> list[TuningDecode]:
        seconds = (1.0, 3.0, 5.0)[prompt]
        tokens = (10, 10, 0)[prompt]  # the last prompt was answered by one token
        plain = (1.0, 6.0, 10.0)[prompt]
        return [TuningDecode("s", prompt, repeat, tokens, seconds, tokens, plain) for _ in settings]

    race = Race(Space((Axis("a", (1, 2), (1, 2)),)), 3, evaluate)
    race.run()
    setting = (("a", 1),)
    assert race.speedup(setting) == pytest.approx((20 / 4) / (20 / 7))
    assert race.speedup(setting, n_prompts=1) == pytest.approx(1.0)


def test_a_setting_that_fails_is_never_chosen() -> None:
    def speed(setting: dict[str, int], prompt: int) -> float:
        return 0.0 if setting["layer"] == 5 and prompt == 3 else hill(setting, prompt)

    assert Race(GRID, 8, Course(speed)).run() != at(5, 6)


def test_one_setting_needs_no_decode() -> None:
    course = Course(hill)
    alone = Space((Axis("layer", (4,), (4,)),))
    assert Race(alone, 8, course, budget=100).run() == (("layer", 4),)
    assert course.made == []
    with pytest.raises(ValueError, match="no validation prompt"):
        Race(alone, 0, course)


def test_neighbours_reach_both_ways_and_stop_at_the_ends() -> None:
    assert GRID.reach == 2
    around = GRID.neighbours(at(4, 4), 2)
    assert len(around) == 8
    assert at(4, 4) not in around
    assert {at(2, 2), at(6, 6), at(4, 6)} <= set(around)
    assert set(GRID.neighbours(at(1, 12), 2)) == {at(3, 12), at(1, 8), at(3, 8)}
    assert GRID.distance(at(1, 12), at(3, 8)) == 4
