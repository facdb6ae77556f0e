"""What a head read says about the next token: the primitives, which depend on the text alone.

Logarithms are natural, logits are raw: temperature 1, no processors, at least float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lede.features import MAX_CONFIDENCE, MAX_SURPRISAL

LOWEST_SHIFTED = -80.0
"""Where logits that far below the largest are taken to be for the entropy: they count for nothing there, and neither
-inf nor subnormal numbers, which are slow, come up."""


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
    row = row_of(logits)
    if row is not None:
        shifted = row - row.max()
        return log_sum_exp(shifted, shifted)[0]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return float(torch.logsumexp(wide - wide.max(), dim=-1))


def row_of(logits: torch.Tensor) -> npt.NDArray[np.floating] | None:
    """Logits `(vocabulary,)` as numpy sees them, without a copy; None where it can't or is too coarse."""
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        return logits.detach().numpy()
    return None


def log_sum_exp(shifted: npt.NDArray[np.floating], powers: npt.NDArray[np.floating]) -> tuple[float, float]:
    """Log of the sum of exponentials, and the sum.

    Args:
        shifted: Logits less the largest, `(vocabulary,)`.
        powers: Where the exponentials go; may be `shifted`.
    """
    np.exp(shifted, out=powers)
    total = float(np.add.reduce(powers))  # pairwise, which keeps the rounding of a large vocabulary small
    return math.log(total), total
