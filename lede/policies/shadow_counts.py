"""How often the shadow tokens of every layer were right, and how sure the layer was of them; the past fades."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lede.policies.base import Shadow

_COLUMNS = ("right", "wrong", "sure_right", "sure_wrong")
_KEYS = ("layers", "prior", *_COLUMNS)


class ShadowCounts:
    """Fading counts of right and wrong shadow tokens, and fading sums of their probabilities.

    Args:
        layers: Layers whose shadow tokens are counted, ascending.
        decay: Weight of everything counted before, whenever a round is added.
        prior: Made-up positions, half of them right, that are there before the first round and fade like the others.
    """

    def __init__(self, layers: tuple[int, ...], decay: float, prior: float) -> None:
        self.layers, self.decay, self.prior = layers, decay, prior
        self.clear()

    def clear(self) -> None:
        """Forget everything but the prior."""
        self._prior = self.prior
        # rows as in _COLUMNS: how many were right and wrong, and the sums of their probabilities
        self._sums = np.zeros((len(_COLUMNS), len(self.layers)))

    def add(self, shadow: Shadow) -> None:
        """Count the positions of a round.

        Raises:
            ValueError: They are of other layers.
        """
        if tuple(shadow.layers) != self.layers:
            raise ValueError(f"shadow tokens are of layers {list(shadow.layers)}, wanted {list(self.layers)}")
        right = shadow.tokens == shadow.targets
        sure = shadow.probabilities.astype(np.float64)
        sure_right = np.where(right, sure, 0.0).sum(axis=1)
        n_right = right.sum(axis=1)
        new = (n_right, right.shape[1] - n_right, sure_right, sure.sum(axis=1) - sure_right)
        self._sums = self.decay * self._sums + np.stack(new)
        self._prior *= self.decay

    def acceptance(self) -> npt.NDArray[np.float64]:
        """Share of shadow tokens that were right, the prior among them, `(layer,)`; 0 where there is none at all."""
        right, wrong = self._sums[0], self._sums[1]
        n = right + wrong + self._prior
        return np.asarray(np.where(n > 0, (right + self._prior / 2) / np.where(n > 0, n, 1.0), 0.0))

    def threshold(self, layer: int) -> float:
        """Halfway between the mean probability of a layer's right and wrong shadow tokens; 0 without one of either."""
        right, wrong, sure_right, sure_wrong = (float(value) for value in self._sums[:, self.layers.index(layer)])
        if right <= 0 or wrong <= 0:
            return 0.0
        return (sure_right / right + sure_wrong / wrong) / 2

    def state(self) -> dict[str, Any]:
        """Everything counted, as plain JSON values."""
        columns = {name: row.tolist() for name, row in zip(_COLUMNS, self._sums, strict=True)}
        return {"layers": list(self.layers), "prior": self._prior, **columns}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: It is something else, or of other layers.
        """
        self.check(state)
        if tuple(state["layers"]) != self.layers:
            raise ValueError(f"the state is of layers {state['layers']}, the policy drafts at {list(self.layers)}")
        self._prior = float(state["prior"])
        self._sums = np.array([state[name] for name in _COLUMNS], dtype=np.float64)

    @staticmethod
    def check(state: dict[str, Any]) -> None:
        """Raise ValueError unless this is a state, or empty."""
        if not state:
            return
        if sorted(state) != sorted(_KEYS):
            raise ValueError(f"the state of shadow tokens has {', '.join(_KEYS)}; got {', '.join(sorted(state))}")
        if not isinstance(state["layers"], (list, tuple)):
            raise ValueError(f"layers in the state of shadow tokens must be a list, got {state['layers']!r}")
        if not _is_count(state["prior"]):
            raise ValueError(f"prior in the state of shadow tokens must be at least 0, got {state['prior']!r}")
        n = len(state["layers"])
        for name in _COLUMNS:
            values = state[name]
            if not isinstance(values, (list, tuple)) or len(values) != n or not all(map(_is_count, values)):
                raise ValueError(f"{name} in the state of shadow tokens must be {n} numbers from 0 up, got {values!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < math.inf
