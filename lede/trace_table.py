"""Traces of many prompts as one table, with the branches that stand for what follows a wrong draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lede.seeding import Purpose, numpy_stream

if TYPE_CHECKING:
    from lede.buffers.records import PromptTrace

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BranchTable:
    """Branches of all prompts: what the drafter sees after a wrong draft, at the layer that drafted it."""

    row: Ints  # (branch,)
    """Row of the table where the draft was wrong."""
    layer: Ints  # (branch,)
    """Layer that drafted it."""
    length: Ints  # (branch,)
    """Positions that were followed."""
    confidence: Floats  # (branch, depth)
    """C_k at the branch's layer, in nats."""
    entropy: Floats  # (branch, depth)
    """Entropy at the branch's layer, in nats."""
    top1: Floats  # (branch, depth)
    """Log-probability of the likeliest token."""
    top2: Floats  # (branch, depth)
    """Log-probability of the second likeliest token."""
    token: npt.NDArray[np.int32]  # (branch, depth, layer)
    """Likeliest token of every layer up to the branch's, -1 beyond."""

    def __len__(self) -> int:
        return int(self.row.size)


@dataclass(frozen=True, eq=False)
class TraceTable:
    """Prompts one below the other; row `first_row[p] + t - 1` is decision t of prompt p, column l - 1 is layer l."""

    prompt_index: Ints  # (prompt,)
    """Number of each prompt in its collection."""
    first_row: Ints  # (prompt,)
    """Row of each prompt's first decision."""
    n_decided: Ints  # (prompt,)
    """Decisions of each prompt; its text has one token more, which the prefill gives."""
    prompt_length: Ints  # (prompt,)
    """Tokens of each prompt."""
    ended_by_eos: npt.NDArray[np.bool_]  # (prompt,)
    """Whether EOS is the last token."""
    anchor: npt.NDArray[np.float64]  # (prompt,)
    """-log top-1 probability of the whole model at the last prompt position, in nats."""
    max_new_tokens: int
    """Budget of new tokens that the texts were written under."""
    confidence: Floats  # (row, layer)
    """C_k, in nats."""
    entropy: Floats  # (row, layer)
    """Entropy, in nats."""
    top1: Floats  # (row, layer)
    """Log-probability of the likeliest token."""
    top2: Floats  # (row, layer)
    """Log-probability of the second likeliest token."""
    token: npt.NDArray[np.int32]  # (row, layer)
    """Likeliest token."""
    match: Floats  # (row, layer)
    """Probability that a draft of the layer is accepted; 0 or 1 for greedy text."""
    vocab_size: int
    """Entries of the vocabulary, which bounds the entropy."""
    branches: BranchTable | None
    """Branches; None where the traces have none, and the text goes on as the target's after a wrong draft."""
    prompt_ids: tuple[npt.NDArray[np.int64], ...] = ()  # one a prompt, (token,) each
    """Prompts; lookups need them, and nothing else does."""
    token_ids: tuple[npt.NDArray[np.int64], ...] = ()  # one a prompt, (token,) each
    """New tokens, one more than the decisions; likewise."""
    lookups: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What `lede.lookup_table.lookups_of` has made of them."""
    unseen: dict[str, Any] = field(default_factory=dict, repr=False)
    """For a memory made of these texts, by its digest, what each text is shown instead (`lede.phrase_folds`)."""

    @classmethod
    def from_traces(
        cls, traces: Sequence[PromptTrace], max_new_tokens: int, vocab_size: int, use_branches: bool = True
    ) -> TraceTable:
        """Stack traces.

        Args:
            traces: One a prompt, in any order.
            max_new_tokens: Budget that the texts were written under.
            vocab_size: Entries of the vocabulary.
            use_branches: False leaves the branches out.

        Raises:
            ValueError: There is no decision at all, the traces have different numbers of layers, or one is longer than
                the budget.
        """
        if not any(trace.n_decided for trace in traces):
            raise ValueError("the traces hold no decided token: collect prompts with max_new_tokens of at least 2")
        layers = sorted({trace.n_layers for trace in traces})
        if len(layers) > 1:
            raise ValueError(f"the traces come from models of {layers} layers; give those of one model")
        longest = max(trace.token_ids.size for trace in traces)
        if longest > max_new_tokens:
            raise ValueError(f"a trace has {longest} new tokens, more than its budget of {max_new_tokens}")
        n_decided = np.asarray([trace.n_decided for trace in traces], dtype=np.int64)
        first_row = np.concatenate(([0], np.cumsum(n_decided)[:-1]))
        names = ("confidence", "entropy", "top1", "top2", "token", "match")
        stacked: dict[str, Any] = {name: np.concatenate([getattr(t, name) for t in traces]) for name in names}
        return cls(
            prompt_index=np.asarray([trace.prompt_index for trace in traces], dtype=np.int64),
            first_row=first_row,
            n_decided=n_decided,
            prompt_length=np.asarray([trace.prompt_ids.size for trace in traces], dtype=np.int64),
            ended_by_eos=np.asarray([trace.ended_by_eos for trace in traces], dtype=np.bool_),
            anchor=np.asarray([trace.anchor for trace in traces], dtype=np.float64),
            max_new_tokens=max_new_tokens,
            vocab_size=vocab_size,
            branches=_stack_branches(traces, first_row) if use_branches else None,
            prompt_ids=tuple(trace.prompt_ids for trace in traces),
            token_ids=tuple(trace.token_ids for trace in traces),
            **stacked,
        )

    @property
    def n_prompts(self) -> int:
        """Prompts."""
        return int(self.n_decided.size)

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return int(self.match.shape[1])

    @property
    def max_context(self) -> int:
        """Tokens of the longest prompt and its text."""
        return int((self.prompt_length + self.n_decided + 1).max())

    def matches(self, columns: Ints, seed: int) -> npt.NDArray[np.bool_]:
        """Whether drafts at layers `columns` + 1 are accepted, `(row, column)`.

        Sampled texts draw one number a row from a stream of the prompt's own, the same one for all layers: a position
        is drafted on the right text once at most, and layers are compared under the same luck.
        """
        chance = self.match[:, columns]
        if ((chance == 0) | (chance == 1)).all():
            return np.asarray(chance > 0.5)
        draws = [
            numpy_stream(seed, Purpose.MATCHES, int(index)).random(int(n))
            for index, n in zip(self.prompt_index, self.n_decided, strict=True)
        ]
        return np.asarray(np.concatenate(draws)[:, None] < chance)

    def check_ends(self) -> None:
        """Raise ValueError when a text stops before its budget without an end: nobody knows what followed."""
        short = (self.n_decided > 0) & ~self.ended_by_eos & (self.n_decided < self.max_new_tokens - 1)
        if short.any():
            raise ValueError(
                f"the text of prompt {self.prompt_index[short][0]} neither ends nor fills the budget of "
                f"{self.max_new_tokens} new tokens: give the budget that it was written under"
            )

    def branch_of(self, layer: int) -> npt.NDArray[np.int32]:
        """The branch that stands for a wrong draft of a layer at each row, `(row,)`; -1 where the layer has none.

        A wrong draft that was not followed takes the branch of the same layer whose wrong draft had the nearest top-1
        log-probability.
        """
        nearest = np.full(len(self.match), -1, dtype=np.int32)
        if self.branches is None:
            return nearest
        own = np.flatnonzero((self.branches.layer == layer) & (self.branches.length > 0))
        if own.size:
            said = self.top1[self.branches.row[own], layer - 1]
            order = np.argsort(said, kind="stable")
            own, said = own[order], said[order]
            here = self.top1[:, layer - 1]
            above = np.clip(np.searchsorted(said, here), 0, own.size - 1)
            below = np.maximum(above - 1, 0)
            nearest[:] = own[np.where(np.abs(said[below] - here) < np.abs(said[above] - here), below, above)]
            nearest[self.branches.row[own]] = own
        return nearest


def _stack_branches(traces: Sequence[PromptTrace], first_row: Ints) -> BranchTable | None:
    if not sum(trace.branch_row.size for trace in traces):
        return None
    rows = [trace.branch_row + first for trace, first in zip(traces, first_row, strict=True)]
    depth = max(trace.branch_top1.shape[1] for trace in traces)

    def laid(name: str, fill: float = 0.0) -> npt.NDArray[Any]:
        parts = [getattr(trace, name) for trace in traces if trace.branch_row.size]
        short = [[(0, 0), (0, depth - part.shape[1]), *[(0, 0)] * (part.ndim - 2)] for part in parts]
        wide = [np.pad(part, pad, constant_values=fill) for part, pad in zip(parts, short, strict=True)]
        return np.concatenate(wide)

    return BranchTable(
        row=np.concatenate(rows).astype(np.int64),
        layer=np.concatenate([trace.branch_layer for trace in traces]).astype(np.int64),
        length=np.concatenate([trace.branch_length for trace in traces]).astype(np.int64),
        confidence=laid("branch_confidence"),
        entropy=laid("branch_entropy"),
        top1=laid("branch_top1"),
        top2=laid("branch_top2"),
        token=laid("branch_token", -1),
    )
