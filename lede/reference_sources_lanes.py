"""A source-value policy's decisions for many lanes at once, each with a memory of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lede.acceptance import AcceptanceModel
from lede.draft_rounds import DraftRounds, Stage
from lede.policies.source_value import SourceValuePolicy
from lede.simulation import Decide
from lede.visits import SurvivalMemory

Ints = npt.NDArray[np.int64]


class LayerThresholds:
    """Thresholds in scan and draft; ask it at every step of the lanes, once each.

    Args:
        model: Forecasts of acceptance.
        places: Where observations hold what they look at.
        n_lanes: Lanes.
        thresholds: Least probability to exit with at each candidate, `(candidate,)`.
        survival: Least survival to draft on.
    """

    def __init__(
        self,
        model: AcceptanceModel,
        places: Sequence[int],
        n_lanes: int,
        thresholds: npt.ArrayLike,
        survival: float,
    ) -> None:
        self._memory, self._places = SurvivalMemory(model, n_lanes), list(places)
        self._limits = np.log(np.maximum(np.asarray(thresholds, dtype=np.float64), 1e-300))
        self._least = np.log(max(survival, 1e-300))

    def __call__(self, lanes: DraftRounds, seen: npt.NDArray[np.float32]) -> Ints:
        """Actions in scan and draft, `(lane,)`; what it says of the pre-scan means nothing."""
        chance, survival = self._memory.look(lanes, seen[:, self._places])
        drafts_on, exits = survival + chance >= self._least, chance >= self._limits[lanes.candidate]
        return np.where(lanes.stage == Stage.DRAFT, drafts_on, exits).astype(np.int64)


def lane_decisions(policy: SourceValuePolicy, n_lanes: int) -> Decide:
    """What the policy does where lanes stand; for `lede.simulation.play`."""
    later = LayerThresholds(policy.acceptance, policy.layer_places, n_lanes, policy.limits, policy.config.survival)

    def decide(lanes: DraftRounds) -> Ints:
        seen = lanes.observe()
        actions, before = later(lanes, seen), np.flatnonzero(lanes.stage == Stage.PRE_SCAN)
        if before.size:
            actions[before] = policy.decide(seen[before])
        return actions

    return decide
