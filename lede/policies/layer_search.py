"""The search of ConfLayers: select layers, decode with them for an interval, keep the best set.

An iteration is one selection (`lede.layer_confidence`) and the rounds that draft with it. Its numbers are those of
rounds that drafted: accepted tokens a round, and the share of drafted tokens that were accepted, averaged over rounds.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lede.layer_confidence import adapt_strength, fewest_layers, first_layers, select_layers
from lede.policies.base import RoundReport
from lede.policies.skip_search import SearchStep, SkipSearch, plan_of, step_of

if TYPE_CHECKING:
    from lede.policies.conflayers import ConfLayersConfig
    from lede.text_probe import TextProbe

ENOUGH_ACCEPTED = 4
"""Accepted tokens a round above which the authors' code may end its search."""
TOO_FEW_ACCEPTED = 1
"""Accepted tokens a round below which a set is given up halfway."""


class LayerSearch(SkipSearch):
    """Selects a set at the start of every text and after every interval, until the search ends.

    - A set of fewer than K layers is not tried; the next round selects again, with lambda adapted.
    - After `interval // 2` rounds with fewer than one accepted token each, a set is given up.
    - After `interval` rounds the set is scored, and is the best one if more tokens a round were accepted than ever.
    - A text that ends cuts an iteration short; its set is not scored.
    - Confidences that are no numbers end the search: there is nothing to select by, and the best set so far stays.

    Attributes:
        strength: lambda.
        best_accepted: Accepted tokens a round of the best set.
    """

    def __init__(self, config: ConfLayersConfig, n_layers: int) -> None:
        layers = first_layers(n_layers)
        super().__init__(n_layers, plan_of(layers, layers))
        self.config = config
        self.fewest = fewest_layers(n_layers, config.skip_ratio)
        self.strength = 0.0
        self.best_accepted = 0.0
        self._due = True  # a selection, as soon as the text is long enough
        self._accepted: list[int] = []  # by round of the running iteration
        self._drafted: list[int] = []
        self._seconds = 0.0

    def begin(self) -> None:
        """Select anew in this text."""
        if not self._due:
            self._finish("cut short by the end of the text")

    def verified(self, report: RoundReport) -> None:
        """Count the round, and judge the set when its time has come."""
        if self.ended or self._due or not report.drafted:
            return
        self._accepted.append(report.accepted)
        self._drafted.append(report.drafted)
        n, interval = len(self._accepted), self.config.interval
        if n < interval:
            if n == interval // 2 and self._mean_accepted() < TOO_FEW_ACCEPTED:
                self._finish("given up halfway")
            return
        accepted, better = self._mean_accepted(), self._mean_accepted() > self.best_accepted
        reached = self._score() > self.config.max_score
        if self.config.stop == "authors-code":
            reached = reached and accepted > ENOUGH_ACCEPTED
            better = better or reached  # the set that ends the search is the one that stays
        if better:
            self.best, self.best_accepted = self.plan, accepted
        self._finish("scored", kept=better, end="score reached" if reached else None)

    def between_rounds(self, probe: TextProbe) -> None:
        """Select a set, if one is due and the text has more than W + 1 new tokens."""
        config = self.config
        if self.ended or not self._due or probe.n_new <= config.context_window + 1:
            return
        since = time.perf_counter()
        n_tokens = config.context_window
        if config.confidence == "head":  # the others are in the cache: running them would change nothing
            n_tokens = min(n_tokens, config.probe_tokens)
        confidence = probe.sublayer_confidence(n_tokens, config.confidence)
        if not np.isfinite(confidence).all():
            self._end_without_confidence(since)
            return
        window = None if config.window == "adaptive" else config.window
        layers = select_layers(confidence, self.strength, window, config.cap_window)
        self.strength = adapt_strength(self.strength, len(layers), self.n_layers, config.skip_ratio)
        self.plan = plan_of(layers, layers)
        self.iterations += 1
        self._seconds = time.perf_counter() - since
        self._due = False
        if len(layers) < self.fewest:
            self._finish("too few layers")

    def report(self) -> list[SearchStep]:
        """A record of every iteration so far, the running one included."""
        if self._due or self.ended:
            return super().report()
        running = step_of(self.iterations, self.plan, "running", **self._measured())
        return [*super().report(), running]

    def state(self) -> dict[str, Any]:
        """All of it, as plain JSON values."""
        return {
            **super().state(),
            "strength": self.strength,
            "best_accepted": self.best_accepted,
            "due": self._due,
            "accepted": list(self._accepted),
            "drafted": list(self._drafted),
            "seconds": self._seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned.

        Raises:
            KeyError: A part is missing.
            TypeError: A part is of another type.
            ValueError: A part has no sensible value.
        """
        super().restore(state)
        self.strength = float(state["strength"])
        self.best_accepted = float(state["best_accepted"])
        self._due = bool(state["due"])
        self._accepted = [int(n) for n in state["accepted"]]
        self._drafted = [int(n) for n in state["drafted"]]
        self._seconds = float(state["seconds"])

    def _end_without_confidence(self, since: float) -> None:
        """End the search with an iteration that could select nothing; the text goes on."""
        self.plan = None
        self.iterations += 1
        self._seconds = time.perf_counter() - since
        self._finish("no set", end="confidence is no number")

    def _finish(self, note: str, kept: bool = False, end: str | None = None) -> None:
        """End the iteration, and with it the search where that was the last one."""
        self.record(self.plan, note, kept=kept, **self._measured())
        self._accepted, self._drafted, self._seconds, self._due = [], [], 0.0, True
        if end is None and self.iterations >= self.config.max_iterations:
            end = "iterations used up"
        if end is not None:
            self.ended = True
            self.plan = self.best
            self.steps[-1] = replace(self.steps[-1], note=f"{note}; {end}")

    def _mean_accepted(self) -> float:
        return sum(self._accepted) / len(self._accepted)

    def _score(self) -> float:
        return sum(a / n for a, n in zip(self._accepted, self._drafted, strict=True)) / len(self._accepted)

    def _measured(self) -> dict[str, Any]:
        """What the running iteration came to so far."""
        if not self._accepted:
            return {"seconds": self._seconds}
        return {"seconds": self._seconds, "score": self._score(), "mean_accepted": self._mean_accepted()}
