"""What decisions read off a row of logits, as one program to compile: the numbers of `lede.head_reading`."""

from __future__ import annotations

import torch
from torch import nn

from lede.primitives import LOWEST_SHIFTED


class LogitReading(nn.Module):
    """Surprisal, margin and entropy of the likeliest token, in nats, and the token, `(4,)` of logits `(vocabulary,)`.

    numpy goes over the row seven times, which has left the nearest cache each time; compiled it is gone over thrice.
    The token is exact in float32 up to 2^24 entries.
    """

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """The four numbers, of the dtype of the logits."""
        best, token = logits.amax(-1), logits.argmax(-1)
        places = torch.arange(logits.shape[-1], device=logits.device)
        second = torch.where(places == token, -torch.inf, logits).amax(-1)
        shifted = (logits - best).clamp_min(LOWEST_SHIFTED)
        powers = shifted.exp()
        total = powers.sum(-1)
        surprisal = total.log()
        spread = (powers * shifted).sum(-1) / total
        return torch.stack([surprisal, best - second, surprisal - spread, token.to(logits.dtype)])
