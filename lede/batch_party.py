"""Rows of a batch that go through layers together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lede.batch_row import BatchRow
from lede.cache import KVCache
from lede.devices import numbers_on
from lede.models import EarlyExitModel


class Party:
    """Rows whose hidden states have reached the same layer, one or more positions of each.

    Rows stand in the order of their places in the cache, so that neighbours stay neighbours.

    Args:
        model: The model.
        cache: Of the batch.
        rows: The rows.
        starts: Position of each row's first state.
        lengths: States of each row.

    Attributes:
        rows: The rows.
        hidden: Their states, `(row, state, width)`, padded on the right to the longest.
        depth: Layers that these went through.
    """

    hidden: torch.Tensor

    def __init__(
        self,
        model: EarlyExitModel,
        cache: KVCache,
        rows: Sequence[BatchRow],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        self._model = model
        self._cache = cache
        self.rows = list(rows)
        self._starts = list(starts)
        self.lengths = list(lengths)
        self.depth = 0
        self._place()

    @classmethod
    def of_tokens(
        cls,
        model: EarlyExitModel,
        cache: KVCache,
        rows: Sequence[BatchRow],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> Party:
        """Rows before the first layer, at these tokens."""
        party = cls(model, cache, rows, starts, [len(each) for each in tokens])
        width = max(party.lengths)
        padded = [[*each, *[each[-1]] * (width - len(each))] for each in tokens]
        party.hidden = model.embed(numbers_on(model.device, padded), party._block)
        return party

    @classmethod
    def of_drafts(
        cls, model: EarlyExitModel, cache: KVCache, depth: int, rows: Sequence[BatchRow], joined: Party | None
    ) -> Party:
        """Rows whose drafts left at `depth`, and those of a party that has come up to it."""
        before = {} if joined is None else {row.number: i for i, row in enumerate(joined.rows)}
        together = sorted([*rows, *(joined.rows if joined is not None else [])], key=lambda row: row.place)
        lengths = [row.draft.n_states for row in together]
        party = cls(model, cache, together, [row.position for row in together], lengths)
        width = max(lengths)
        states: list[torch.Tensor] = []
        for row, length in zip(together, lengths, strict=True):
            if joined is not None and row.number in before:
                own = joined.hidden[before[row.number]][None, :length]
                last = own[:, -1:]
                states.append(own)
            else:
                states.extend(row.draft.states)
                last = row.draft.states[-1][:, -1:]
            states.extend([last] * (width - length))
        party.hidden = torch.cat(states, dim=1).view(len(together), width, -1)
        party.depth = depth
        return party

    def run(self, last: int) -> None:
        """Go on until `last` layers are behind."""
        if last > self.depth:
            self.hidden = self._model.run_layers(self.hidden, self.depth, last, self._block)
            self.depth = last

    def keep(self, rows: Sequence[BatchRow]) -> None:
        """Go on with some of the rows, given in their order."""
        if len(rows) == len(self.rows):
            return
        where = {row.number: i for i, row in enumerate(self.rows)}
        kept = [where[row.number] for row in rows]
        self.rows = list(rows)
        self._starts = [self._starts[i] for i in kept]
        self.lengths = [self.lengths[i] for i in kept]
        self.hidden = self.hidden[numbers_on(self.hidden.device, kept)][:, : max(self.lengths)]
        self._place()

    def states(self) -> list[tuple[BatchRow, torch.Tensor]]:
        """Each row with its states, `(1, state, width)`."""
        own = [state[:, :length] for state, length in zip(self.hidden.split(1), self.lengths, strict=True)]
        return list(zip(self.rows, own, strict=True))

    def logits(self) -> list[torch.Tensor]:
        """A head read of each row's states, `(state, vocabulary)` each; padding is not read."""
        hidden, width = self.hidden, max(self.lengths)
        if min(self.lengths) < width:
            flat = [i * width + j for i, length in enumerate(self.lengths) for j in range(length)]
            hidden = hidden.reshape(1, -1, hidden.shape[-1])[:, numbers_on(hidden.device, flat)]
        logits = self._model.head(hidden)
        return list(logits.reshape(-1, logits.shape[-1]).split(self.lengths))

    def last_logits(self) -> torch.Tensor:
        """A head read of each row's last state, `(row, vocabulary)`."""
        device = self.hidden.device
        ends = numbers_on(device, self.lengths) - 1
        last = self.hidden[torch.arange(len(self.rows), device=device), ends]
        return self._model.head(last[:, None])[:, 0]

    def _place(self) -> None:
        places = [row.place for row in self.rows]
        self._block = self._model.rows_block(self._cache, places, self._starts, self.lengths)
