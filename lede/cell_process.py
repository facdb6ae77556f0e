"""Decision processes with finitely many cells, known from recorded steps: the policy with the largest tokens a second.

Source: Dinkelbach, On nonlinear fractional programming (1967), for the ratio; Howard, Dynamic programming and Markov
processes (1960), for policy iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

END = -1
"""Where a text ends."""

_SMALLEST_STEP = 1e-9
_LEAK = 1e-6  # share of every move that ends instead, so that cells that were never seen to end have a value
_MOST_STEPS = 200


@dataclass(frozen=True, eq=False)
class Steps:
    """Recorded decisions of a process with finitely many cells."""

    cell: Ints  # (step,)
    """Where it was decided."""
    action: Ints  # (step,)
    """What was decided."""
    following: Ints  # (step,)
    """Cell of the next decision; `END` where there is none."""
    tokens: Array  # (step,)
    """Earned."""
    seconds: Array  # (step,)
    """Spent."""

    @classmethod
    def join(cls, parts: Sequence[Steps]) -> Steps:
        """Several recordings as one."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


@dataclass(frozen=True, eq=False)
class Solution:
    """The best policy of a process with finitely many cells."""

    action: Ints  # (cell,)
    """What to do; -1 where nothing was recorded often enough."""
    value: Array  # (cell,)
    """Tokens - rate * seconds from here to the end."""
    rate: float
    """Tokens a second from the start."""


def solve(steps: Steps, start: npt.ArrayLike, least: int = 1) -> Solution:
    """The policy with the largest ratio of tokens to seconds from the start to the end.

    Args:
        steps: Decisions that were recorded; what they tell is taken for the truth.
        start: How often each cell is the first, `(cell,)`.
        least: Fewest steps that an action needs in a cell to be considered there.

    Raises:
        ValueError: Nothing was recorded.
    """
    begins = np.asarray(start, dtype=np.float64)
    if not steps.cell.size or not begins.sum():
        raise ValueError("no decision was recorded; give prompts that leave room for a draft")
    n_cells = begins.size
    n_actions = int(steps.action.max()) + 1
    pairs, pair, count = np.unique(steps.cell * n_actions + steps.action, return_inverse=True, return_counts=True)
    cell, action = pairs // n_actions, pairs % n_actions
    # what is rare is not considered, unless its cell has nothing else
    most = np.zeros(n_cells, dtype=np.int64)
    np.maximum.at(most, cell, count)
    rare = count < np.minimum(least, most[cell])
    tokens, seconds = (np.bincount(pair, weights=sums) / count for sums in (steps.tokens, steps.seconds))
    inside = steps.following != END
    links, times = np.unique(pair[inside] * n_cells + steps.following[inside], return_counts=True)
    origin, target = links // n_cells, links % n_cells
    share = times / count[origin]

    rate = float(steps.tokens.sum() / steps.seconds.sum())
    order = np.argsort(cell, kind="stable")
    first = np.searchsorted(cell[order], np.arange(n_cells))
    known = np.flatnonzero(most > 0)
    # the commonest action of each cell to begin with
    chosen = _best(np.where(rare, -np.inf, count.astype(np.float64)), cell, order, first, known)
    for _ in range(_MOST_STEPS):
        worth = _evaluate(chosen, known, n_cells, tokens, seconds, origin, target, share)  # (cell, 2)
        sums = begins @ worth
        rate = float(sums[0] / sums[1])
        value = worth[:, 0] - rate * worth[:, 1]
        after = np.bincount(origin, weights=share * (1 - _LEAK) * value[target], minlength=pairs.size)
        gain = np.where(rare, -np.inf, tokens - rate * seconds + after)
        better = _best(gain, cell, order, first, known)
        # ties keep the old action, or the iteration would go in circles
        keep = gain[better[known]] <= gain[chosen[known]] + _SMALLEST_STEP
        if keep.all():
            break
        chosen[known] = np.where(keep, chosen[known], better[known])
    found = np.full(n_cells, -1, dtype=np.int64)
    found[known] = action[chosen[known]]
    return Solution(found, value, rate)


def _best(gain: Array, cell: Ints, order: Ints, first: Ints, known: Ints) -> Ints:
    """The pair with the largest gain in each known cell, `(cell,)`; 0 elsewhere."""
    ranked = order[np.lexsort((-gain[order], cell[order]))]
    best = np.zeros(first.size, dtype=np.int64)
    best[known] = ranked[first[known]]
    return best


def _evaluate(
    chosen: Ints, known: Ints, n_cells: int, tokens: Array, seconds: Array, origin: Ints, target: Ints, share: Array
) -> Array:
    """Tokens and seconds from each cell to the end under one action a cell, `(cell, 2)`."""
    cell_of = np.full(tokens.size, -1, dtype=np.int64)
    cell_of[chosen[known]] = known
    used = cell_of[origin] >= 0
    matrix = np.eye(n_cells)
    np.subtract.at(matrix, (cell_of[origin[used]], target[used]), share[used] * (1 - _LEAK))
    own = np.zeros((n_cells, 2))
    own[known] = np.stack((tokens[chosen[known]], seconds[chosen[known]]), axis=1)
    return np.asarray(np.linalg.solve(matrix, own))
