"""Where rounds that are played on traces stand, and what one step did to them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lede.trace_table import Ints

Bools = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]


class Stage(enum.IntEnum):
    """Where a lane stands; the first three are the stages of `lede.features`."""

    PRE_SCAN = 0
    SCAN = 1
    DRAFT = 2
    DONE = 3


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one step did in each lane."""

    seconds: Doubles  # (lane,)
    """Spent."""
    tokens: Ints  # (lane,)
    """Committed."""
    round_end: Bools  # (lane,)
    """Whether a verification ended the round."""
    done: Bools  # (lane,)
    """Whether the text has ended."""
    drafted: Ints  # (lane,)
    """Tokens that the step drafted by a plan, which plays the whole round; 0 elsewhere."""
    accepted: Ints  # (lane,)
    """Those of them that were accepted."""
