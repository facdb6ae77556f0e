"""Choosing among settings by measured speed, with decodes that are worth their price: the tuning of `lede.tuning`.

Many settings are measured on few prompts and the better half goes on to more of them; then the neighbours of the best
one are tried, ever closer. A budget of decodes may ask for more than that, never for less.

Source: successive halving, Z. Karnin, T. Koren and O. Somekh, Almost Optimal Exploration in Multi-Armed Bandits, 2013.
Departs from it: decodes of earlier rungs are kept, and settings are compared on prompts that both have seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lede.tuning_log import TuningDecode

Value = int | float | str | bool
Setting = tuple[tuple[str, Value], ...]
"""Keys and values, in the order of the axes."""
Evaluate = Callable[[Sequence[Setting], int, int], Sequence[TuningDecode]]
"""Decodes a prompt, in a repetition, with each of the settings."""

FINALISTS = 4
"""Settings that are measured again where everything else is done and the budget is not."""
WIDTH = 8
"""Settings that are tried at a time where the budget allows to look further."""
MOST_STEPS = 12
"""Most moves to a better neighbour."""


@dataclass(frozen=True)
class Axis:
    """The values of one key."""

    key: str
    """Name of the setting."""
    values: tuple[Value, ...]
    """All that may be tried, neighbours side by side."""
    coarse: tuple[Value, ...]
    """Those that are tried first."""


@dataclass(frozen=True)
class Space:
    """What may be tried: every combination of the values of its axes."""

    axes: tuple[Axis, ...]
    """The keys."""

    @property
    def coarse(self) -> list[Setting]:
        """The settings that are tried first, in order."""
        return self._product([axis.coarse for axis in self.axes])

    @property
    def everything(self) -> list[Setting]:
        """All settings, in order."""
        return self._product([axis.values for axis in self.axes])

    @property
    def reach(self) -> int:
        """Half of the widest gap between two coarse values: how far the first neighbours are."""
        gaps = [1]
        for axis in self.axes:
            places = sorted(axis.values.index(value) for value in axis.coarse)
            gaps += [b - a for a, b in itertools.pairwise(places)]
        return max(1, max(gaps) // 2)

    def neighbours(self, setting: Setting, reach: int) -> list[Setting]:
        """Settings up to `reach` steps away along each axis: at that distance, or in between where an end is near."""
        around: list[list[Value]] = []
        for axis, (_, value) in zip(self.axes, setting, strict=True):
            place, last = axis.values.index(value), len(axis.values) - 1
            near = {max(place - reach, 0), place, min(place + reach, last)}
            around.append([axis.values[i] for i in sorted(near)])
        return [other for other in self._product(around) if other != setting]

    def distance(self, a: Setting, b: Setting) -> int:
        """Steps between two settings, over all axes."""
        return sum(
            abs(axis.values.index(x) - axis.values.index(y))
            for axis, (_, x), (_, y) in zip(self.axes, a, b, strict=True)
        )

    def _product(self, values: Sequence[Sequence[Value]]) -> list[Setting]:
        keys = [axis.key for axis in self.axes]
        return [tuple(zip(keys, combination, strict=True)) for combination in itertools.product(*values)]


class Race:
    """Measures settings until the best is found and the budget is spent.

    Args:
        space: What may be tried.
        n_prompts: Validation prompts.
        evaluate: Decodes one prompt with some settings, plain decoding among them.
        budget: Decodes, one a setting and prompt, that shall be made at least; the race may need more. It is not
            reached where there is only one setting.
    """

    def __init__(self, space: Space, n_prompts: int, evaluate: Evaluate, budget: int = 0) -> None:
        if n_prompts < 1:
            raise ValueError("there is no validation prompt to tune on")
        self.space, self.n_prompts, self.budget = space, n_prompts, budget
        self.n_evaluations = 0
        self._evaluate = evaluate
        self._made: dict[Setting, dict[tuple[int, int], TuningDecode]] = {}  # by prompt and repetition
        self._turn = 0
        self._first = first_rung(len(space.coarse), n_prompts, budget)

    def run(self) -> Setting:
        """The fastest setting."""
        if len(self.space.everything) == 1:
            return self.space.everything[0]
        best = self._halve(self.space.coarse)
        best = self._approach(best, self.space.reach)
        while self.n_evaluations < self.budget:  # look further
            unseen = [setting for setting in self.space.everything if setting not in self._made]
            if not unseen:
                break
            unseen.sort(key=lambda setting: self.space.distance(setting, best))
            found = self._halve([best, *unseen[:WIDTH]])
            best = found if found == best else self._approach(found, 1)
        for setting in self.ranking():  # measure those again that were put aside
            if self.n_evaluations >= self.budget:
                break
            self._cover([setting], self.n_prompts)
        finalists = self.ranking()[:FINALISTS]
        for repeat in itertools.count(1):
            if self.n_evaluations >= self.budget:
                break
            for prompt in range(self.n_prompts):
                self._measure(finalists, prompt, repeat)
        return self.ranking()[0]

    def ranking(self) -> list[Setting]:
        """Settings from the best to the worst; those measured on all prompts come before the others."""
        return sorted(self._made, key=lambda setting: (-self.seen(setting), -self.speedup(setting)))

    def seen(self, setting: Setting) -> int:
        """Prompts that a setting was measured on."""
        return len({prompt for prompt, _ in self._made[setting]})

    def speedup(self, setting: Setting, n_prompts: int | None = None) -> float:
        """Tokens a second over plain decoding's, sums over the first prompts (None: all that it has seen).

        0 where a decode failed, or where no prompt tells anything.
        """
        made = [d for d in self._made[setting].values() if n_prompts is None or d.prompt < n_prompts]
        telling = [d for d in made if d.tells]
        if not telling or any(d.error is not None for d in made):
            return 0.0
        rate = sum(d.tokens for d in telling) / sum(d.seconds for d in telling)
        plain = sum(d.plain_tokens for d in telling) / sum(d.plain_seconds for d in telling)
        return rate / plain

    def _halve(self, settings: Sequence[Setting]) -> Setting:
        """The best of these: half of them go on to twice as many prompts."""
        alive, n = list(settings), self._first
        while True:
            self._cover(alive, n)
            alive.sort(key=lambda setting: -self.speedup(setting, n))  # stable: the earlier of equals stays ahead
            if n == self.n_prompts:
                return alive[0]
            alive = alive[: math.ceil(len(alive) / 2)]
            n = min(2 * n, self.n_prompts)

    def _approach(self, best: Setting, reach: int) -> Setting:
        """Move to better neighbours, first far ones, in the end the next ones."""
        for _ in range(MOST_STEPS):
            new = [setting for setting in self.space.neighbours(best, reach) if setting not in self._made]
            found = self._halve([best, *new]) if new else best
            if found == best and reach == 1:
                return best
            best, reach = found, max(1, reach // 2)
        return best

    def _cover(self, settings: Sequence[Setting], n_prompts: int) -> None:
        """Measure settings on the first prompts, where they have not been."""
        for prompt in range(n_prompts):
            waiting = [setting for setting in settings if (prompt, 0) not in self._made.get(setting, {})]
            self._measure(waiting, prompt, 0)

    def _measure(self, settings: Sequence[Setting], prompt: int, repeat: int) -> None:
        if not settings:
            return
        first = self._turn % len(settings)
        turned = [*settings[first:], *settings[:first]]
        self._turn += 1
        for setting, made in zip(turned, self._evaluate(turned, prompt, repeat), strict=True):
            self._made.setdefault(setting, {})[prompt, repeat] = made
            self.n_evaluations += 1


def first_rung(n_settings: int, n_prompts: int, budget: int) -> int:
    """Prompts that every setting is measured on: 2 as a rule, more where the budget is not spent by that."""
    rungs = range(min(2, n_prompts), n_prompts + 1)
    return next((n for n in rungs if halving_evaluations(n_settings, n_prompts, n) >= budget), n_prompts)


def halving_evaluations(n_settings: int, n_prompts: int, first: int) -> int:
    """Decodes of one race by halving that begins with `first` prompts."""
    total, alive, n, seen = 0, n_settings, first, 0
    while True:
        total += alive * (n - seen)
        if n == n_prompts:
            return total
        alive, seen, n = math.ceil(alive / 2), n, min(2 * n, n_prompts)
