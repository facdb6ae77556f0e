"""The reward of LEDE's Markov decision process.

Source: LEDE (arXiv 2606.03113), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CONTINUE = 0
EXIT = 1


@dataclass(frozen=True)
class RewardConfig:
    """What a decision earns. `depth bonus` stands for (L - l) / L."""

    accepted: float = 1.0
    """Paid for an exit whose token matches, plus the depth bonus."""
    rejected: float = -2.0
    """Paid for an exit whose token does not match, plus the depth bonus."""
    continue_cost: float = -0.01
    """Paid for going on to the next candidate."""
    final_reward: float = 0.0
    """Added to the last continue of a token that was never exited; 1 reads the last layer as always matching."""

    def exit(self, layer: npt.ArrayLike, n_layers: int, match: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Reward of exiting at `layer` of `n_layers`; `match` is 0 or 1, or a probability (expected reward)."""
        p = np.asarray(match, dtype=np.float64)
        bonus = (n_layers - np.asarray(layer, dtype=np.float64)) / n_layers
        return np.asarray(p * self.accepted + (1 - p) * self.rejected + bonus, dtype=np.float32)

    def going_on(self, last: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Reward of a continue; `last` says whether it was at the last candidate."""
        return np.asarray(self.continue_cost + np.asarray(last, dtype=np.float64) * self.final_reward, dtype=np.float32)


def break_even(layer: int, n_layers: int) -> float:
    """Acceptance probability above which an exit at `layer` has a positive expected reward."""
    return (2 - (n_layers - layer) / n_layers) / 3
