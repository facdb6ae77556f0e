"""A batch of prompts whose texts the whole model writes, every layer being noted on the way.

The states that a layer leaves at a token are those that it would leave in a pass over the finished text, so a text is
run once and not a second time to be read. Rows stand in lockstep: each is at its t-th new token at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from lede.blocks import Block
from lede.cache import Place
from lede.collectors.branch_walk import draw_tokens
from lede.collectors.head_table import HeadTable, unpacked
from lede.collectors.host_copies import fetch, send
from lede.collectors.rollout import NumberedPrompt
from lede.collectors.texts import TaughtText, Text
from lede.envs import Rules
from lede.features import primitives
from lede.models import EarlyExitModel
from lede.seeding import Purpose, torch_stream

LOOK_EVERY: dict[str, int] = {"cpu": 1, "cuda": 16}
"""Tokens after which the host looks at what was written, by kind of device. A look makes a GPU wait for the host; rows
that EOS has ended meanwhile run on until then, and what they wrote is dropped."""


class TeacherBatch:
    """Writes the texts of a batch.

    Args:
        model: The model.
        prompts: Prompt index and token ids; the index names the streams.
        rules: Budget, warp, `features.top_k`.
        seed: Of the target's draws, one stream a prompt.
        keep_states: Whether the states are kept, and not only what was read off them.

    Attributes:
        cache: Keys and values of the texts in all layers, with room for the longest prompt and the budget.
        places: The prompt of each row of the cache, as a number of the batch.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        prompts: Sequence[NumberedPrompt],
        rules: Rules,
        seed: int = 0,
        keep_states: bool = False,
    ) -> None:
        self.model, self.rules = model, rules
        self._prompts = [(index, list(ids)) for index, ids in prompts]
        n, budget = len(self._prompts), rules.max_new_tokens
        self.cache = model.new_cache(max(len(ids) for _, ids in self._prompts) + budget, n)
        self.places = list(range(n))
        self._table = HeadTable(model, rules, n, budget, keep_states)
        self._new: list[list[int]] = [[] for _ in range(n)]
        self._eos = frozenset(model.eos_token_ids)
        self._anchors = torch.zeros(n, device=model.device)
        self._luck: torch.Tensor | None = None
        if not rules.warp.greedy:
            streams = [torch_stream(seed, Purpose.TOKENS, index) for index, _ in self._prompts]
            numbers = [torch.rand(budget, generator=stream, dtype=torch.float64).numpy() for stream in streams]
            self._luck = send(np.array(numbers), model.device)
        self._look_every = LOOK_EVERY.get(model.device.type, LOOK_EVERY["cuda"])
        self._take(list(range(n)))

    def write(self, on_tokens: Callable[[int], None] | None = None) -> None:
        """Write all texts to their end.

        Args:
            on_tokens: Called with the number of new tokens whenever the host has seen some.
        """
        budget = self.rules.max_new_tokens
        newest, unseen, n_written = self._prefill(), 0, 1
        written = [newest]
        while self._going_on:
            unseen += 1
            if unseen == self._look_every or n_written == budget:
                kept = self._look(written, n_written, on_tokens)
                if not kept:
                    break
                newest = self._keep(kept, newest)
                written, unseen = [], 0
            hidden, likeliest = self._step(newest, n_written)
            if n_written == budget:  # the closing position: read, but nothing follows it
                break
            newest = self._choose(hidden, likeliest, n_written)
            written.append(newest)
            n_written += 1
        self._table.flush()

    def taught(self) -> list[TaughtText]:
        """The texts, read, by their rows of the cache."""
        packed, anchors = self._table.fetch(), fetch(self._anchors)
        found = []
        for number in self.places:
            index, ids = self._prompts[number]
            new = self._new[number]
            text = Text(index, ids, new, new[-1] in self._eos)
            n_read = len(new) - text.ended_by_eos
            states = None if self._table.states is None else self._table.states[number, :n_read]
            found.append(TaughtText(text, float(anchors[number]), unpacked(packed[:, number, :n_read]), states))
        return [each.agreed() for each in found] if self.rules.warp.greedy else found

    def _take(self, going_on: list[int]) -> None:
        """Note which prompts go on; theirs are the first rows of the cache."""
        self._going_on = going_on
        self._numbers = send(np.array(going_on, dtype=np.int64), self.model.device)
        self._lengths = [len(self._prompts[number][1]) for number in going_on]
        self._starts = send(np.array(self._lengths, dtype=np.int64)[:, None], self.model.device)
        self._places = torch.arange(len(going_on), device=self.model.device)[:, None]

    def _prefill(self) -> torch.Tensor:
        """Run the prompts through all layers; their first new tokens `(row,)`."""
        model, prompts = self.model, [ids for _, ids in self._prompts]
        width, n = max(map(len, prompts)), len(prompts)
        padded = send(np.array([[*ids, *[ids[-1]] * (width - len(ids))] for ids in prompts]), model.device)
        if n == 1:
            block = model.block(self.cache, 0, width)
        else:
            block = model.rows_block(self.cache, range(n), [0] * n, [width] * n)
        hidden = model.run_layers(model.embed(padded, block), 0, model.n_layers, block)
        last = hidden[self._places.to(hidden.device), self._starts.to(hidden.device) - 1]
        logits = model.head(last)[:, 0]
        self._anchors = -primitives(logits, 1).top1
        return self._tokens(logits, 0)

    def _step(self, newest: torch.Tensor, n_written: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the newest tokens `(row,)` through all layers, noting each.

        Returns:
            The last states `(row, 1, width)`, and their likeliest tokens `(row,)` where those have been read.
        """
        model = self.model
        block = self._block(n_written - 1)
        hidden = model.embed(newest[:, None], block)
        states = []
        for layer in range(model.n_layers):
            hidden = model.run_layers(hidden, layer, layer + 1, block)
            states.append(hidden.to(model.device))
        return hidden, self._table.add(self._numbers, n_written - 1, torch.cat(states, dim=1))

    def _block(self, offset: int) -> Block:
        """Place one token of each row, `offset` positions behind its prompt; the device is asked nothing."""
        lowest, highest = min(self._lengths) + offset, max(self._lengths) + offset
        if self.cache.batch_size == 1:  # like decoding a single text, compiled layers included
            return self.model.block(self.cache, lowest, 1)
        rows = slice(0, len(self._lengths))
        if lowest == highest:
            positions = torch.arange(lowest, lowest + 1, device=self.model.device)[None]
            place = Place(rows, self._places, slice(lowest, lowest + 1), lowest, lowest + 1)
            return Block(positions, self.cache, lowest, place)
        positions = self._starts + offset
        return Block(positions, self.cache, None, Place(rows, self._places, positions, lowest, highest + 1))

    def _choose(self, hidden: torch.Tensor, likeliest: torch.Tensor | None, n_written: int) -> torch.Tensor:
        if likeliest is not None and self._luck is None:
            return likeliest
        return self._tokens(self.model.head(hidden)[:, 0], n_written)

    def _tokens(self, logits: torch.Tensor, n_written: int) -> torch.Tensor:
        """The whole model's next tokens `(row,)` from logits `(row, vocabulary)`."""
        if self._luck is None:
            return logits.argmax(-1)
        numbers = self._luck[self._numbers, n_written]
        return draw_tokens(self.rules.warp.probabilities(logits), numbers)

    def _look(self, written: list[torch.Tensor], n_written: int, on_tokens: Callable[[int], None] | None) -> list[int]:
        """Take new tokens to the host; the places of the rows that go on, up to the closing position."""
        tokens = fetch(torch.stack(written, dim=1)).tolist()
        kept, n_new = [], 0
        for place, (number, row) in enumerate(zip(self._going_on, tokens, strict=True)):
            end = next((i for i, token in enumerate(row, start=1) if token in self._eos), None)
            self._new[number] += row[:end]
            n_new += len(row[:end])
            if end is None:
                kept.append(place)
        if on_tokens is not None:
            on_tokens(n_new)
        return kept

    def _keep(self, kept: list[int], newest: torch.Tensor) -> torch.Tensor:
        """Move the rows that go on to the front of the cache; their newest tokens, in that order."""
        n = len(self._going_on)
        if len(kept) == n:
            return newest
        self._table.flush()
        order, n_kept = list(range(n)), len(kept)
        free = [place for place in range(n_kept) if place not in set(kept)]
        for place, source in zip(free, [place for place in kept if place >= n_kept], strict=True):
            order[place], order[source] = order[source], order[place]
            self._swap(place, source)
            self.places[place], self.places[source] = self.places[source], self.places[place]
        self._take([self._going_on[place] for place in order[:n_kept]])
        return newest[send(np.array(order[:n_kept]), newest.device)]

    def _swap(self, one: int, other: int) -> None:
        """Let two rows of the cache change places; branches still need the texts that have ended."""
        for buffer in (*self.cache.keys, *self.cache.values):
            if buffer is not None:
                kept = buffer[one].clone()
                buffer[one] = buffer[other]
                buffer[other] = kept
