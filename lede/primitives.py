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

BLOCK = 128
"""Entries of a vocabulary whose largest is found at once."""


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


def primitives(logits: torch.Tensor, top_k: int = 5, powers: torch.Tensor | None = None) -> Primitives:
    """Read the primitives off raw logits `(..., vocabulary)`, of any floating dtype.

    It is asked for every layer of every token that the teacher reads, so it goes over the vocabulary as seldom as it
    can: once for the largest of every block, and once each to shift, to raise and to sum.

    Args:
        logits: Raw logits.
        top_k: How many of the likeliest tokens enter `confidence`.
        powers: Where the exponentials go, of the logits' shape, float64 where they are and float32 otherwise. Then the
            logits are overwritten as well, and nothing as large as they are is allocated: fresh memory comes from the
            system page by page, which takes longer than all of the rest. None leaves the logits alone.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    top, token = _largest(wide, max(top_k, 2))
    best = top[..., :1]
    # masked vocabulary entries may be -inf, where p log p is 0, not NaN
    shifted = wide - best if powers is None else wide.sub_(best)
    powers = torch.exp(shifted.clamp_min_(LOWEST_SHIFTED), out=powers)
    total = powers.sum(-1)
    spread = powers.mul_(shifted).sum(-1)
    log_total = total.log()
    log_top = top - best - log_total[..., None]
    return Primitives(
        # -inf logits would make it infinite
        confidence=(-log_top[..., :top_k].mean(-1)).clamp_max(MAX_CONFIDENCE).float(),
        entropy=(log_total - spread / total).float(),
        top1=log_top[..., 0].float(),
        top2=log_top[..., min(1, top.shape[-1] - 1)].clamp_min(-MAX_SURPRISAL).float(),
        token=token,
    )


def _largest(wide: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of `(..., vocabulary)`, descending, and where the first of the largest stands, `(...)`.

    The k largest stand in the k blocks with the largest maxima, so only these are sorted: torch sorts a whole
    vocabulary more slowly than a head computes it.
    """
    size = wide.shape[-1]
    n_blocks, rest = divmod(size, BLOCK)
    if n_blocks < 2 * k:
        return torch.topk(wide, min(k, size), dim=-1).values, wide.argmax(-1)
    blocks = wide[..., : size - rest].unflatten(-1, (n_blocks, BLOCK))
    highest = blocks.amax(-1)
    chosen = torch.topk(highest, k, dim=-1).indices[..., None].expand(*highest.shape[:-1], k, BLOCK)
    seen = blocks.gather(-2, chosen).flatten(-2)
    first = highest.argmax(-1, keepdim=True)  # the lowest of equals
    inside = blocks.gather(-2, first[..., None].expand(*first.shape, BLOCK))[..., 0, :]
    token = first[..., 0] * BLOCK + inside.argmax(-1)
    if rest:
        end = wide[..., size - rest :]
        seen = torch.cat([seen, end], dim=-1)
        higher = end.amax(-1) > highest.amax(-1)
        token = torch.where(higher, size - rest + end.argmax(-1), token)
    return torch.topk(seen, k, dim=-1).values, token


def surprisal(logits: torch.Tensor) -> float:
    """-log probability of the likeliest token of raw logits `(vocabulary,)`, in nats."""
    row = row_of(logits)
    if row is not None:
        shifted = row - row.max()
        return log_sum_exp(shifted, shifted)[0]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return float(torch.logsumexp(wide - wide.max(), dim=-1))


def surprisals(logits: torch.Tensor) -> list[float]:
    """The same for each row of `(row, vocabulary)`; one transfer from a device."""
    if logits.is_cpu:
        return [surprisal(row) for row in logits]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    found: list[float] = torch.logsumexp(wide - wide.amax(-1, keepdim=True), dim=-1).tolist()
    return found


def row_of(logits: torch.Tensor) -> npt.NDArray[np.floating] | None:
    """Logits `(vocabulary,)` as numpy sees them, at least float32; None where they are not on the CPU."""
    if not logits.is_cpu:
        return None
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return wide.detach().numpy() if wide.requires_grad else wide.numpy()


def log_sum_exp(shifted: npt.NDArray[np.floating], powers: npt.NDArray[np.floating]) -> tuple[float, float]:
    """Log of the sum of exponentials, and the sum.

    Args:
        shifted: Logits less the largest, `(vocabulary,)`.
        powers: Where the exponentials go; may be `shifted`.
    """
    np.exp(shifted, out=powers)
    total = float(np.add.reduce(powers))  # pairwise, which keeps the rounding of a large vocabulary small
    return math.log(total), total
