"""Observations of single positions while decoding: the same numbers as `FeatureConfig.observe`, without its overhead.

Only what the observation names is looked up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lede.features import (
    DRAFT,
    FEATURES,
    MAX_CONFIDENCE,
    MAX_COUNT,
    MAX_DRAFTED,
    MAX_SINCE_DRAFT,
    MEMORY_FEATURES,
    PRE_SCAN,
    SCAN,
    FeatureConfig,
)
from lede.head_reading import HeadReader, Reading
from lede.history import History

Observation = npt.NDArray[np.float32]

_NOTHING_READ = Reading()
_NO_LOOKUP = (0.0,) * len(MEMORY_FEATURES)


class Doubt:
    """What speaks against the draft of this round, summed over its positions at the exit layer."""

    __slots__ = ("log_outlook", "positions", "runner_up", "surprisal")

    def __init__(self) -> None:
        self.positions: list[tuple[float, float]] = []
        """-log p1 and log p1 - log p2 of those that are not in `log_outlook` yet, in nats."""
        self.log_outlook = 0.0
        """Of the logarithm of the calibrated chance; an observer brings it up to date."""
        self.surprisal = 0.0
        """Of -log p1, in nats."""
        self.runner_up = 0.0
        """Of p2 / p1."""

    def add(self, surprisal: float, margin: float) -> None:
        """A position is drafted."""
        self.surprisal += surprisal
        self.runner_up += math.exp(-margin)
        self.positions.append((surprisal, margin))


class Observer:
    """Makes the observations of one policy on one model.

    Args:
        features: What is observed.
        n_layers: Layers of the model.
        vocab_size: Entries of its vocabulary.
        compiled: As `HeadReader` takes it.
    """

    def __init__(
        self,
        features: FeatureConfig,
        n_layers: int,
        vocab_size: int,
        compiled: Callable[[torch.Tensor], list[float] | None] | None = None,
    ) -> None:
        self.features = features
        self.n_layers = n_layers
        self.wants_survival = "survival" in features.names
        self.wants_certainty = not {"certainty", "outlook"}.isdisjoint(features.names)
        """Whether margins of drafted positions are wanted."""
        self.wants_agreement = "agreement" in features.names
        self._copies = not set(MEMORY_FEATURES).isdisjoint(features.names)
        self._forecast = features.fitted
        self._reader = HeadReader(features, compiled)
        self._most_entropy = math.log(vocab_size)
        places = {name: i for i, name in enumerate(FEATURES)}
        self._several = len(features.names) > 1
        self._pick: Any = itemgetter(*(places[name] for name in features.names))

    def read(self, logits: torch.Tensor) -> Reading:
        """What the observation needs from raw logits `(vocabulary,)`."""
        return self._reader.read(logits)

    def token(self, logits: torch.Tensor) -> int:
        """The likeliest token of raw logits `(vocabulary,)`."""
        return self._reader.token(logits)

    def before_scan(self, history: History) -> Observation:
        """The observation `(feature,)` of the pre-scan."""
        return self._assemble(PRE_SCAN, history, 0, _NOTHING_READ, -1, 0, 0.0, 0.0, 0.0, 0.0)

    def in_scan(self, history: History, layer: int, reading: Reading, token_before: int) -> Observation:
        """The observation `(feature,)` of a candidate in the scan.

        Args:
            history: Of the text.
            layer: The candidate.
            reading: Of the candidate.
            token_before: The likeliest token of the candidate inspected before it; -1 for none.
        """
        chance = 0.0
        if self._forecast is not None:
            chance = math.exp(self._forecast.log_chance(layer, reading.surprisal, reading.margin, 0))
        return self._assemble(SCAN, history, layer, reading, token_before, 0, 1.0, 1.0, chance, chance)

    def in_draft(
        self, history: History, layer: int, reading: Reading, token_before: int, n_drafted: int, doubt: Doubt
    ) -> Observation:
        """The observation `(feature,)` of a position in the draft.

        Args:
            history: Of the text.
            layer: The exit layer.
            reading: Of the position at the exit layer.
            token_before: The position's likeliest token at the candidate below the exit layer; -1 if nobody read it.
            n_drafted: Tokens drafted before it in this round.
            doubt: What their positions said at the exit layer.
        """
        survival, certainty = math.exp(-doubt.surprisal), math.exp(-doubt.runner_up)
        chance = outlook = 0.0
        if self._forecast is not None:
            log_chance = self._forecast.log_chance
            first = n_drafted - len(doubt.positions)
            for place, (surprisal, margin) in enumerate(doubt.positions, first):
                doubt.log_outlook += log_chance(layer, surprisal, margin, place)
            doubt.positions.clear()
            here = log_chance(layer, reading.surprisal, reading.margin, n_drafted)
            chance, outlook = math.exp(here), math.exp(doubt.log_outlook + here)
        return self._assemble(
            DRAFT, history, layer, reading, token_before, n_drafted, survival, certainty, chance, outlook
        )

    def _before(self, history: History) -> tuple[float, ...]:
        """`MEMORY_FEATURES` of the text."""
        index, match = history.index, history.match
        length, count, agreement, remembered = 0, 0.0, 0.0, False
        if match is not None:
            length, count, agreement = match.length, min(math.log1p(match.occurrences), MAX_COUNT), match.agreement
            remembered = match.remembered
        hits, lookups = 0.0 if index is None else index.hits, history.lookups
        return length, count, agreement, hits, lookups.acceptance, min(lookups.since, MAX_SINCE_DRAFT), remembered

    def _assemble(
        self,
        stage: int,
        history: History,
        layer: int,
        reading: Reading,
        token_before: int,
        n_drafted: int,
        survival: float,
        certainty: float,
        chance: float,
        outlook: float,
    ) -> Observation:
        surprisal, margin, entropy, confidence, token = reading
        trace, most = history.trace_value(), MAX_CONFIDENCE
        values = (  # in the order of FEATURES, clipped; numpy's clip would take longer than all the rest
            confidence if confidence < most else most,
            0.0 if entropy < 0.0 else entropy if entropy < self._most_entropy else self._most_entropy,
            trace if trace < most else most,
            layer / self.n_layers,
            surprisal if surprisal < most else most,
            margin if margin < most else most,
            0.0 if token_before < 0 else 1.0 if token == token_before else -1.0,
            history.layers.acceptance,
            min(history.layers.since, MAX_SINCE_DRAFT),
            n_drafted if n_drafted < MAX_DRAFTED else MAX_DRAFTED,
            survival,
            certainty,
            chance,
            outlook,
            *(self._before(history) if stage == PRE_SCAN and self._copies else _NO_LOOKUP),
            stage == SCAN,
            stage == DRAFT,
        )
        # itemgetter gives a bare value for a single name
        picked = self._pick(values)
        return np.array(picked if self._several else (picked,), dtype=np.float32)
