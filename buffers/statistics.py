"""What is in a store, in numbers: `lede buffer info`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lede.buffers.columns import transition_bytes
from lede.buffers.records import PromptRollout, PromptTrace
from lede.buffers.settings import StoreSettings
from lede.buffers.storage import Place, storage_for
from lede.buffers.store import TraceStore, open_store
from lede.buffers.writer import leftovers
from lede.rewards import EXIT

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class LayerCount:
    """One layer of a store."""

    layer: int
    """The layer, from 1."""
    continues: int
    """Decisions to go on; 0 for traces, which hold no decisions."""
    exits: int
    """Decisions to exit here; 0 for traces."""
    agreement: float | None
    """Share of exits that matched the target; for traces, mean match over all tokens. None without any."""
    branches: int = 0
    """Branches that this layer drafted; 0 for transitions, which have none."""


@dataclass(frozen=True)
class StoreInfo:
    """What `info` found."""

    path: str
    """The store."""
    settings: StoreSettings
    """What it was made with."""
    shards: int
    """Committed shards."""
    rows: int
    """Decisions (transitions) or decided tokens (traces)."""
    prompts: int
    """Prompts, each counted once."""
    tokens: int
    """New tokens of all prompts, the first of each included."""
    ended_by_eos: int
    """Prompts whose text ended with EOS."""
    unexited: int
    """Decided tokens that no layer exited; 0 for traces."""
    mean_reward: float | None
    """Mean reward a decided token; None for traces or without decisions."""
    layers: tuple[LayerCount, ...]
    """Candidate layers of transitions, all layers of traces."""
    duplicates: int
    """Copies of prompts that were committed more than once; readers keep one."""
    branches: int
    """Branches of traces."""
    mean_branch_length: float | None
    """Mean number of positions that a branch follows; None without any."""
    leftovers: int
    """Shards without commit record: interrupted, or being written; readers pass them over."""
    transition_bytes: float
    """Bytes of a transition before compression; of traces, of a token at one layer."""
    stored_bytes: int
    """Bytes of the committed shards as they are stored, texts and all."""

    def to_json(self) -> dict[str, Any]:
        """The numbers as plain JSON values; of the fingerprint all but its logits."""
        layers = [vars(layer) for layer in self.layers]
        settings = self.settings.to_json()
        settings["fingerprint"] = {k: v for k, v in settings["fingerprint"].items() if k != "logits"}
        return {**vars(self), "layers": layers, "settings": settings}

    def __rich__(self) -> RenderableType:
        """Two tables for a terminal."""
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        facts = Table(title=escape(self.path), show_header=False, title_justify="left")
        for name, value in self._facts():
            facts.add_row(name, escape(value))
        layers = Table(title="Layers", title_justify="left")
        traces = self.settings.kind == "traces"
        for heading in ("layer", *(("branches",) if traces else ("visits", "continue", "exit")), "agreement"):
            layers.add_column(heading, justify="right")
        for each in self.layers:
            counts = (each.branches,) if traces else (each.continues + each.exits, each.continues, each.exits)
            share = "-" if each.agreement is None else f"{each.agreement:.3f}"
            layers.add_row(str(each.layer), *(f"{count:,}" for count in counts), share)
        return Group(facts, layers)

    def _facts(self) -> Iterable[tuple[str, str]]:
        settings = self.settings.to_json()
        fingerprint = settings.pop("fingerprint")
        yield "kind", settings.pop("kind")
        yield "rows", f"{self.rows:,} {'decided tokens' if self.settings.kind == 'traces' else 'decisions'}"
        yield "prompts", f"{self.prompts:,} ({self.ended_by_eos:,} ended by EOS)"
        yield "new tokens", f"{self.tokens:,}"
        if self.settings.kind == "transitions":
            yield "tokens without exit", f"{self.unexited:,}"
            yield "mean reward a token", "-" if self.mean_reward is None else f"{self.mean_reward:.4f}"
            del settings["branch_share"], settings["branch_depth"]  # say nothing about rollouts
        else:
            length = "" if self.mean_branch_length is None else f" (mean length {self.mean_branch_length:.1f})"
            yield "branches", f"{self.branches:,}{length}"
        notes = [f"{self.duplicates} repeated prompts passed over"] if self.duplicates else []
        notes += [f"{self.leftovers} uncommitted passed over"] if self.leftovers else []
        yield "shards", "; ".join([f"{self.shards:,}", *notes])
        yield "bytes a transition", f"{self.transition_bytes:.3g} before compression"
        stored = f" ({self.stored_bytes / self.rows:.3g} a row)" if self.rows else ""
        yield "stored bytes", f"{self.stored_bytes:,}{stored}"
        for name, value in settings.items():
            yield name, value if isinstance(value, str) else json.dumps(value)
        yield "dtype of the model", str(fingerprint.get("dtype", "-"))


def info(path: Place, verify: bool = False) -> StoreInfo:
    """Count what a store holds.

    Args:
        path: Folder or URL of the store.
        verify: Whether to compare the checksum of every file.

    Raises:
        StoreError: There is no store, or it is damaged.
    """
    store = open_store(path, verify)
    rollouts = TransitionCounter(store.settings)
    traces = TraceCounter(store.settings)
    tokens = ended = 0
    for record in store:
        tokens += record.token_ids.size
        ended += record.ended_by_eos
        if isinstance(record, PromptTrace):
            traces.add(record)
        else:
            rollouts.add(record)
    is_traces = isinstance(store, TraceStore)
    return StoreInfo(
        path=storage_for(path).url,
        settings=store.settings,
        shards=store.n_shards,
        rows=store.n_rows,
        prompts=len(store),
        tokens=tokens,
        ended_by_eos=ended,
        unexited=rollouts.unexited,
        mean_reward=rollouts.reward / rollouts.tokens if rollouts.tokens else None,
        layers=traces.layers() if is_traces else rollouts.layers(),
        duplicates=store.duplicates,
        branches=int(traces.branches.sum()),
        mean_branch_length=traces.mean_branch_length,
        leftovers=len(leftovers(path)),
        transition_bytes=transition_bytes(store.settings),
        stored_bytes=sum(commit.size for commit in store.shards),
    )


class TransitionCounter:
    """Counts the decisions of rollouts, layer by layer."""

    def __init__(self, settings: StoreSettings) -> None:
        self._candidates = settings.candidates
        self._counts = np.zeros((settings.n_layers + 1, 3), dtype=np.int64)  # continues, exits, matches
        self.tokens = 0
        self.unexited = 0
        self.reward = 0.0

    def add(self, rollout: PromptRollout) -> None:
        """Count one prompt."""
        exits = rollout.actions == EXIT
        for column, rows in enumerate((~exits, exits, exits & (rollout.match == 1))):
            self._counts[:, column] += np.bincount(rollout.layer[rows], minlength=len(self._counts))
        self.tokens += int(rollout.token_end.sum())
        self.unexited += int((rollout.token_end & ~exits).sum())
        self.reward += float(rollout.rewards.sum(dtype=np.float64))

    def layers(self) -> tuple[LayerCount, ...]:
        """The candidate layers."""
        rows = ((layer, *self._counts[layer].tolist()) for layer in self._candidates)
        return tuple(LayerCount(layer, n, exits, hits / exits if exits else None) for layer, n, exits, hits in rows)


class TraceCounter:
    """Averages the match of traces and counts their branches, layer by layer."""

    def __init__(self, settings: StoreSettings) -> None:
        self.branches = np.zeros(settings.n_layers, dtype=np.int64)
        self._positions = 0  # that branches follow
        self._match = np.zeros(settings.n_layers)
        self._rows = 0

    def add(self, trace: PromptTrace) -> None:
        """Count one prompt."""
        self._match += trace.match.sum(axis=0, dtype=np.float64)
        self._rows += trace.n_rows
        self.branches += np.bincount(trace.branch_layer - 1, minlength=len(self.branches))
        self._positions += int(trace.branch_length.sum())

    @property
    def mean_branch_length(self) -> float | None:
        """Mean number of positions that a branch follows; None without any."""
        return self._positions / int(self.branches.sum()) if self.branches.any() else None

    def layers(self) -> tuple[LayerCount, ...]:
        """All layers."""
        shares = (self._match / self._rows).tolist() if self._rows else [None] * len(self._match)
        counts = zip(shares, self.branches.tolist(), strict=True)
        return tuple(LayerCount(layer, 0, 0, share, n) for layer, (share, n) in enumerate(counts, start=1))
