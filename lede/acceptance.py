"""How likely a draft is to be accepted, by logistic regression on what a policy sees, and how good such a forecast is.

There is one regression for each candidate in each stage, since the draft sees less than the scan and layers differ.
Each says how likely the token at this position is to be accepted if all that were drafted before it are; the product
over the drafted positions is the survival of the draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lede.features import FeatureConfig
from lede.forecast import odds_of_surprisal, odds_of_surprisals

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

SCANNING, DRAFTING = 0, 1
"""Places of the stages among the regressions."""

LEAST = math.exp(-20.0)  # survival: further out nothing changes any more
UNVARYING = ("depth", "in_scan", "in_draft")  # the same wherever one regression holds


class AcceptanceModel:
    """Forecasts for each candidate and stage.

    Attributes:
        weights: Of the inputs, the last of them the constant 1, `(stage, candidate, input)`.
        blind: Log-odds at each candidate of a position that nobody looked at, `(candidate,)`.

    Args:
        features: The observation.
        weights: As above.
        blind: As above.

    Raises:
        ValueError: The weights do not fit the features.
    """

    def __init__(self, features: FeatureConfig, weights: npt.ArrayLike, blind: npt.ArrayLike) -> None:
        self.features = features
        self.weights = np.asarray(weights, dtype=np.float64)
        self.blind = np.asarray(blind, dtype=np.float64)
        n_inputs = inputs(np.zeros((1, len(features.names)), dtype=np.float32), features).shape[1]
        if self.weights.ndim != 3 or self.weights.shape != (2, self.blind.size, n_inputs):
            raise ValueError(
                f"the forecast of {list(features.names)} at {self.blind.size} candidates has weights "
                f"(2, {self.blind.size}, {n_inputs}), got {self.weights.shape}"
            )
        self._rows = self.weights.tolist()

    def log_odds(self, observations: npt.NDArray[np.float32], drafting: Bools, candidate: Ints) -> Array:
        """Log-odds of acceptance, `(n,)`."""
        chosen = self.weights[drafting.astype(np.int64), candidate]
        return np.asarray(np.einsum("ni,ni->n", inputs(observations, self.features), chosen))

    def probability(self, observations: npt.NDArray[np.float32], drafting: Bools, candidate: Ints) -> Array:
        """Probability of acceptance, `(n,)`."""
        return logistic(self.log_odds(observations, drafting, candidate))

    def log_chance(self, observation: npt.NDArray[np.float32], stage: int, candidate: int) -> float:
        """Logarithm of the probability for one observation `(feature,)`; quick, for decoding."""
        weights, place, odds = self._rows[stage][candidate], 0, 0.0
        for name, value in zip(self.features.names, observation.tolist(), strict=True):
            if name in UNVARYING:
                continue
            odds += weights[place] * value
            place += 1
            if name in _BENT:
                odds += weights[place] * _BENT[name](value)
                place += 1
        return log_sigmoid(odds + weights[place])


def log_sigmoid(odds: float) -> float:
    """Logarithm of the probability of log-odds."""
    return -math.log1p(math.exp(-odds)) if odds > 0 else odds - math.log1p(math.exp(odds))


_BENT: dict[str, Callable[[float], float]] = {
    "surprisal": odds_of_surprisal,
    "margin": lambda value: math.exp(-value),
    "entropy": math.sqrt,
    "agreement": lambda value: float(value != 0),
    "drafted": math.log1p,
    "survival": lambda value: math.log(max(value, LEAST)),
    "certainty": lambda value: math.log(max(value, LEAST)),
}
"""A second input of a feature, bent so that a line fits; `inputs` has the same for arrays."""


def inputs(observations: npt.NDArray[np.float32], features: FeatureConfig) -> Array:
    """What the regression weighs, `(n, input)`: each feature, some also bent so that a line fits, and a constant."""
    columns = []
    for i, name in enumerate(features.names):
        value = observations[:, i].astype(np.float64)
        if name in UNVARYING:
            continue
        columns.append(value)
        if name == "surprisal":
            columns.append(odds_of_surprisals(value))
        elif name == "margin":
            columns.append(np.exp(-value))
        elif name == "entropy":
            columns.append(np.sqrt(value))
        elif name == "agreement":
            columns.append((value != 0).astype(np.float64))
        elif name == "drafted":
            columns.append(np.log1p(value))
        elif name in ("survival", "certainty"):
            columns.append(np.log(np.maximum(value, LEAST)))
    return np.stack([*columns, np.ones(len(observations))], axis=1)


def fit_logistic(matrix: Array, label: Array, ridge: float = 1.0, steps: int = 50) -> Array:
    """Weights of a logistic regression by Newton's method, the last column being the constant.

    Args:
        matrix: Inputs, `(n, input)`.
        label: 0 or 1, `(n,)`.
        ridge: Prior precision of the weights on inputs of unit variance; the constant has none to speak of.
        steps: Most steps.
    """
    mean, std = matrix.mean(axis=0), matrix.std(axis=0)
    mean[-1], std = 0.0, np.where(std > 1e-9, std, 1.0)
    scaled = (matrix - mean) / std
    prior = np.full(matrix.shape[1], ridge)
    prior[-1] = 1e-3
    weights = np.zeros(matrix.shape[1])
    weights[-1] = log_odds_of((label.sum() + 0.5) / (label.size + 1))
    loss = _loss(scaled, label, weights, prior)
    for _ in range(steps):
        chance = logistic(scaled @ weights)
        slope = scaled.T @ (chance - label) + prior * weights
        bend = (scaled * (chance * (1 - chance))[:, None]).T @ scaled + np.diag(prior)
        step = np.linalg.solve(bend, slope)
        size = 1.0
        while (found := _loss(scaled, label, weights - size * step, prior)) > loss and size > 1e-6:
            size /= 2
        if loss - found < 1e-9 * max(loss, 1.0):
            break
        weights, loss = weights - size * step, found
    weights = weights / std
    weights[-1] -= weights[:-1] @ mean[:-1]
    return weights


def logistic(log_odds: npt.ArrayLike) -> Array:
    """Probability of log-odds."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * np.asarray(log_odds, dtype=np.float64))))


def area_under_curve(score: npt.ArrayLike, label: npt.ArrayLike) -> float | None:
    """AUC: how often an accepted position scores higher than a rejected one, ties half; None if one kind is missing."""
    scores, labels = np.asarray(score, dtype=np.float64), np.asarray(label, dtype=np.bool_)
    n_true, n_false = int(labels.sum()), int((~labels).sum())
    if not n_true or not n_false:
        return None
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    return float((rank[labels].sum() - n_true * (n_true + 1) / 2) / (n_true * n_false))


def calibration_error(probability: npt.ArrayLike, label: npt.ArrayLike, bins: int = 10) -> float:
    """Expected calibration error: mean distance of forecast and share over bins of equally many positions."""
    forecast, happened = np.asarray(probability, dtype=np.float64), np.asarray(label, dtype=np.float64)
    order = np.argsort(forecast, kind="stable")
    parts: Sequence[Ints] = [part for part in np.array_split(order, bins) if part.size]
    return float(sum(abs(forecast[part].sum() - happened[part].sum()) for part in parts) / max(forecast.size, 1))


def log_odds_of(share: npt.ArrayLike) -> Array:
    """Log-odds of a share, which counts as between 0.0001 and 0.9999."""
    inside = np.clip(np.asarray(share, dtype=np.float64), 1e-4, 1 - 1e-4)
    return np.asarray(np.log(inside / (1 - inside)))


def _loss(matrix: Array, label: Array, weights: Array, prior: Array) -> float:
    odds = matrix @ weights
    return float((np.logaddexp(0, odds) - label * odds).sum() + 0.5 * (prior * weights**2).sum())
