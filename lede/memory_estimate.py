"""What a training run will hold in memory, estimated from the sizes of its stores before any of them is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lede.training_data import is_windowed

if TYPE_CHECKING:
    from lede.buffers.store import TraceStore, TransitionStore
    from lede.training_config import TrainConfig

_RECORD_ROW = 15
"""Bytes of a decision as it is recorded, beside its observation."""
_TRANSITION_ROW = 20
"""Bytes of a decision as it is learned from, beside its observation."""
_LAYER = 24
"""Bytes of a layer at a token of a trace."""
_PROMPT = 4_000
"""Bytes of a prompt's arrays beside their content."""
_ROUND_COPIES = 4
"""Times that the wall-clock objective holds its traces: as records, in tables, as what a round may do and earn."""
_DRAW = 8
"""Bytes of a row's place in a window."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of the data of one process, on top of what Python and torch take themselves."""

    n_rows: int
    """Rows of the buffer."""
    kind: str
    """What the rows are."""
    window: int | None
    """Rows held at a time; None for all."""
    n_bytes: int
    """Most bytes at a time."""
    sampled: bool = False
    """Whether the window is all that is ever read of the buffer."""
    processes: int = 1
    """Processes that hold as much each."""

    def __str__(self) -> str:
        held = "held whole"
        if self.window is not None:
            held = f"{'a sample' if self.sampled else 'read in windows'} of {self.window:,}"
        of_each = f" in each of {self.processes} processes" if self.processes > 1 else ""
        unit = "decisions" if self.kind == "transitions" else "decided tokens"
        return (
            f"memory: {self.n_rows:,} {unit}, {held}: about {max(1, round(self.n_bytes / 1e6)):,} MB of data{of_each}"
        )


def estimate_memory(
    config: TrainConfig,
    buffer: TransitionStore | TraceStore,
    validation: TransitionStore | TraceStore | None = None,
    processes: int = 1,
) -> MemoryEstimate:
    """Estimate what training will hold.

    Args:
        config: Settled settings.
        buffer: What is learned from.
        validation: What is scored on, which is held whole.
        processes: Processes that train together.
    """
    windowed = is_windowed(config, buffer)
    rows = min(buffer.n_rows, config.window) if windowed else buffer.n_rows
    prompts = len(buffer) * rows / max(1, buffer.n_rows)
    features = len(config.features or buffer.settings.features.names)
    recorded, learned = _RECORD_ROW + 4 * features, _TRANSITION_ROW + 4 * features
    layers = buffer.settings.n_layers * _LAYER
    if config.objective == "wall-clock":
        n_bytes = _ROUND_COPIES * rows * layers + config.generations * rows * learned + prompts * _PROMPT
    elif not windowed:
        traces = buffer.kind == "traces"
        kept, played = (layers, _decisions(config, buffer) * config.passes) if traces else (0, 1)
        n_records = prompts * (1 + config.passes if traces else 1)
        # observations a third time: in the copy that the digest is taken of
        n_bytes = rows * (kept + played * (recorded + learned + 4 * features)) + n_records * _PROMPT
    else:
        shard = max(commit.rows for commit in buffer.shards)
        decisions = _decisions(config, buffer) if buffer.kind == "traces" else 1
        row = 2 * layers if buffer.kind == "traces" else recorded
        n_bytes = rows * (learned + _DRAW) + shard * (row + decisions * (recorded + learned))
        n_bytes += config.holdout * (rows * row + prompts * _PROMPT)
        n_bytes += len(buffer) * 200  # which shard a prompt is in
    if validation is not None:
        width = layers if validation.kind == "traces" else recorded
        n_bytes += validation.n_rows * width + len(validation) * _PROMPT
    window = config.window if windowed else None
    return MemoryEstimate(buffer.n_rows, buffer.kind, window, int(n_bytes), config.objective == "wall-clock", processes)


def _decisions(config: TrainConfig, buffer: TransitionStore | TraceStore) -> float:
    """Decisions a token when the exit, or none, is drawn uniformly."""
    n = len(buffer.settings.candidates)
    return n * (n + 3) / (2 * (n + 1))
