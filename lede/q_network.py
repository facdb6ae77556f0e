"""A frozen Q-network, evaluated in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lede.rewards import CONTINUE, EXIT

Array = npt.NDArray[np.float32]
Layers = Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]


class QNetwork:
    """A multi-layer perceptron with ReLU between its layers: observation in, values of actions out.

    Outputs 0 and 1 are CONTINUE and EXIT; any further ones are plans of the pre-scan.

    Everything is allocated once, so a decision costs three numpy calls a layer at most and no garbage; the buffers make
    one object unfit for two threads at once.

    Args:
        layers: Weight `(out, in)` and bias `(out,)` of each layer, the last with two outputs or more; kept as float32.

    Raises:
        ValueError: Shapes do not fit together, or a weight is not finite.
    """

    def __init__(self, layers: Layers) -> None:
        if not layers:
            raise ValueError("a Q-network needs at least one layer, got none")
        self.layers: list[tuple[Array, Array]] = []
        width = None
        for i, (weight, bias) in enumerate(layers):
            if weight.ndim != 2 or bias.shape != weight.shape[:1] or width not in (None, weight.shape[1]):
                wanted = "(out, in)" if width is None else f"(out, {width})"
                raise ValueError(f"layer {i} has weight {weight.shape} and bias {bias.shape}; {wanted} and (out,) fit")
            if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
                raise ValueError(f"layer {i} of the Q-network holds numbers that are not finite")
            self.layers.append((np.array(weight, dtype=np.float32), np.array(bias, dtype=np.float32)))
            width = weight.shape[0]
        if width is None or width < 2:
            raise ValueError(f"the Q-network's last layer has {width} outputs, wanted at least 2 (continue, exit)")
        self.n_outputs: int = width
        self.n_features = self.layers[0][0].shape[1]
        # a constant 1 behind every input carries the bias, which saves a call a layer
        self._weights = [np.hstack([weight, bias[:, None]]) for weight, bias in self.layers[:-1]]
        self._inputs = [np.ones(weight.shape[1] + 1, dtype=np.float32) for weight, _ in self.layers]
        self._heads = [buffer[:-1] for buffer in self._inputs]
        # only the difference of the two values decides in the scan and in the draft
        weight, bias = (part.astype(np.float64) for part in self.layers[-1])
        self._last = np.append(weight[EXIT] - weight[CONTINUE], bias[EXIT] - bias[CONTINUE]).astype(np.float32)
        self._all = np.hstack([weight, bias[:, None]]).astype(np.float32)

    def __reduce__(self) -> tuple[type[QNetwork], tuple[Layers]]:
        """Copies and pickles are built anew: a copied view would no longer share its buffer."""
        return QNetwork, (self.layers,)

    def advantage(self, observation: Array) -> float:
        """Q(EXIT) - Q(CONTINUE) of one observation `(feature,)`."""
        return float(np.dot(self._last, self._hidden(observation)))

    def best(self, observation: Array) -> int:
        """The action with the largest value at one observation `(feature,)`; the lowest among equals."""
        return int(np.dot(self._all, self._hidden(observation)).argmax())

    def _hidden(self, observation: Array) -> Array:
        """What goes into the last layer, and the 1 behind it."""
        if observation.shape != (self.n_features,):
            raise ValueError(f"the Q-network takes ({self.n_features},) features, got {observation.shape}")
        heads, inputs = self._heads, self._inputs
        heads[0][:] = observation
        for i, weight in enumerate(self._weights):
            head = heads[i + 1]
            np.dot(weight, inputs[i], out=head)
            np.maximum(head, 0.0, out=head)
        return inputs[-1]

    def values(self, observations: npt.ArrayLike) -> Array:
        """Q of a batch: `(..., output)`, float32, of observations `(..., feature)`."""
        hidden = np.asarray(observations, dtype=np.float32)
        if hidden.shape[-1:] != (self.n_features,):
            raise ValueError(f"the Q-network takes (..., {self.n_features}) features, got {hidden.shape}")
        for i, (weight, bias) in enumerate(self.layers):
            hidden = hidden @ weight.T + bias
            if i < len(self.layers) - 1:
                hidden = np.maximum(hidden, np.float32(0))
        return np.asarray(hidden, dtype=np.float32)


def fold_normalisation(
    layers: Layers, mean: npt.ArrayLike | None = None, std: npt.ArrayLike | None = None
) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """The same network on raw features: W (x - mean) / std + b becomes (W / std) x + (b - (W / std) mean).

    Raises:
        ValueError: A deviation is not a positive number.
    """
    folded = list(layers)
    if folded and (mean is not None or std is not None):
        weight, bias = (part.astype(np.float64) for part in folded[0])
        scale = np.ones(weight.shape[1]) if std is None else np.asarray(std, dtype=np.float64)
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise ValueError(f"std must be positive numbers, got {scale.tolist()}")
        shift = np.zeros(weight.shape[1]) if mean is None else np.asarray(mean, dtype=np.float64)
        if scale.shape != shift.shape or scale.shape != weight.shape[1:]:
            raise ValueError(f"mean {shift.shape} and std {scale.shape} must have a number for each of the inputs")
        weight = weight / scale
        folded[0] = (weight, bias - weight @ shift)
    return folded
