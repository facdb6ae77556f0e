"""What a store holds: the records of one prompt and the settings that all of them share.

Records are frozen dataclasses of numpy arrays. Arrays are cast to the dtype named beside each field and their shapes
checked against one another, so whatever reaches a store is consistent.

A prompt of P tokens is prefilled and yields the first new token without a decision. Decision t (`token_index`, from 1)
predicts new token t + 1, so T new tokens mean T - 1 decided tokens, `token_index` 1..T-1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

BRANCH_DEPTH = 11
"""Positions that a branch follows unless told otherwise: the cap of a draft, 12, less the wrong draft itself."""

CLOSING_DTYPES: Mapping[str, npt.DTypeLike] = {
    "closing_confidence": np.float32,
    "closing_entropy": np.float32,
    "closing_top1": np.float32,
    "closing_top2": np.float32,
    "closing_token": np.int32,
}
"""Arrays of the closing state, the one after the last decision; `(layer,)` each."""

BRANCH_DTYPES: Mapping[str, npt.DTypeLike] = {
    "branch_row": np.int32,
    "branch_layer": np.int16,
    "branch_length": np.int16,
    "branch_confidence": np.float32,
    "branch_entropy": np.float32,
    "branch_top1": np.float32,
    "branch_top2": np.float32,
    "branch_token": np.int32,
}
"""Arrays of branches; the first axis of each is the branch."""


def branch_shapes(n_branches: int, depth: int, n_layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of branches."""
    each = dict.fromkeys(("branch_row", "branch_layer", "branch_length"), (n_branches,))
    positions = dict.fromkeys(BRANCH_DTYPES, (n_branches, depth))
    return {**positions, **each, "branch_token": (n_branches, depth, n_layers)}


class StoreError(ValueError):
    """A store is damaged or is no store of lede; the message names the shard, array or file."""


def _cast(record: Any, dtypes: Mapping[str, npt.DTypeLike]) -> None:
    for name, dtype in dtypes.items():
        object.__setattr__(record, name, np.asarray(getattr(record, name), dtype=dtype))


def _check_shapes(record: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        got = getattr(record, name).shape
        if got != shape:
            kind, prompt = type(record).__name__, record.prompt_index
            raise ValueError(f"{kind} of prompt {prompt}: `{name}` has shape {got}, expected {shape}")


def _check_text(record: Any) -> None:
    kind, prompt = type(record).__name__, record.prompt_index
    if prompt < 0:
        raise ValueError(f"{kind}: prompt_index must not be negative, got {prompt}")
    for name in ("prompt_ids", "token_ids"):
        ids = getattr(record, name)
        if ids.ndim != 1 or ids.size == 0:
            raise ValueError(f"{kind} of prompt {prompt}: `{name}` must hold at least one id, got shape {ids.shape}")


@dataclass(frozen=True, eq=False)
class PromptTrace:
    """Full information about one prompt: what every layer says about every decided token.

    Layer l of the model is column l - 1; row t - 1 belongs to decision t. Logarithms are natural and come from raw
    logits (see `lede.features`).

    A branch is the drafter rolled on, at one layer, from a wrong draft: what deployment sees after an error that it
    doesn't know of yet. At its position 0 the text is the target's up to the wrong draft, and the wrong draft; each
    further position adds what the layer drafts there. A trace without branches leaves their arrays out.
    """

    prompt_index: int
    """Position of the prompt in the collection, from 0."""
    prompt_ids: npt.NDArray[np.int64]  # (prompt,)
    """Token ids of the prompt."""
    token_ids: npt.NDArray[np.int64]  # (token,)
    """The target's new tokens, EOS included if it was drawn."""
    ended_by_eos: bool
    """Whether EOS ended the text; otherwise the budget did (truncated)."""
    anchor: float
    """Layer-L value of -log top-1 probability at the last prompt position, in nats; where the trace starts."""
    confidence: npt.NDArray[np.float32]  # (token - 1, layer)
    """C_k of each layer, in nats."""
    entropy: npt.NDArray[np.float32]  # (token - 1, layer)
    """Entropy of each layer, in nats."""
    top1: npt.NDArray[np.float32]  # (token - 1, layer)
    """Log-probability of the likeliest token."""
    top2: npt.NDArray[np.float32]  # (token - 1, layer)
    """Log-probability of the second likeliest token."""
    token: npt.NDArray[np.int32]  # (token - 1, layer)
    """The likeliest token."""
    match: npt.NDArray[np.float32]  # (token - 1, layer)
    """Agreement with the target's token, 0 or 1, or with sampling beta = sum_v min(p(v), q_l(v))."""
    closing_confidence: npt.NDArray[np.float32]  # (layer,)
    """C_k at the position of the last new token, after the last decision; zeros when EOS ended the text."""
    closing_entropy: npt.NDArray[np.float32]  # (layer,)
    """Entropy at that position; zeros when EOS ended the text."""
    closing_top1: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))  # (layer,)
    """Log-probability of the likeliest token there; zeros when EOS ended the text, or when left out."""
    closing_top2: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))  # (layer,)
    """Log-probability of the second likeliest token there; zeros when EOS ended the text."""
    closing_token: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))  # (layer,)
    """The likeliest token there; zeros when EOS ended the text."""
    branch_row: npt.NDArray[np.int32] = field(default_factory=lambda: _no_branches("branch_row"))  # (branch,)
    """Row of the decision whose draft was wrong."""
    branch_layer: npt.NDArray[np.int16] = field(default_factory=lambda: _no_branches("branch_layer"))  # (branch,)
    """Layer that drafted it, and everything after it."""
    branch_length: npt.NDArray[np.int16] = field(default_factory=lambda: _no_branches("branch_length"))  # (branch,)
    """Positions that were followed, 1..depth; EOS or the budget may have ended them early."""
    # (branch, depth) each
    branch_confidence: npt.NDArray[np.float32] = field(default_factory=lambda: _no_branches("branch_confidence"))
    """C_k of the branch's layer at each position, in nats; 0 beyond the branch's length, like the next three."""
    branch_entropy: npt.NDArray[np.float32] = field(default_factory=lambda: _no_branches("branch_entropy"))
    """Entropy of the branch's layer, in nats."""
    branch_top1: npt.NDArray[np.float32] = field(default_factory=lambda: _no_branches("branch_top1"))
    """Log-probability of the branch's layer for its likeliest token."""
    branch_top2: npt.NDArray[np.float32] = field(default_factory=lambda: _no_branches("branch_top2"))
    """Log-probability of the branch's layer for its second likeliest token."""
    # (branch, depth, layer)
    branch_token: npt.NDArray[np.int32] = field(default_factory=lambda: _no_branches("branch_token"))
    """Likeliest token of every layer up to the branch's; -1 above it and beyond the branch's length."""

    def __post_init__(self) -> None:
        _cast(self, {"prompt_ids": np.int64, "token_ids": np.int64, "token": np.int32, **BRANCH_DTYPES})
        _cast(self, dict.fromkeys(("confidence", "entropy", "top1", "top2", "match"), np.float32))
        _cast(self, CLOSING_DTYPES)
        _check_text(self)
        n_layers = self.closing_confidence.size
        for name in ("closing_top1", "closing_top2", "closing_token"):
            if getattr(self, name).size == 0:  # the default doesn't know the layers
                object.__setattr__(self, name, np.zeros(n_layers, dtype=CLOSING_DTYPES[name]))
        table = (self.n_decided, n_layers)
        shapes = dict.fromkeys(("confidence", "entropy", "top1", "top2", "token", "match"), table)
        _check_shapes(self, {**shapes, **dict.fromkeys(CLOSING_DTYPES, (n_layers,))})
        if self.branch_row.size == 0 and self.branch_token.ndim == 3:  # nor does this one
            nothing = np.zeros((0, self.branch_depth, n_layers), dtype=np.int32)
            object.__setattr__(self, "branch_token", nothing)
        _check_branches(self)

    @property
    def n_branches(self) -> int:
        """Branches."""
        return self.branch_row.size

    @property
    def branch_depth(self) -> int:
        """Most positions that a branch follows."""
        return int(self.branch_token.shape[1])

    @property
    def n_decided(self) -> int:
        """Tokens that were decided about, T - 1."""
        return self.token_ids.size - 1

    @property
    def n_rows(self) -> int:
        """Rows that this prompt takes in a store; one a decided token."""
        return self.n_decided

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return self.closing_confidence.size


def _no_branches(name: str) -> npt.NDArray[Any]:
    return np.zeros(branch_shapes(0, BRANCH_DEPTH, 0)[name], dtype=BRANCH_DTYPES[name])


def _check_branches(trace: PromptTrace) -> None:
    """Raise ValueError unless the branches fit one another and the rows and layers of their trace."""
    n, where = trace.branch_row.size, f"PromptTrace of prompt {trace.prompt_index}"
    if trace.branch_token.ndim != 3:
        got = trace.branch_token.shape
        raise ValueError(f"{where}: `branch_token` has shape {got}, expected (branch, depth, layer)")
    depth, n_layers = trace.branch_depth, trace.n_layers
    _check_shapes(trace, branch_shapes(n, depth, n_layers))
    bounds = {"branch_row": (0, trace.n_decided - 1), "branch_layer": (1, n_layers - 1), "branch_length": (1, depth)}
    for name, (lowest, highest) in bounds.items():
        values = getattr(trace, name)
        if n and not (lowest <= values.min() and values.max() <= highest):
            raise ValueError(
                f"{where}: `{name}` must be within {lowest}..{highest}, got {values.min()} to {values.max()}"
            )


@dataclass(frozen=True, eq=False)
class PromptRollout:
    """The transitions of one prompt, in the order of the decisions."""

    prompt_index: int
    """Position of the prompt in the collection, from 0."""
    prompt_ids: npt.NDArray[np.int64]  # (prompt,)
    """Token ids of the prompt."""
    token_ids: npt.NDArray[np.int64]  # (token,)
    """The target's new tokens, EOS included if it was drawn."""
    ended_by_eos: bool
    """Whether EOS ended the text (terminated); otherwise the budget did (truncated)."""
    observations: npt.NDArray[np.float32]  # (decision, feature)
    """State before each decision."""
    actions: npt.NDArray[np.int8]  # (decision,)
    """0 = continue, 1 = exit here."""
    rewards: npt.NDArray[np.float32]  # (decision,)
    """What the decision earned."""
    layer: npt.NDArray[np.int16]  # (decision,)
    """Candidate layer that was inspected."""
    exit_layer: npt.NDArray[np.int16]  # (decision,)
    """The layer where the action is exit, else 0."""
    token_index: npt.NDArray[np.int32]  # (decision,)
    """Which decided token the decision belongs to, from 1."""
    token_end: npt.NDArray[np.bool_]  # (decision,)
    """Whether it is the last decision of its token."""
    match: npt.NDArray[np.int8]  # (decision,)
    """Whether the exit's token was the target's, 0 or 1; -1 where the action is continue."""
    final_observation: npt.NDArray[np.float32]  # (feature,)
    """State after the last decision: first candidate of the next position; the last row again when EOS ended it."""

    def __post_init__(self) -> None:
        _cast(self, {"prompt_ids": np.int64, "token_ids": np.int64, "actions": np.int8, "match": np.int8})
        _cast(self, {"observations": np.float32, "rewards": np.float32, "final_observation": np.float32})
        _cast(self, {"layer": np.int16, "exit_layer": np.int16, "token_index": np.int32, "token_end": np.bool_})
        _check_text(self)
        n, feature = self.actions.size, self.final_observation.size
        columns = ("actions", "rewards", "layer", "exit_layer", "token_index", "token_end", "match")
        shapes = dict.fromkeys(columns, (n,))
        _check_shapes(self, {**shapes, "observations": (n, feature), "final_observation": (feature,)})
        if n and not self.token_end[-1]:
            raise ValueError(f"PromptRollout of prompt {self.prompt_index}: the last decision must end its token")

    @property
    def n_rows(self) -> int:
        """Rows that this prompt takes in a store; one a decision."""
        return self.actions.size


Record = PromptTrace | PromptRollout


def same_record(a: Record, b: Record) -> bool:
    """Whether two records are equal value by value; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    pairs = ((getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return all(
        np.array_equal(x, y, equal_nan=x.dtype.kind == "f") if isinstance(x, np.ndarray) else x == y for x, y in pairs
    )
