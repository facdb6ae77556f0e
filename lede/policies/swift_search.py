"""The search of SWIFT: propose a set, score it on the text so far, keep it if it is the best.

A proposal is a point of the box [0, 1]^(2(L-2)), one coordinate for the attention of each layer 2..L-1 and then one for
the MLP of each. The sublayers of its largest coordinates are left out, a fixed number of them. A random point thus
stands for a random set.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lede.layer_confidence import first_layers, share_of
from lede.policies.base import RoundReport, SkipSublayers
from lede.policies.skip_search import SkipSearch, plan_of
from lede.seeding import Purpose, numpy_stream

if TYPE_CHECKING:
    from lede.policies.swift import SwiftConfig
    from lede.text_probe import TextProbe

Point = npt.NDArray[np.float64]

NOISE = 1e-2
"""What the Gaussian process adds to the diagonal of its covariance."""
KAPPA = 2.5
"""Standard deviations above the mean that a Bayesian proposal hopes for."""
DIGITS = 4
"""Decimals of a point: enough to tell its coordinates apart, and a thousand points remain a small state."""
TRIED = 2048
"""Points among which a Bayesian proposal is the best (our choice)."""
CHANGED = 0.2
"""Probability of a new coordinate in those of them that resemble the best point so far (our choice)."""


class SwiftSearch(SkipSearch):
    """One proposal at most between two rounds, until a set is good enough or the search gives up.

    The set that scored best drafts; before the first, every second layer is left out, and it counts as score 0.

    Attributes:
        n_skipped: Sublayers that a proposal leaves out.
        best_score: Of the set that drafts.
        misses: Proposals since the best set.
    """

    def __init__(self, config: SwiftConfig, n_layers: int) -> None:
        layers = first_layers(n_layers)
        super().__init__(n_layers, plan_of(layers, layers))
        self.config = config
        self.n_skipped = share_of(config.skip_ratio, 2 * (n_layers - 2))
        if self.n_skipped < 1:
            raise ValueError(
                f"skip_ratio {config.skip_ratio} leaves out none of the {2 * (n_layers - 2)} sublayers of layers "
                f"2..{n_layers - 1}; raise it"
            )
        if 0 < config.bayes_interval <= config.max_iterations:
            _load_scikit_learn()
        self.best_score = 0.0
        self.misses = 0
        self._rounds = 0  # of this text
        self._points: list[list[float]] = []
        self._scores: list[float] = []
        self._stream = numpy_stream(config.seed, Purpose.POLICY)

    @property
    def kept(self) -> SkipSublayers | None:
        """The set that drafts, also where no proposal scored above 0."""
        return self.plan

    def begin(self) -> None:
        """Count the rounds of a new text."""
        self._rounds = 0

    def verified(self, report: RoundReport) -> None:
        """Count the round."""
        self._rounds += 1

    def between_rounds(self, probe: TextProbe) -> None:
        """Propose and score a set, where the text has more than W + 1 new tokens and it is its round's turn."""
        window = self.config.context_window
        if self.ended or probe.n_new <= window + 1 or self._rounds % self.config.opt_interval:
            return
        since = time.perf_counter()
        bayesian = self.proposes_bayesian
        point = self.bayesian_point() if bayesian else self._stream.random(2 * (self.n_layers - 2))
        point = point.round(DIGITS)
        plan = self.plan_at(point)
        self.take(point, plan, probe.matchness(plan, 0, window + 1), "bayesian" if bayesian else "random", since)

    @property
    def proposes_bayesian(self) -> bool:
        """Whether the next proposal is a Bayesian one; the first never is, there is nothing to learn from."""
        every = self.config.bayes_interval
        return every > 0 and bool(self._scores) and (self.iterations + 1) % every == 0

    def plan_at(self, point: Point) -> SkipSublayers:
        """The plan that leaves out the sublayers of the largest coordinates; of equal ones the first."""
        largest = np.argsort(-point, kind="stable")[: self.n_skipped]
        n = self.n_layers - 2
        return SkipSublayers(
            frozenset(int(i) + 2 for i in largest if i < n), frozenset(int(i) - n + 2 for i in largest if i >= n)
        )

    def take(self, point: Point, plan: SkipSublayers, score: float, note: str, since: float) -> None:
        """Register a scored proposal: keep it if it is better than the best, and end the search where that is due."""
        self.iterations += 1
        self._points.append(point.tolist())
        self._scores.append(float(score))
        kept = score > self.best_score
        if kept:
            self.plan = self.best = plan
            self.best_score, self.misses = float(score), 0
        else:
            self.misses += 1
        self.record(plan, note, score=float(score), seconds=time.perf_counter() - since, kept=kept)
        config, end = self.config, None
        if score > config.max_score:
            end = "score reached"
        elif self.misses > config.tolerance:
            end = "tolerance used up"
        elif self.iterations >= config.max_iterations:
            end = "iterations used up"
        if end is not None:
            self.ended = True
            self.steps[-1] = replace(self.steps[-1], note=f"{note}; {end}")

    def bayesian_point(self) -> Point:
        """The point with the largest upper confidence bound, mean + kappa * standard deviation, of those tried.

        Half of them are uniform in the box, half are the best point so far with some coordinates drawn anew.
        """
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern

        points, scores = np.array(self._points), np.array(self._scores)
        process = GaussianProcessRegressor(kernel=Matern(nu=2.5), alpha=NOISE, normalize_y=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a length scale at its bound is no worse a guess
            process.fit(points, scores)
        tried = self._stream.random((TRIED, points.shape[1]))
        near = points[int(scores.argmax())]
        half = TRIED // 2
        tried[half:] = np.where(self._stream.random((TRIED - half, near.size)) < CHANGED, tried[half:], near)
        mean, deviation = process.predict(tried, return_std=True)
        best: Point = tried[int((mean + KAPPA * deviation).argmax())]
        return best

    def state(self) -> dict[str, Any]:
        """All of it, as plain JSON values."""
        return {
            **super().state(),
            "best_score": self.best_score,
            "misses": self.misses,
            "rounds": self._rounds,
            "points": [list(point) for point in self._points],
            "scores": list(self._scores),
            "stream": self._stream.bit_generator.state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned.

        Raises:
            KeyError: A part is missing.
            TypeError: A part is of another type.
            ValueError: A part has no sensible value.
        """
        super().restore(state)
        self.best_score = float(state["best_score"])
        self.misses = int(state["misses"])
        self._rounds = int(state["rounds"])
        self._scores = [float(score) for score in state["scores"]]
        self._points = [[float(x) for x in point] for point in state["points"]]
        size = 2 * (self.n_layers - 2)
        if len(self._points) != len(self._scores) or any(len(point) != size for point in self._points):
            raise ValueError(f"there must be one point of {size} coordinates for each score")
        self._stream.bit_generator.state = state["stream"]


def _load_scikit_learn() -> None:
    """Import it before decoding: that takes seconds, which are not the search's.

    Raises:
        ValueError: It is not installed.
    """
    try:
        import sklearn.gaussian_process  # noqa: F401  # only whether it is there, and its seconds now
    except ImportError as error:
        raise ValueError(
            f"a swift policy's Bayesian proposals need scikit-learn ({error}): pip install 'lede-rl[bench]', or set "
            "bayes_interval=0"
        ) from None
