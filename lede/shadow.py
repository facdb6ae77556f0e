"""Shadow tokens: what layers would have drafted at the positions that a round verified anyway.

The states of the wanted layers are kept as they pass, in the draft and in verification, so no layer runs for it; it
costs the head reads.

Shadow tokens are those of raw logits. With logits processors a draft may say otherwise, so what is estimated from
shadow tokens may be off; the text is exact all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lede.models import Block, EarlyExitModel
from lede.policies.base import Shadow


class ShadowReader:
    """Runs layers in the model's place and keeps the states of some.

    Args:
        model: The model.
        layers: Which states to keep, of 1..L-1.

    Raises:
        ValueError: A layer is outside 1..L-1 or given twice.
    """

    def __init__(self, model: EarlyExitModel, layers: Sequence[int]) -> None:
        for layer in layers:
            model.check_exit_layer(layer)
        if len(set(layers)) != len(layers):
            raise ValueError(f"shadow layers {list(layers)} must be distinct")
        self.layers = tuple(layers)
        self._ascending = sorted(layers)
        self._model = model
        self._states: dict[int, list[torch.Tensor]] = {}

    def start(self) -> None:
        """A new round: forget the states of the last one."""
        self._states = {layer: [] for layer in self.layers}

    def run_layers(self, hidden: torch.Tensor, first: int, last: int, block: Block) -> torch.Tensor:
        """As the model's own `run_layers`; every position must pass every layer once a round, in order."""
        for layer in self._ascending:
            if first < layer <= last:
                hidden = self._model.run_layers(hidden, first, layer, block)
                self._states[layer].append(hidden)
                first = layer
        return self._model.run_layers(hidden, first, last, block) if first < last else hidden

    def read(self, tokens: Sequence[int]) -> Shadow:
        """What the layers say at the round's first positions, whose tokens in the text are these."""
        n = len(tokens)
        # positions come one by one in the draft and as a block in verification
        states = [torch.cat(self._states[layer], dim=1)[:, :n] for layer in self.layers]
        logits = self._model.head(torch.cat([s.to(states[0].device) for s in states], dim=1))[0].float()
        best = logits.max(dim=-1)
        probabilities = (best.values - torch.logsumexp(logits, dim=-1)).exp()
        found = torch.stack([best.indices.float(), probabilities]).reshape(2, -1, n).cpu().numpy()
        return Shadow(
            layers=self.layers,
            tokens=found[0].astype(np.int64),
            probabilities=found[1],
            targets=np.array(tokens, dtype=np.int64),
        )
