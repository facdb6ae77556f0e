"""The state of the exit decision, from raw logits.

`Primitives` depend on the text alone and can be stored; what depends on past decisions (the confidence trace) is
computed by `ConfidenceTrace` as the decisions are made. Logarithms are natural, logits are raw: temperature 1, no
processors, at least float32.

Source: LEDE (arXiv 2606.03113), section 3.1. Departs from the paper: k, the window and what enters the trace are not
published and are our choice, and `depth` is ours: without it a Q-network cannot tell layers apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

MAX_CONFIDENCE = 50.0
"""Upper bound of `confidence` and `trace`, in nats; larger values are clipped."""

MAX_SURPRISAL = 1e4
"""Upper bound of -log probability in the primitives, in nats; a banned token has no more."""

FEATURE_NAMES = ("confidence", "entropy", "trace", "depth")


@dataclass(frozen=True)
class FeatureConfig:
    """Which features make up the observation, and their settings."""

    names: tuple[str, ...] = FEATURE_NAMES
    """Features in the order of the observation vector."""
    top_k: int = 5
    """How many of the likeliest tokens enter `confidence`."""
    window: int = 8
    """Positions that enter `trace`, in tokens."""

    def __post_init__(self) -> None:
        odd = [name for name in self.names if name not in FEATURE_NAMES]
        if odd or not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"features {list(self.names)} must be distinct names out of {list(FEATURE_NAMES)}")
        if self.top_k < 1 or self.window < 1:
            raise ValueError(f"top_k and window must be at least 1, got {self.top_k} and {self.window}")

    def bounds(self, n_layers: int, vocab_size: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Lowest and highest observation, `(feature,)` each."""
        low = {"confidence": 0.0, "entropy": 0.0, "trace": 0.0, "depth": 1 / n_layers}
        high = {
            "confidence": MAX_CONFIDENCE,
            "entropy": math.log(vocab_size),
            "trace": MAX_CONFIDENCE,
            "depth": 1.0,
        }
        return (
            np.array([low[name] for name in self.names], dtype=np.float32),
            np.array([high[name] for name in self.names], dtype=np.float32),
        )

    def observe(
        self,
        confidence: npt.ArrayLike,
        entropy: npt.ArrayLike,
        trace: npt.ArrayLike,
        layer: npt.ArrayLike,
        n_layers: int,
        vocab_size: int,
    ) -> npt.NDArray[np.float32]:
        """The observation `(..., feature)` of values `(...)`, clipped to the bounds."""
        values = {
            "confidence": np.asarray(confidence, dtype=np.float32),
            "entropy": np.asarray(entropy, dtype=np.float32),
            "trace": np.asarray(trace, dtype=np.float32),
            "depth": np.asarray(layer, dtype=np.float32) / np.float32(n_layers),
        }
        stacked = np.stack(np.broadcast_arrays(*(values[name] for name in self.names)), axis=-1)
        low, high = self.bounds(n_layers, vocab_size)
        clipped: npt.NDArray[np.float32] = np.clip(stacked, low, high).astype(np.float32)
        return clipped


@dataclass(frozen=True)
class Primitives:
    """What one head read says about the next token, each `(...)`, float32 but for `token`."""

    confidence: torch.Tensor
    """C_k = -(1/k) sum of log p over the k likeliest tokens, at most `MAX_CONFIDENCE`; large when the distribution is
    peaked and k > 1."""
    entropy: torch.Tensor
    """H = -sum p log p, in nats."""
    top1: torch.Tensor
    """Log-probability of the likeliest token."""
    top2: torch.Tensor
    """Log-probability of the second likeliest token."""
    token: torch.Tensor
    """The likeliest token, int64; the lowest id among equals."""


def primitives(logits: torch.Tensor, top_k: int = 5) -> Primitives:
    """Read the primitives off raw logits `(..., vocabulary)`."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_p = torch.log_softmax(wide, dim=-1)
    k = min(top_k, log_p.shape[-1])
    top = torch.topk(log_p, max(k, min(2, log_p.shape[-1])), dim=-1).values
    # masked vocabulary entries may be -inf, where p log p is 0, not NaN
    entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)
    return Primitives(
        confidence=(-top[..., :k].mean(-1)).clamp_max(MAX_CONFIDENCE).float(),  # -inf logits would make it infinite
        entropy=entropy.float(),
        top1=top[..., 0].float(),
        top2=top[..., min(1, top.shape[-1] - 1)].clamp_min(-MAX_SURPRISAL).float(),
        token=logits.argmax(-1),
    )


def surprisal(logits: torch.Tensor) -> float:
    """-log probability of the likeliest token of raw logits `(vocabulary,)`, in nats."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return float(torch.logsumexp(wide, dim=-1) - wide.max())


class ConfidenceTrace:
    """C_trace: mean over the last positions of -log top-1 probability at the layer where the policy left them.

    That layer is the exit layer if the policy drafted at the position and L if it did not; whether the draft was
    accepted does not matter, so no unverified result leaks into the state. Positions are pushed as they are left and
    removed when verification rejects what came before them.

    Args:
        anchor: The layer-L value of the last prompt position, used until a position has been pushed.
        window: Positions that count.
    """

    def __init__(self, anchor: float, window: int) -> None:
        self.window = window
        self.anchor = anchor
        self._values: list[float] = []

    def value(self) -> float:
        """The current trace, in nats."""
        if not self._values:
            return self.anchor
        recent = self._values[-self.window :]
        return math.fsum(recent) / len(recent)

    def push(self, surprisal: float) -> None:
        """Leave a position whose likeliest token had this -log probability."""
        self._values.append(surprisal)

    def drop(self, n_positions: int) -> None:
        """Forget the last `n_positions` positions."""
        if n_positions:
            del self._values[-n_positions:]


def default_candidates(n_layers: int) -> tuple[int, ...]:
    """Candidate layers when none are given: multiples of ceil(L/8) up to L/2, at least one."""
    step = math.ceil(n_layers / 8)
    return tuple(range(step, n_layers // 2 + 1, step)) or (1,)


def parse_candidates(candidates: str | Sequence[int] | None, n_layers: int) -> tuple[int, ...]:
    """Candidate layers from "2,4,8", "all", a sequence, or None for the default.

    Raises:
        ValueError: They are not ascending layers within 1..L-1.
    """
    if n_layers < 2:
        raise ValueError(f"early exit needs a model with at least 2 layers, this one has {n_layers}")
    if candidates is None:
        return default_candidates(n_layers)
    if isinstance(candidates, str):
        if candidates == "all":
            return tuple(range(1, n_layers))
        try:
            candidates = [int(part) for part in candidates.split(",")]
        except ValueError:
            raise ValueError(f"candidates '{candidates}' must look like 2,4,8 or be 'all'") from None
    layers = tuple(int(layer) for layer in candidates)
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] > n_layers - 1:
        raise ValueError(f"candidates {list(layers)} must be ascending layers within 1..{n_layers - 1}")
    return layers
