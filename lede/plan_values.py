"""What each plan of the pre-scan is likely to save against a plain pass, by regression on what is known before a round.

The values are linear in inputs made of the observation: each feature, some also bent (`lede.copy_forecast.inputs`), the
expected right tokens of copies (`lede.copy_forecast`), and these times the confidence trace and the acceptance.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lede.copy_forecast import CopyForecast
from lede.copy_forecast import inputs as bent
from lede.features import FeatureConfig

Array = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]

COPIES = (1, 2, 4, 8, 16)
"""Lengths of copies whose expected right tokens are inputs."""
_MODERATING = ("trace", "acceptance")  # what changes how much a likely copy is worth: how well layers would draft


class PlanValues:
    """Values of the plans.

    Attributes:
        features: The observation, all of it known in the pre-scan.
        copies: Forecast of copied tokens, on some of the features.
        weights: Of the inputs, the last of them the constant 1, `(plan, input)`; the plans are those of the pre-scan
            without the plain pass, whose value is 0.

    Args:
        features: As above.
        copies: As above.
        weights: As above.

    Raises:
        ValueError: The forecast looks at a feature that is not observed, or the weights do not fit.
    """

    def __init__(self, features: FeatureConfig, copies: CopyForecast, weights: npt.ArrayLike) -> None:
        self.features, self.copies = features, copies
        unseen = [name for name in copies.features.names if name not in features.names]
        if unseen:
            raise ValueError(f"the forecast of copies looks at {', '.join(unseen)}, which the observation lacks")
        self._match = features.names.index("match_length")
        self.weights = np.asarray(weights, dtype=np.float64)
        wanted = self.inputs(np.zeros((1, len(features.names)), dtype=np.float32)).shape[1]
        if self.weights.ndim != 2 or self.weights.shape[1] != wanted:
            raise ValueError(
                f"the values of {list(features.names)} have weights (plan, {wanted}), got {self.weights.shape}"
            )

    def inputs(self, observations: Floats) -> Array:
        """What the regressions weigh, `(n, input)`."""
        return _inputs(self.features, self.copies, observations)

    def __call__(self, observations: Floats, n_lookups: int) -> Array:
        """Tokens' worth of time that each action of the pre-scan saves against a plain pass, `(n, 1 + plan)`.

        Args:
            observations: `(n, feature)`.
            n_lookups: How many of the plans, the last ones, copy from the text; they are worth nothing where it is new.
        """
        values = np.concatenate((np.zeros((len(observations), 1)), self.inputs(observations) @ self.weights.T), axis=1)
        values[observations[:, self._match] <= 0, values.shape[1] - n_lookups :] = -np.inf
        return values

    def raised(self, by: npt.ArrayLike) -> PlanValues:
        """The same with a constant added to each plan, `(plan,)`."""
        weights = self.weights.copy()
        weights[:, -1] += np.asarray(by)
        return PlanValues(self.features, self.copies, weights)


def fit_values(
    features: FeatureConfig, copies: CopyForecast, observations: Floats, saved: Array, ridge: float = 30.0
) -> PlanValues:
    """The values with the smallest squared error.

    Args:
        features: The observation.
        copies: Forecast of copied tokens.
        observations: Of pre-scans, `(n, feature)`.
        saved: What each plan saved there, `(n, plan)`.
        ridge: Prior precision of every weight but the constant's, on inputs of unit variance, over that of a row.
    """
    matrix = _inputs(features, copies, observations)
    mean, std = matrix.mean(axis=0), matrix.std(axis=0)
    mean[-1], std = 0.0, np.where(std > 1e-9, std, 1.0)
    scaled = (matrix - mean) / std
    prior = np.full(matrix.shape[1], ridge)
    prior[-1] = 1e-6
    weights = np.linalg.solve(scaled.T @ scaled + np.diag(prior), scaled.T @ saved).T / std
    weights[:, -1] -= weights[:, :-1] @ mean[:-1]
    return PlanValues(features, copies, weights)


def _inputs(features: FeatureConfig, copies: CopyForecast, observations: Floats) -> Array:
    names = features.names
    likely = copies.expected(observations[:, [names.index(name) for name in copies.features.names]], COPIES)
    moderating = [observations[:, [names.index(name)]].astype(np.float64) for name in _MODERATING if name in names]
    matched = (observations[:, [names.index("match_length")]] > 0).astype(np.float64)
    products = [likely * value for value in moderating]
    if len(moderating) > 1:
        products.append(moderating[0] * moderating[1])
    return np.concatenate((likely, matched, *products, bent(observations, features)), axis=1)
