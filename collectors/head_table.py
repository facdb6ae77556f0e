"""What the head says at every layer of many positions, in one table on the device.

Features of all layers come from one call a chunk of positions, and everything crosses to the host once: the columns
are packed into one tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lede.collectors.host_copies import fetch
from lede.envs import Rules
from lede.features import primitives
from lede.models import EarlyExitModel

LOGITS_AT_ONCE: dict[str, int] = {"cpu": 2**20, "cuda": 2**26}
"""Most logits of a chunk of head reads, by kind of device: on a CPU what its caches hold, 4 MiB in float32, on a GPU
what keeps it busy."""

ROWS_AT_ONCE = 64
"""Head reads of a chunk at least, where the vocabulary is large: fewer would read the head's weights for too little."""

COLUMNS = ("confidence", "entropy", "top1", "top2", "match", "token")
"""Columns of a table; `token` is packed by its bits. `match` is for sampled texts, and 0 for greedy ones."""

Columns = dict[str, npt.NDArray[Any]]


def positions_at_once(model: EarlyExitModel) -> int:
    """Positions of a chunk, every layer of each."""
    logits = LOGITS_AT_ONCE.get(model.device.type, LOGITS_AT_ONCE["cuda"])
    rows = max(ROWS_AT_ONCE, logits // model.vocab_size)
    return max(1, rows // model.n_layers)


def read_heads(model: EarlyExitModel, states: torch.Tensor, rules: Rules) -> torch.Tensor:
    """The columns `(column, position, layer)`, float32, of states `(position, layer, width)`."""
    return torch.cat([_read(model, part, rules) for part in torch.split(states, positions_at_once(model))], dim=1)


def _read(model: EarlyExitModel, states: torch.Tensor, rules: Rules) -> torch.Tensor:
    logits = model.head(states)  # (position, layer, vocabulary)
    read = primitives(logits, rules.features.top_k)
    if rules.warp.greedy:
        match = torch.zeros_like(read.entropy)
    else:
        q = rules.warp.probabilities(logits)
        match = torch.minimum(q, q[:, -1:]).sum(-1).clamp(max=1.0).float()
    token = read.token.int().view(torch.float32)
    return torch.stack([read.confidence, read.entropy, read.top1, read.top2, match, token])


def unpacked(packed: npt.NDArray[np.float32]) -> Columns:
    """Packed columns `(column, ...)` by name; they share no memory with the table."""
    columns = {name: packed[i].copy() for i, name in enumerate(COLUMNS)}
    return {**columns, "token": columns["token"].view(np.int32)}


class HeadTable:
    """Gathers the columns of texts that are being written, position by position.

    Args:
        model: The model.
        rules: Warp and `features.top_k`.
        n_rows: Texts.
        n_positions: Most positions of a text.
        keep_states: Whether the states themselves are kept as well.

    Attributes:
        states: Those, `(row, position, layer, width)`; None unless they are kept.
    """

    def __init__(
        self, model: EarlyExitModel, rules: Rules, n_rows: int, n_positions: int, keep_states: bool = False
    ) -> None:
        self._model, self._rules = model, rules
        self._shape = (n_rows, n_positions, model.n_layers)
        self._packed = torch.zeros((len(COLUMNS), *self._shape), device=model.device)
        self._keeps = keep_states
        self.states: torch.Tensor | None = None
        self._waiting: list[torch.Tensor] = []
        self._rows = torch.arange(n_rows, device=model.device)
        self._first = 0
        self._at_once = positions_at_once(model)

    def add(self, rows: torch.Tensor, position: int, states: torch.Tensor) -> None:
        """Take the states `(row, layer, width)` of some rows `(row,)` at a position.

        They are read when there are enough of them. Until `flush`, the rows stay the same and positions follow one
        another.
        """
        if not self._waiting:
            self._rows, self._first = rows, position
        self._waiting.append(states)
        if len(self._waiting) * len(states) >= self._at_once:
            self.flush()

    def flush(self) -> None:
        """Read what waits to be read."""
        if not self._waiting:
            return
        states = torch.stack(self._waiting, dim=1)
        n_rows, n_positions = states.shape[:2]
        span = slice(self._first, self._first + n_positions)
        read = read_heads(self._model, states.flatten(0, 1), self._rules)
        self._packed[:, self._rows, span] = read.unflatten(1, (n_rows, n_positions))
        if self._keeps:
            if self.states is None:
                self.states = states.new_zeros((*self._shape, states.shape[-1]))
            self.states[self._rows, span] = states
        self._waiting = []

    def fetch(self) -> npt.NDArray[np.float32]:
        """The packed columns `(column, row, position, layer)` on the host."""
        self.flush()
        return fetch(self._packed)
