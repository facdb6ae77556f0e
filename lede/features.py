"""The state of a decision: named features, where each is defined, and what it costs.

A round has three stages. Before any head read, in the pre-scan, only what is already verified is known. In the scan and
in the draft a head read at the current layer says what that layer expects next. A feature that its stage does not
define is 0; `in_scan` and `in_draft` tell the stages apart. No feature uses a token sampled at its own position, nor a
match that verification has not told yet.

Source: LEDE (arXiv 2606.03113), section 3.1, has confidence, entropy and trace. Departs from the paper: k, the window
and what enters the trace are not published and are our choice, and all other features are ours: without `depth` a
Q-network cannot tell layers apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lede.candidates import default_candidates, parse_candidates
from lede.confidence_trace import ConfidenceTrace
from lede.forecast import Forecast
from lede.lookup import MAX_MATCH

if TYPE_CHECKING:
    from lede.primitives import Primitives, primitives, surprisal

__all__ = [
    "CALIBRATED",
    "CALIBRATED_FEATURES",
    "DEFAULT_FEATURES",
    "DRAFT",
    "FEATURES",
    "FOLLOWED",
    "MAX_CONFIDENCE",
    "MAX_DRAFTED",
    "MAX_SINCE_DRAFT",
    "MAX_SURPRISAL",
    "PRE_SCAN",
    "RECENT_ROUNDS",
    "SCAN",
    "TEXT_FEATURES",
    "WALL_CLOCK_FEATURES",
    "ConfidenceTrace",
    "Feature",
    "FeatureConfig",
    "Forecast",
    "Primitives",
    "default_candidates",
    "parse_candidates",
    "primitives",
    "surprisal",
]

PRE_SCAN, SCAN, DRAFT = 0, 1, 2
"""Stages of a round that ask the policy."""

MAX_CONFIDENCE = 50.0
"""Upper bound of `confidence`, `trace`, `surprisal` and `margin`, in nats; larger values are clipped."""

MAX_SURPRISAL = 1e4
"""Upper bound of -log probability in the primitives, in nats; a banned token has no more."""

RECENT_ROUNDS = 8
"""Rounds that drafted which enter `acceptance`."""

MAX_SINCE_DRAFT = 32
"""Upper bound of `since_draft`, in rounds."""

MAX_DRAFTED = 64
"""Upper bound of `drafted`, in tokens."""


MAX_COUNT = 12.0
"""Upper bound of `match_count`."""


@dataclass(frozen=True)
class Feature:
    """One number of the observation."""

    name: str
    """What the observation's names call it."""
    formula: str
    """How it is computed; p1 and p2 are the two largest probabilities at the layer, l the layer, L all layers."""
    stages: tuple[int, ...]
    """Where it is defined, of PRE_SCAN, SCAN and DRAFT; 0 elsewhere."""
    high: float | None
    """Largest value, larger ones are clipped; None for ln of the vocabulary's size."""
    low: float = 0.0
    """Smallest value."""
    draft_head_reads: int = 0
    """Head reads that it costs in the draft beyond the one that drafts; it is undefined there unless they are made."""


_EVERYWHERE, _AT_LAYERS, _BEFORE = (PRE_SCAN, SCAN, DRAFT), (SCAN, DRAFT), (PRE_SCAN,)
_SINCE = float(MAX_SINCE_DRAFT)

FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("confidence", "C_k = -(1/k) sum of log p over the k likeliest tokens", _AT_LAYERS, MAX_CONFIDENCE),
        Feature("entropy", "H = -sum p log p", _AT_LAYERS, None),
        Feature("trace", "mean of -log p1 where the last positions were left", _EVERYWHERE, MAX_CONFIDENCE),
        Feature("depth", "l / L", _AT_LAYERS, 1.0),
        Feature("surprisal", "-log p1", _AT_LAYERS, MAX_CONFIDENCE),
        Feature("margin", "log p1 - log p2", _AT_LAYERS, MAX_CONFIDENCE),
        Feature(
            "agreement",
            "1 where the likeliest token is that of the previous candidate, else -1; 0 where that is unknown",
            _AT_LAYERS,
            high=1.0,
            low=-1.0,
            draft_head_reads=1,
        ),
        Feature(
            "acceptance",
            "(accepted + 1) / (drafted + 2) in the last 8 rounds that drafted, lookups apart",
            _EVERYWHERE,
            1.0,
        ),
        Feature("since_draft", "rounds since the last that drafted, lookups apart", _EVERYWHERE, _SINCE),
        Feature("drafted", "tokens drafted in this round before this position", _AT_LAYERS, float(MAX_DRAFTED)),
        Feature("survival", "product of p1 over the positions drafted in this round", _AT_LAYERS, 1.0),
        Feature("certainty", "exp(-sum of p2 / p1 over the positions drafted in this round)", _AT_LAYERS, 1.0),
        Feature(
            "chance",
            "c = calibrated probability that the token here is accepted if those drafted before it are: a logistic "
            "regression on -log p1, log p1 - log p2 and the tokens drafted, for each candidate (`lede.forecast`)",
            _AT_LAYERS,
            1.0,
        ),
        Feature("outlook", "product of c over the positions drafted in this round and the one here", _AT_LAYERS, 1.0),
        Feature(
            "match_length",
            "tokens at the text's end that stood somewhere before, 0 for none",
            _BEFORE,
            float(MAX_MATCH),
        ),
        Feature("match_count", "ln(1 + earlier places where the matched suffix stands)", _BEFORE, MAX_COUNT),
        Feature("match_agreement", "share of those places that went on with the proposed token", _BEFORE, 1.0),
        Feature("lookup_hits", "share of the last 16 tokens that a lookup at their place proposed", _BEFORE, 1.0),
        Feature(
            "lookup_acceptance",
            "(accepted + 1) / (drafted + 2) in the last 8 rounds that drafted by lookup",
            _BEFORE,
            1.0,
        ),
        Feature("since_lookup", "rounds since the last that drafted by lookup", _BEFORE, _SINCE),
        Feature("match_remembered", "1 where the match is in a memory of other texts, not in this one", _BEFORE, 1.0),
        Feature("in_scan", "1 in the scan", _AT_LAYERS, 1.0),
        Feature("in_draft", "1 in the draft", _AT_LAYERS, 1.0),
    )
}
"""Every feature by name."""

DEFAULT_FEATURES = ("confidence", "entropy", "trace", "depth")
"""The paper's three, and depth."""

TEXT_FEATURES = ("confidence", "entropy", "trace", "depth", "surprisal", "margin", "agreement")
"""What a process that decides token by token defines: nothing there knows of rounds."""

WALL_CLOCK_FEATURES = (
    "trace",
    "depth",
    "entropy",
    "surprisal",
    "margin",
    "agreement",
    "acceptance",
    "since_draft",
    "drafted",
    "survival",
    "certainty",
    "in_scan",
    "in_draft",
)
"""What a policy that weighs seconds looks at."""

CALIBRATED = ("chance", "outlook")
"""Features that need a `Forecast`, which is fitted on traces."""

LOOKUP_FEATURES = (
    "match_length",
    "match_count",
    "match_agreement",
    "lookup_hits",
    "lookup_acceptance",
    "since_lookup",
)
"""What tells whether copying from the text would be worth it; they need no model."""

MEMORY_FEATURES = (*LOOKUP_FEATURES, "match_remembered")
"""The same for who has a memory of other texts behind his own."""

FOLLOWED = ("entropy", "confidence", "surprisal", "margin", "drafted", "depth")
"""What the text, the layer and the length of the draft tell, whoever decided before."""

CALIBRATED_FEATURES = (*WALL_CLOCK_FEATURES, *CALIBRATED)
"""The same with what is calibrated: the default of training for wall-clock."""


@dataclass(frozen=True)
class FeatureConfig:
    """Which features make up the observation, and their settings."""

    names: tuple[str, ...] = DEFAULT_FEATURES
    """Features in the order of the observation vector."""
    top_k: int = 5
    """How many of the likeliest tokens enter `confidence`."""
    window: int = 8
    """Positions that enter `trace`, in tokens."""
    draft_agreement: bool = False
    """Whether `agreement` is defined in the draft too, at the price of a second head read for each position there."""
    forecast: Forecast | None = None
    """Coefficients of `chance` and `outlook`; training fits them."""

    def __post_init__(self) -> None:
        odd = [name for name in self.names if name not in FEATURES]
        if odd or not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"features {list(self.names)} must be distinct names out of {list(FEATURES)}")
        if self.top_k < 1 or self.window < 1:
            raise ValueError(f"top_k and window must be at least 1, got {self.top_k} and {self.window}")
        if self.draft_agreement and "agreement" not in self.names:
            raise ValueError("draft_agreement pays for the feature 'agreement', which is not among the names")
        if self.forecast is not None and not self.calibrated:
            raise ValueError(f"the forecast serves {' and '.join(CALIBRATED)}, neither of which is among the names")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FeatureConfig:
        """A config back from what `dataclasses.asdict` and JSON made of it."""
        forecast = values.get("forecast")
        found = {**values, "names": tuple(values["names"])}
        return cls(**{**found, "forecast": None if forecast is None else Forecast.from_json(forecast)})

    @property
    def calibrated(self) -> bool:
        """Whether a forecast belongs to the observation."""
        return not set(CALIBRATED).isdisjoint(self.names)

    @property
    def fitted(self) -> Forecast | None:
        """The forecast; None where none belongs to the observation.

        Raises:
            ValueError: One does, but has not been fitted.
        """
        if self.calibrated and self.forecast is None:
            raise ValueError(
                f"the features {' and '.join(name for name in CALIBRATED if name in self.names)} need a forecast: take "
                "the features of a trained policy, or fit one with lede.reference_thresholds.fit_forecast"
            )
        return self.forecast

    @property
    def draft_head_reads(self) -> int:
        """Head reads of a position in the draft."""
        return 1 + int(self.draft_agreement)

    def bounds(self, n_layers: int, vocab_size: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Lowest and highest observation, `(feature,)` each."""
        low, high = _bounds(self.names, vocab_size)
        return low.copy(), high.copy()

    def observe(self, values: Mapping[str, npt.ArrayLike], n_layers: int, vocab_size: int) -> npt.NDArray[np.float32]:
        """The observation `(..., feature)` of values by feature name, clipped to the bounds.

        Args:
            values: Arrays that broadcast to `(...)`, `depth` as layer / n_layers. Those that the observation does not
                name count for the shape alone; a named feature that is missing is 0.
            n_layers: Layers of the model.
            vocab_size: Entries of its vocabulary.

        Raises:
            ValueError: A value belongs to no feature, or the shapes do not fit together.
        """
        arrays = {name: np.asarray(value, dtype=np.float32) for name, value in values.items()}
        if not arrays.keys() <= FEATURES.keys():
            odd = sorted(arrays.keys() - FEATURES.keys())
            raise ValueError(f"values {odd} belong to no feature; features are {list(FEATURES)}")
        shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
        seen = np.zeros((*shape, len(self.names)), dtype=np.float32)
        for i, name in enumerate(self.names):
            if name in arrays:
                seen[..., i] = arrays[name]
        low, high = _bounds(self.names, vocab_size)
        np.maximum(seen, low, out=seen)
        np.minimum(seen, high, out=seen)
        return seen

    def check_token_level(self, who: str) -> None:
        """Raise ValueError when `who`, which decides token by token, does not define one of the features."""
        unknown = [name for name in self.names if name not in TEXT_FEATURES]
        if unknown:
            raise ValueError(
                f"{who} decides token by token and does not define {', '.join(unknown)}; leave them to traces and the "
                f"wall-clock objective, or choose from {', '.join(TEXT_FEATURES)}"
            )


@cache
def _bounds(names: tuple[str, ...], vocab_size: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    features = [FEATURES[name] for name in names]
    low = np.array([feature.low for feature in features], dtype=np.float32)
    highs = (math.log(vocab_size) if feature.high is None else feature.high for feature in features)
    return low, np.array(list(highs), dtype=np.float32)


def __getattr__(name: str) -> Any:
    """What reads logits, imported when asked for: torch takes a second that playing traces can do without."""
    if name in ("Primitives", "primitives", "surprisal"):
        import lede.primitives

        return getattr(lede.primitives, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
