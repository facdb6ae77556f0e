"""Traces as the environments take them: a store, its path, or records in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lede.buffers.settings import StoreSettings
from lede.candidates import default_candidates, parse_candidates
from lede.features import FeatureConfig
from lede.trace_table import TraceTable

if TYPE_CHECKING:
    from lede.buffers.records import PromptTrace
    from lede.buffers.store import TraceStore
    from lede.rewards import RewardConfig

    Traces = str | os.PathLike[str] | TraceStore | Sequence[PromptTrace]
    """A store of traces, its path, or traces in memory."""


@dataclass(frozen=True, eq=False)
class TraceSource:
    """Traces and what they were made with."""

    traces: Sequence[PromptTrace]
    """One a prompt."""
    settings: StoreSettings
    """Sizes of the model; candidates, features and reward that the environment goes by."""
    table: TraceTable
    """The traces stacked."""

    @classmethod
    def load(
        cls,
        traces: Traces,
        candidates: str | Sequence[int] | None = None,
        features: FeatureConfig | None = None,
        reward: RewardConfig | None = None,
        vocab_size: int | None = None,
        use_branches: bool = False,
    ) -> TraceSource:
        """Read traces; settings that are None are the store's, or the defaults for traces in memory.

        Args:
            traces: A store of traces, its path, or traces in memory.
            candidates: Candidate layers as `lede.candidates.parse_candidates` takes them.
            features: Observation; its `top_k` must be that of the traces.
            reward: What a decision earns.
            vocab_size: Entries of the vocabulary, for traces in memory, which do not tell.
            use_branches: Whether the table holds the branches.

        Raises:
            ValueError: The path leads to no store of traces, the traces hold no decision, or a setting does not fit.
        """
        from lede.buffers.playback import playback_settings
        from lede.buffers.store import Store, TraceStore, open_store

        store = open_store(traces) if isinstance(traces, str | os.PathLike) else traces
        if isinstance(store, Store) and not isinstance(store, TraceStore):
            where = Path(traces) if isinstance(traces, str | os.PathLike) else "this store"
            raise ValueError(
                f"{where} holds transitions, whose decisions are made; an environment plays traces: "
                "collect with the collector 'teacher'"
            )
        if isinstance(store, TraceStore):
            found, settings = store.prompts, store.settings
        else:
            found = list(store)
            settings = _settings_in_memory(found, features, vocab_size)
        layers = None if candidates is None else parse_candidates(candidates, settings.n_layers)
        settings = playback_settings(settings, candidates=layers, features=features, reward=reward)
        table = TraceTable.from_traces(found, settings.max_new_tokens, settings.vocab_size, use_branches)
        return cls(found, settings, table)


def _settings_in_memory(
    traces: Sequence[PromptTrace], features: FeatureConfig | None, vocab_size: int | None
) -> StoreSettings:
    if not traces:
        raise ValueError("there are no traces; give at least one")
    if vocab_size is None:
        raise ValueError(
            "traces in memory do not tell the size of the vocabulary, which bounds the entropy: give vocab_size, or a "
            "store of traces"
        )
    n_layers = traces[0].n_layers
    return StoreSettings(
        kind="traces",
        model="",
        n_layers=n_layers,
        vocab_size=vocab_size,
        candidates=default_candidates(n_layers),
        features=features or FeatureConfig(),
        max_new_tokens=max(trace.token_ids.size for trace in traces),
    )
