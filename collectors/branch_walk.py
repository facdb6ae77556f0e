"""The drafter on its way along branches: layers 1..l over tokens of its own, behind texts that the teacher has read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lede.blocks import Block
from lede.buffers.records import BRANCH_DTYPES
from lede.cache import KVCache, Place
from lede.collectors.host_copies import fetch, send
from lede.envs import Rules
from lede.features import primitives
from lede.models import EarlyExitModel

Ints = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]


class BranchCache(KVCache):
    """Keys and values of branches: the teacher's up to where a branch leaves its text, then the branch's own.

    The teacher's are copied a layer at a time, as the layer looks at them, so that many branches of a large model fit.

    Args:
        taught: The teacher's cache, filled by the texts; it has room for the ends of the branches.
        text: Row of the teacher's cache that each branch leaves, `(branch,)`.
        start: Position of the first token of each branch, `(branch,)`.
        depth: Most tokens of a branch.
    """

    def __init__(self, taught: KVCache, text: torch.Tensor, start: torch.Tensor, depth: int) -> None:
        super().__init__(taught.n_layers, taught.capacity, text.numel(), taught.windows)
        self.step = 0
        self._taught = taught
        self._text = text
        self._leaves_at = start
        self._depth = depth

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values `(row, kv_head, 1, head_width)` of branches at `step`; return what they may look at."""
        return (
            self._extend(self.keys, self._taught.keys[layer_idx], key_states, layer_idx),
            self._extend(self.values, self._taught.values[layer_idx], value_states, layer_idx),
        )

    def _extend(
        self, own: list[torch.Tensor | None], taught: torch.Tensor | None, states: torch.Tensor, layer: int
    ) -> torch.Tensor:
        assert taught is not None, f"the teacher has not been through layer {layer + 1}"
        assert self._place is not None, "branches come as ragged rows"
        mine = own[layer]
        if mine is None:
            shape = (self.batch_size, states.shape[1], self._depth, states.shape[3])
            mine = own[layer] = states.new_zeros(shape)
        rows = self._place.index[:, 0].to(mine.device)
        mine[rows, :, self.step] = states[:, :, 0]
        seen = taught[self._text.to(taught.device)[rows], :, : self._place.extent]  # indexing by a tensor copies
        n_own = self.step + 1
        slots = self._leaves_at.to(mine.device)[rows][:, None] + torch.arange(n_own, device=mine.device)
        seen[torch.arange(len(rows), device=mine.device)[:, None], :, slots] = mine[rows, :, :n_own].transpose(1, 2)
        return seen


class BranchWalk:
    """A chunk of branches of one model, step by step together.

    Args:
        model: The model.
        rules: Warp and `features.top_k`.
        cache: Where the branches leave their texts.
        start: Position of the first token of each branch, `(branch,)`.
        layers: Layer of each branch, descending.
        tokens: First token of each branch, the wrong draft, `(branch,)`.
        luck: Uniform numbers `(branch, depth)`, one a drafted token; used when sampling.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        rules: Rules,
        cache: BranchCache,
        start: Ints,
        layers: Ints,
        tokens: torch.Tensor,
        luck: npt.NDArray[np.float64],
    ) -> None:
        self.model, self.rules = model, rules
        self._cache, self._start, self._layers, self._tokens, self._luck = cache, start, layers, tokens, luck
        shape = (len(layers), luck.shape[1])
        named = ("branch_confidence", "branch_entropy", "branch_top1", "branch_top2")
        self._read = {name: torch.zeros(shape, device=model.device) for name in named}
        self._token = torch.full((*shape, model.n_layers), -1, dtype=torch.int32, device=model.device)

    def run(self, room: Ints) -> Arrays:
        """Follow every branch to EOS, the depth, or its `room` in positions `(branch,)`; the arrays of `PromptTrace`.

        `branch_length` is 0 where the wrong draft is EOS: nothing follows it.
        """
        going, eos = np.arange(len(self._layers)), list(self.model.eos_token_ids)
        lengths = np.zeros(len(going), dtype=np.int64)
        for step in range(self._luck.shape[1]):
            ended = np.isin(fetch(self._tokens)[going], eos)
            going = going[~ended & (step < room[going])]
            if not going.size:
                break
            self._take(going, step)
            lengths[going] = step + 1
        arrays: Arrays = {name: fetch(column) for name, column in self._read.items()}
        arrays |= {"branch_token": fetch(self._token), "branch_layer": self._layers, "branch_length": lengths}
        return {name: column.astype(BRANCH_DTYPES[name], copy=False) for name, column in arrays.items()}

    def _take(self, going: Ints, step: int) -> None:
        """One token further: read it at every layer up to the branch's, and draft the next one."""
        model, cache = self.model, self._cache
        cache.step = step
        index = send(going, model.device)
        positions = send(self._start[going][:, None] + step, model.device)
        block = self._block(going, step, positions, index)
        hidden = model.embed(self._tokens[index][:, None], block)
        layers = self._layers[going]
        for layer in range(1, int(layers[0]) + 1):
            # deepest first, so those that go on stand in front of those that leave
            n_here, n_on = np.searchsorted(-layers, [-layer, -layer - 1], side="right").tolist()
            if n_here < len(hidden):
                hidden = hidden[:n_here]
                block = self._block(going[:n_here], step, positions[:n_here], index[:n_here])
            hidden = model.run_layers(hidden, layer - 1, layer, block)
            logits = model.head(hidden.to(model.device))[:, 0]
            self._token[index[:n_here], step, layer - 1] = logits.argmax(-1).int()
            if n_on < n_here:
                self._leave(going[n_on:n_here], step, logits[n_on:])

    def _block(self, going: Ints, step: int, positions: torch.Tensor, index: torch.Tensor) -> Block:
        """Place one token of each branch; the device is asked nothing."""
        extent = int(self._start[going].max()) + step + 1
        return Block(positions, self._cache, None, Place(index, index[:, None], positions, 0, extent))

    def _leave(self, going: Ints, step: int, logits: torch.Tensor) -> None:
        """Note what branches see at their own layer, and the token that they draft."""
        index = send(going, self.model.device)
        read = primitives(logits, self.rules.features.top_k)
        for name, column in self._read.items():
            column[index, step] = getattr(read, name.removeprefix("branch_"))
        warp = self.rules.warp
        self._tokens[index] = (
            read.token
            if warp.greedy
            else draw_tokens(warp.probabilities(logits), send(self._luck[going, step], logits.device))
        )


def draw_tokens(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Tokens `(row,)` from weights `(row, vocabulary)`, which need not sum to 1, by uniform numbers `(row,)`, float64.

    The numbers are looked up in the cumulated weights, so that neither the batch nor the device changes the tokens.
    """
    sums = weights.double().cumsum(-1)
    total = sums[:, -1:]
    # strictly below the total, where no token is left to be found
    wanted = torch.minimum(numbers[:, None] * total, torch.nextafter(total, -total))
    return torch.searchsorted(sums, wanted, right=True)[:, 0]
