"""Bootstrap intervals of ratios of sums, resampled by prompt.

Tokens of one prompt share its difficulty, so prompts, not tokens, are what a repetition would draw anew. All figures
of one `Bootstrap` see the same resampled prompts, so policies are compared in pairs.

Source: percentile interval, B. Efron and R. J. Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lede.seeding import Purpose, numpy_stream

_STREAM = 1
_CHUNK = 1 << 22
"""Numbers of the resampling matrix that are in memory as floats at a time."""


@dataclass(frozen=True)
class Interval:
    """A figure and where it would fall with other prompts of the same kind."""

    value: float
    """The figure on the prompts themselves."""
    lower: float
    """Lower end."""
    upper: float
    """Upper end; with a single prompt both ends are the figure itself."""


class Bootstrap:
    """Resampled sums over prompts.

    Args:
        n_prompts: Prompts.
        n_resamples: How often as many prompts are drawn with replacement.
        seed: Of the draws.
        level: Share of the resampled figures that an interval holds.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, n_prompts: int, n_resamples: int = 2000, seed: int = 0, level: float = 0.95) -> None:
        if n_prompts < 1 or n_resamples < 1 or not 0 < level < 1:
            raise ValueError(
                f"a bootstrap needs prompts, resamples and a level within 0..1, got {n_prompts}, {n_resamples}, {level}"
            )
        self.level = level
        rng = numpy_stream(seed, Purpose.PROMPT_ORDER, _STREAM)
        shares = np.full(n_prompts, 1 / n_prompts)
        self._counts = rng.multinomial(n_prompts, shares, size=n_resamples).astype(np.uint16)  # (resample, prompt)

    def ratio(self, numerator: npt.ArrayLike, denominator: npt.ArrayLike) -> Interval | None:
        """A ratio of sums over prompts, such as tokens over seconds; None where the denominator is 0.

        Args:
            numerator: `(prompt,)`.
            denominator: `(prompt,)`; resamples whose sum is not above 0 are passed over.
        """
        top, bottom = (np.asarray(each, dtype=np.float64) for each in (numerator, denominator))
        if not bottom.sum() > 0:
            return None
        sums = self._sums(np.stack((top, bottom), axis=1))
        return self._interval(top.sum() / bottom.sum(), sums[:, 0], sums[:, 1])

    def speedup(
        self, tokens: npt.ArrayLike, seconds: npt.ArrayLike, over_tokens: npt.ArrayLike, over_seconds: npt.ArrayLike
    ) -> Interval:
        """The rate of one policy over that of another on the same prompts; `(prompt,)` each."""
        return self.products((tokens, over_seconds), (seconds, over_tokens))

    def products(self, tops: Sequence[npt.ArrayLike], bottoms: Sequence[npt.ArrayLike]) -> Interval:
        """A product of sums over prompts, divided by another such product; `(prompt,)` each."""
        columns = [np.asarray(each, dtype=np.float64) for each in (*tops, *bottoms)]
        resampled = self._sums(np.stack(columns, axis=1))
        whole, n = np.array([column.sum() for column in columns]), len(tops)
        value = whole[:n].prod() / whole[n:].prod()
        return self._interval(value, resampled[:, :n].prod(axis=1), resampled[:, n:].prod(axis=1))

    def _sums(self, columns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sums over resampled prompts, `(resample, column)`, of `(prompt, column)`."""
        step = max(1, _CHUNK // self._counts.shape[1])
        parts = [self._counts[i : i + step].astype(np.float64) @ columns for i in range(0, len(self._counts), step)]
        return np.concatenate(parts)

    def _interval(self, value: float, top: npt.NDArray[np.float64], bottom: npt.NDArray[np.float64]) -> Interval:
        sound = bottom > 0  # a resample may hold only prompts that count nothing
        ratios = top[sound] / bottom[sound]
        tail = (1 - self.level) / 2
        lower, upper = np.quantile(ratios, (tail, 1 - tail))
        return Interval(float(value), float(lower), float(upper))
