"""What a decision needs from one head read, as Python numbers, and no more than that.

It is asked at every candidate and every drafted position, so its time counts against what drafting saves. On the CPU
numpy goes over one row of logits with less overhead than torch's operators, in a single buffer that stays in the
nearest cache; elsewhere torch computes and everything comes to the host in one transfer. `lede.primitives` has the same
numbers for whole tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lede.features import FeatureConfig
from lede.primitives import LOWEST_SHIFTED, log_sum_exp, row_of

Row = npt.NDArray[np.floating]

EVEN = 64.0
"""Largest logit up to which the entropy needs no shifted logits: it loses no digit that float32 has to spare."""


class Reading(NamedTuple):
    """Primitives of one position; those that nobody asked for are 0."""

    surprisal: float = 0.0
    """-log p of the likeliest token, in nats."""
    margin: float = 0.0
    """Difference of the two largest log probabilities, in nats."""
    entropy: float = 0.0
    """In nats."""
    confidence: float = 0.0
    """C_k, in nats."""
    token: int = -1
    """The likeliest token, the lowest id among equals."""


class HeadReader:
    """Reads what an observation names off raw logits.

    Everything is allocated once; the buffers make one object unfit for two threads at once.

    Args:
        features: The observation.
        compiled: Reads surprisal, margin, entropy and token of a row by a kernel, or says None; None for no kernels.
    """

    def __init__(
        self, features: FeatureConfig, compiled: Callable[[torch.Tensor], list[float] | None] | None = None
    ) -> None:
        names = set(features.names)
        self._entropy = "entropy" in names
        self._margin = bool(names & {"margin", "certainty", "chance", "outlook"})
        self._top_k = features.top_k if "confidence" in names else 0
        self._powers = np.empty(0, dtype=np.float32)
        self._compiled = None if self._top_k else compiled

    def read(self, logits: torch.Tensor) -> Reading:
        """The reading of raw logits `(vocabulary,)`."""
        found = None if self._compiled is None else self._compiled(logits)
        if found is not None:
            surprisal, margin, entropy, token = found
            return Reading(
                surprisal, margin if self._margin else 0.0, entropy if self._entropy else 0.0, 0.0, int(token)
            )
        row = row_of(logits)
        return self._by_torch(logits) if row is None else self._by_numpy(row)

    def token(self, logits: torch.Tensor) -> int:
        """The likeliest token alone."""
        row = row_of(logits)
        return int(logits.argmax() if row is None else row.argmax())

    def _by_numpy(self, row: Row) -> Reading:
        if self._powers.size != row.size or self._powers.dtype != row.dtype:
            self._powers = np.empty_like(row)
        powers = self._powers
        best = int(row.argmax())
        np.subtract(row, row[best], out=powers)
        margin = entropy = confidence = 0.0
        if self._margin and row.size > 1:
            powers[best] = -np.inf
            margin = -float(np.maximum.reduce(powers))
            powers[best] = 0.0
        if self._entropy:
            np.maximum(powers, LOWEST_SHIFTED, out=powers)
        surprisal, total = log_sum_exp(powers, powers)
        if self._entropy:
            entropy = surprisal + self._spread(row, float(row[best]), total)
        if self._top_k > 1:
            k = min(self._top_k, row.size)
            top = np.partition(row, row.size - k)[row.size - k :]
            confidence = surprisal + float(np.add.reduce(row[best] - top)) / k
        elif self._top_k:
            confidence = surprisal
        return Reading(surprisal, margin, entropy, confidence, best)

    def _spread(self, row: Row, top: float, total: float) -> float:
        """Mean distance of the logits from the largest, by their probabilities; the buffer holds the powers."""
        powers = self._powers
        if abs(top) <= EVEN:
            np.multiply(powers, row, out=powers)
            spread = top - float(np.add.reduce(powers)) / total
            if 0.0 <= spread <= -LOWEST_SHIFTED:  # a banned token's logit breaks it
                return spread
        shifted = np.maximum(row - row.dtype.type(top), LOWEST_SHIFTED)
        return -float(np.add.reduce(np.exp(shifted) * shifted)) / total

    def _by_torch(self, logits: torch.Tensor) -> Reading:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        n_top = min(max(1, self._top_k, 2 * self._margin), wide.shape[-1])
        top = torch.topk(wide, n_top).values if n_top > 1 else wide.max(-1, keepdim=True).values
        shifted, top = wide - top[0], top - top[0]
        log_total = torch.logsumexp(shifted, dim=-1)
        spread = mean = torch.zeros_like(log_total)
        if self._entropy:
            # -inf has probability 0, and 0 times -inf must be 0
            floored = shifted.clamp_min(LOWEST_SHIFTED)
            spread = log_total - (torch.softmax(shifted, dim=-1) * floored).sum()
        if self._top_k:
            mean = log_total - top[: self._top_k].mean()
        parts = [log_total, -top[min(1, n_top - 1)], spread, mean]
        parts.append(logits.argmax(-1).to(wide.dtype))  # exact in float32 up to 2^24 entries
        surprisal, margin, entropy, confidence, token = torch.stack(parts).tolist()  # the one transfer
        return Reading(surprisal, margin, entropy, confidence, int(token))
