"""The reference over both sources against tables of cells, round by round; run from the root of the repository.

python -m benchmarks.source_reference --traces train.zarr --test test.zarr --profile profile.json --candidates 5,8
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from lede.buffers.store import TraceStore, open_store
from lede.candidates import parse_candidates
from lede.cost_profile import CostProfile
from lede.lookup_table import LOOKUP_LENGTHS
from lede.policies.base import Lookup
from lede.reference_lookups import search_lookup
from lede.reference_sources import SourceSearch
from lede.reference_sources_cells import SourceCells
from lede.simulation import Simulation, simulate
from lede.trace_table import TraceTable

FINENESS = ((6, 2, 2, 1), (8, 3, 2, 2), (12, 3, 2, 2), (16, 4, 3, 3))
"""Cells that are tried."""


@dataclass(frozen=True)
class SourceReference:
    """Settings."""

    traces: Path
    """Store of traces of training prompts."""
    test: tuple[Path, ...]
    """Stores of traces of other prompts."""
    profile: Path
    """Cost profile of the model."""
    candidates: str | None = None
    """Candidate layers; those of the traces unless given."""
    prune_at: tuple[int, ...] = ()
    """Layers that may prune copies."""
    rounds: int = 3
    """Rounds of policy iteration."""
    seed: int = 0
    """Of everything that is drawn."""


def main(config: SourceReference) -> Table:
    """Speedups over plain decoding on every store, of each round of the reference and of the cells after the last.

    Raises:
        ValueError: A store or the profile can't be used, or they belong to different models.
    """
    costs = CostProfile.load(config.profile).costs
    stores = [_open(path) for path in (config.traces, *config.test)]
    tables = [_table(store) for store in stores]
    odd = {table.n_layers for table in tables} - {costs.n_layers}
    if odd:
        raise ValueError(f"the profile is of {costs.n_layers} layers, traces are of {sorted(odd)}: measure that model")
    given = stores[0].settings.candidates if config.candidates is None else config.candidates
    candidates = parse_candidates(given, costs.n_layers)
    lookup = search_lookup(tables[0], costs, seed=config.seed)
    plans = [Lookup(length, layer) for layer in (None, *config.prune_at) for length in LOOKUP_LENGTHS]
    search = SourceSearch(tables[0], costs, candidates, lookup, plans, seed=config.seed)
    shown = Table("", "training", *(path.name for path in config.test))

    def row(name: str, played: list[Simulation]) -> None:
        shown.add_row(name, *(f"{each.speedup:.3f}" for each in played))

    for turn in range(config.rounds):
        policy = search.improve()
        row(f"reference, round {turn + 1}", [simulate(policy, table, costs, seed=config.seed) for table in tables])
    for cells in FINENESS:
        found = SourceCells(search, cells)
        row(f"{found.n_cells} cells {cells}", [found.simulate(table, config.seed) for table in tables])
    return shown


def _open(path: Path) -> TraceStore:
    store = open_store(path)
    if not isinstance(store, TraceStore):
        raise ValueError(f"{path} holds transitions; give traces (`lede collect --collector teacher`)")
    return store


def _table(store: TraceStore) -> TraceTable:
    records = [trace for trace in store.prompts if trace.n_decided]
    return TraceTable.from_traces(records, store.settings.max_new_tokens, store.settings.vocab_size)


if __name__ == "__main__":
    Console().print(main(tyro.cli(SourceReference, description=__doc__)))
