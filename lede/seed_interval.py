"""How far a mean over seeds may be off.

Source: Student's distribution for a whole number of degrees of freedom as a finite sum, M. Abramowitz and I. A. Stegun,
Handbook of Mathematical Functions, 1964, 26.7.3 and 26.7.4.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lede.intervals import Interval


def seed_interval(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """Mean of one value a seed, and Student's interval of the mean over all seeds.

    None for fewer than two values: one seed says nothing of the next.
    """
    n = len(values)
    if n < 2:
        return None
    mean = statistics.fmean(values)
    half = student_quantile(n - 1, level) * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def student_quantile(degrees: int, level: float = 0.95) -> float:
    """The t that |t| stays below with probability `level`, for `degrees` of freedom."""
    low, high = 0.0, math.pi / 2  # of atan(t / sqrt(degrees))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < level else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(degrees)


def _within(angle: float, degrees: int) -> float:
    """Probability of |t| < sqrt(degrees) * tan(angle)."""
    odd = degrees % 2
    cosine = math.cos(angle)
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(1 + odd, degrees, 2):  # terms of cos^0, cos^2, ... or cos^1, cos^3, ...
        total += term
        term *= cosine**2 * power / (power + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
