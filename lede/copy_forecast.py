"""How likely tokens copied from the text are to be right, one after the other, by logistic regression.

There is a regression for each group of places in the copy, on what is known before the round. Each says how likely the
token there is to be right if all before it are; their products are the survivals of the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lede.acceptance import fit_logistic, log_odds_of, logistic
from lede.features import FEATURES, PRE_SCAN, FeatureConfig

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

COPY_FEATURES = ("match_length", "match_count", "match_agreement", "lookup_hits", "trace")
"""What the forecast looks at unless told otherwise: the text tells it, whoever decides, all but for the trace.

What depends on earlier decisions is of another kind where the forecast is used than where it was fitted. The trace is,
a little, in policies over both sources: rounds that draft at a layer leave that layer's surprisal in it, and the
forecast was fitted where nobody does. `lede.plan_values` is fitted where its policy itself leads, and puts that right
as far as values go.
"""


GROUPS = (1, 2, 4, 8)
"""First place of each group: the first copied token, the second, the third and fourth, ..."""

_LOGARITHMS = ("match_length", "since_lookup", "trace")
_STEPS = (2, 3, 5, 9, 17)  # lengths of the match from which on a copy may be trusted otherwise
_SQUARES = ("match_agreement", "lookup_hits", "lookup_acceptance")


def copy_features(memory: bool) -> tuple[str, ...]:
    """`COPY_FEATURES`, and with a memory of other texts whether the match is in it."""
    return (*COPY_FEATURES, "match_remembered") if memory else COPY_FEATURES


class CopyForecast:
    """Forecasts for each group of places.

    Attributes:
        weights: Of the inputs, the last of them the constant 1, `(group, input)`.

    Args:
        features: The observation, all of it known in the pre-scan.
        weights: As above.

    Raises:
        ValueError: A feature is not known before a round, or the weights do not fit.
    """

    def __init__(self, features: FeatureConfig, weights: npt.ArrayLike) -> None:
        odd = [name for name in features.names if PRE_SCAN not in FEATURES[name].stages]
        if odd:
            raise ValueError(f"{', '.join(odd)} are not known before a round; a forecast of copies can't look at them")
        self.features = features
        self.weights = np.asarray(weights, dtype=np.float64)
        wanted = (len(GROUPS), inputs(np.zeros((1, len(features.names)), dtype=np.float32), features).shape[1])
        if self.weights.shape != wanted:
            raise ValueError(f"the forecast of {list(features.names)} has weights {wanted}, got {self.weights.shape}")

    def expected(self, observations: npt.NDArray[np.float32], lengths: Sequence[int]) -> Array:
        """Expected right tokens at the beginning of copies, `(n, length)`; 0 where the end of the text is new.

        Args:
            observations: `(n, feature)`.
            lengths: Tokens copied.
        """
        chances = logistic(inputs(observations, self.features) @ self.weights.T)
        places = np.searchsorted(GROUPS, np.arange(1, max(lengths) + 1), side="right") - 1
        right = np.cumsum(np.cumprod(chances[:, places], axis=1), axis=1)[:, np.asarray(lengths) - 1]
        if "match_length" in self.features.names:
            right = right * (observations[:, self.features.names.index("match_length")] > 0)[:, None]
        return np.asarray(right)


def fit_copies(observations: npt.NDArray[np.float32], features: FeatureConfig, run: Ints, copied: Ints) -> CopyForecast:
    """The likeliest forecast.

    Args:
        observations: Of pre-scans, `(n, feature)`.
        features: What was observed.
        run: Right tokens at the beginning of the copy, `(n,)`.
        copied: Tokens that were copied, `(n,)`.
    """
    matrix = inputs(observations, features)
    weights = np.zeros((len(GROUPS), matrix.shape[1]))
    ends = (*GROUPS[1:], int(copied.max(initial=1)) + 1)
    for group, (first, end) in enumerate(zip(GROUPS, ends, strict=True)):
        rows, labels = [], []
        for place in range(first, end):
            here = np.flatnonzero((copied >= place) & (run >= place - 1))
            rows.append(here)
            labels.append((run[here] >= place).astype(np.float64))
        chosen, label = np.concatenate([np.zeros(0, dtype=np.int64), *rows]), np.concatenate([np.zeros(0), *labels])
        if chosen.size:
            weights[group] = fit_logistic(matrix[chosen], label)
        else:  # nothing is known there: as good as never right
            weights[group, -1] = float(log_odds_of(0.0))
    return CopyForecast(features, weights)


def inputs(observations: npt.NDArray[np.float32], features: FeatureConfig) -> Array:
    """What the regressions weigh, `(n, input)`: each feature, some also bent so that a line fits, and a constant."""
    columns = []
    for i, name in enumerate(features.names):
        value = observations[:, i].astype(np.float64)
        columns.append(value)
        if name in _LOGARITHMS:
            columns.append(np.log1p(value))
        elif name in _SQUARES:
            columns.append(value * value)
        if name == "match_length":
            columns += [(value >= step).astype(np.float64) for step in _STEPS]
    return np.stack([*columns, np.ones(len(observations))], axis=1)
