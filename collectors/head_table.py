"""What the head says at every layer of many positions, in one table on the device.

Features of all layers come from one call a chunk of positions, in memory that is taken once, and everything crosses to
the host once: the columns are packed into one tensor.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lede.collectors.host_copies import fetch
from lede.ends import Readout
from lede.envs import Rules
from lede.fast_linear import COLUMNS as FEW_ROWS
from lede.fast_linear import FastLinear
from lede.features import primitives
from lede.models import EarlyExitModel
from lede.onednn import is_packable
from lede.packed_weights import PackedWeight

LOGITS_AT_ONCE: dict[str, int] = {"cpu": 2**20, "cuda": 2**26}
"""Most logits of a chunk of head reads, by kind of device: on a CPU what its caches hold, 4 MiB in float32, on a GPU
what keeps it busy."""

ROWS_AT_ONCE = 64
"""Head reads of a chunk at least, where the vocabulary is large: fewer would read the head's weights for too little."""

COLUMNS = ("confidence", "entropy", "top1", "top2", "match", "token")
"""Columns of a table; `token` is packed by its bits. `match` is for sampled texts, and 0 for greedy ones."""

TOKEN = COLUMNS.index("token")

Columns = dict[str, npt.NDArray[Any]]


def positions_at_once(model: EarlyExitModel) -> int:
    """Positions of a chunk, every layer of each."""
    logits = LOGITS_AT_ONCE.get(model.device.type, LOGITS_AT_ONCE["cuda"])
    rows = max(ROWS_AT_ONCE, logits // model.vocab_size)
    return max(1, rows // model.n_layers)


def read_heads(model: EarlyExitModel, states: torch.Tensor, rules: Rules) -> torch.Tensor:
    """The columns `(column, position, layer)`, float32, of states `(position, layer, width)`."""
    return ChunkReader(model, rules).read(states)


class ChunkReader:
    """Reads heads chunk by chunk, every chunk in the same memory.

    On the CPU a float32 head is read from a packed copy, which goes with the reader. Its products are the same bit for
    bit and take four fifths of the time. A packed head needs as much memory again; the layers' weights stay as they
    are, since a batch goes over each of them once a token, and over the head once a token and layer.

    Args:
        model: The model.
        rules: Warp and `features.top_k`.

    Attributes:
        at_once: Most positions of a chunk.
    """

    def __init__(self, model: EarlyExitModel, rules: Rules) -> None:
        self._model, self._rules = model, rules
        self.at_once = positions_at_once(model)
        self._powers: torch.Tensor | None = None
        self._packed = _packed_readout(model)

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """The columns `(column, position, layer)`, float32, of states `(position, layer, width)`."""
        n_chunks = -(-len(states) // self.at_once)  # of even sizes: a small one would read the weights for too little
        return torch.cat([self._chunk(part) for part in torch.tensor_split(states, n_chunks)], dim=1)

    def _chunk(self, states: torch.Tensor) -> torch.Tensor:
        rules = self._rules
        logits = self._logits(states)
        match = None
        if not rules.warp.greedy:
            q = rules.warp.probabilities(logits)
            match = torch.minimum(q, q[:, -1:]).sum(-1).clamp(max=1.0).float()
        read = primitives(logits, rules.features.top_k, self._room(logits))
        if match is None:
            match = torch.zeros_like(read.entropy)
        token = read.token.int().view(torch.float32)
        return torch.stack([read.confidence, read.entropy, read.top1, read.top2, match, token])

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits `(position, layer, vocabulary)`."""
        if self._packed is None or states[..., 0].numel() <= max(FEW_ROWS):  # fewer go by another kernel
            return self._model.head(states)
        return self._packed(states)

    def _room(self, logits: torch.Tensor) -> torch.Tensor:
        """Room for as many numbers as there are logits."""
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        if self._powers is None or len(self._powers) < len(logits) or self._powers.dtype != dtype:
            self._powers = torch.empty((self.at_once, *logits.shape[1:]), dtype=dtype, device=logits.device)
        return self._powers[: len(logits)]


def _packed_readout(model: EarlyExitModel) -> Readout | None:
    """The model's readout with a packed copy of its head; None where that isn't bit for bit the same, or is there."""
    head = model.readout.head
    if not isinstance(head, FastLinear) or head.packed is not None or model.compiled is not None:
        return None
    if head.weight.dtype != torch.float32 or not is_packable(head.weight):
        return None
    readout, twin = copy.copy(model.readout), copy.copy(head)
    twin.packed = PackedWeight(head.weight, transposed=False)
    readout.head = twin
    return readout


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
        self._shape = (n_rows, n_positions, model.n_layers)
        self._packed = torch.zeros((len(COLUMNS), *self._shape), device=model.device)
        self._keeps = keep_states
        self.states: torch.Tensor | None = None
        self._waiting: list[torch.Tensor] = []
        self._rows = torch.arange(n_rows, device=model.device)
        self._first = 0
        self._reader = ChunkReader(model, rules)

    def add(self, rows: torch.Tensor, position: int, states: torch.Tensor) -> torch.Tensor | None:
        """Take the states `(row, layer, width)` of some rows `(row,)` at a position.

        They are read when there are enough of them. Until `flush`, the rows stay the same and positions follow one
        another.

        Returns:
            The last layer's likeliest tokens `(row,)`, where a position has enough rows to be read by itself; else
            None.
        """
        if not self._waiting:
            self._rows, self._first = rows, position
        self._waiting.append(states)
        if len(self._waiting) * len(states) >= self._reader.at_once:
            self.flush()
        if len(states) < self._reader.at_once:
            return None
        return self._packed[TOKEN, rows, position, -1].view(torch.int32).long()

    def flush(self) -> None:
        """Read what waits to be read."""
        if not self._waiting:
            return
        states = torch.stack(self._waiting, dim=1)
        n_rows, n_positions = states.shape[:2]
        span = slice(self._first, self._first + n_positions)
        read = self._reader.read(states.flatten(0, 1))
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
