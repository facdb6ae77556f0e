"""What each feature of the state is worth; run from the root of the repository.

python -m benchmarks.feature_ablation --traces train.zarr --test test.zarr --profile profile.json --candidates 3,5
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from lede.ablation import FeatureValue, ablate
from lede.atomic import write_atomically
from lede.buffers.store import TraceStore, open_store
from lede.candidates import parse_candidates
from lede.cost_profile import CostProfile
from lede.features import FeatureConfig
from lede.simulation import simulate
from lede.trace_table import TraceTable
from lede.training import TrainConfig, train


@dataclass(frozen=True)
class FeatureAblation:
    """Settings."""

    traces: Path
    """Store of traces of training prompts."""
    test: Path
    """Store of traces of other prompts."""
    profile: Path
    """Cost profile of the model."""
    candidates: str | None = None
    """Candidate layers; those of the traces unless given."""
    max_draft: int = 12
    """Most tokens drafted in a round."""
    steps: int = 0
    """Steps of a network trained on each set; 0 trains none."""
    seed: int = 0
    """Of everything that is drawn."""
    out: Path | None = None
    """File for everything as JSON; replaced whole."""


def main(config: FeatureAblation) -> list[FeatureValue]:
    """Print a table, and write JSON if asked to.

    Raises:
        ValueError: A store or the profile can't be used, or they belong to different models.
    """
    console, costs = Console(), CostProfile.load(config.profile).costs
    stores = [_open(path) for path in (config.traces, config.test)]
    training, test = (_table(store) for store in stores)
    if not costs.n_layers == training.n_layers == test.n_layers:
        raise ValueError(
            f"profile, traces and test are of models with {costs.n_layers}, {training.n_layers}, {test.n_layers} layers"
        )
    settings = stores[0].settings
    candidates = parse_candidates(config.candidates or settings.candidates, settings.n_layers)

    def learn(features: FeatureConfig) -> float:
        with tempfile.TemporaryDirectory() as folder:
            wanted = TrainConfig(
                buffer=str(config.traces),
                out=str(Path(folder) / "run"),
                objective="wall-clock",
                profile=str(config.profile),
                candidates=",".join(map(str, candidates)),
                features=features.names,
                draft_agreement=features.draft_agreement,
                max_draft=config.max_draft,
                steps=config.steps,
                seed=config.seed,
            )
            return simulate(train(wanted, progress=False), test, costs, seed=config.seed).speedup

    found = ablate(
        training,
        test,
        costs,
        candidates,
        max_draft=config.max_draft,
        seed=config.seed,
        train=learn if config.steps else None,
    )
    table = Table("features", "AUC scan", "AUC draft", "reference", "learned", title=f"candidates {list(candidates)}")
    for each in found:
        areas = [stage.area_under_curve for stage in (each.scan, each.draft)]
        speedups = [each.reference, each.learned]
        texts = ["-" if area is None else f"{area:.3f}" for area in areas]
        texts += ["-" if speedup is None else f"{speedup:.3f}x" for speedup in speedups]
        table.add_row(each.name, *texts)
    console.print(table)
    if config.out is not None:
        report = {"settings": asdict(config), "candidates": candidates, "sets": [asdict(each) for each in found]}
        write_atomically(config.out, (json.dumps(report, indent=1, default=str) + "\n").encode())
        console.print(f"written to {config.out}", soft_wrap=True)
    return found


def _open(path: Path) -> TraceStore:
    store = open_store(path)
    if not isinstance(store, TraceStore):
        raise ValueError(f"{path} holds transitions; give traces (`lede collect --collector teacher`)")
    return store


def _table(store: TraceStore) -> TraceTable:
    records = [trace for trace in store.prompts if trace.n_decided]
    return TraceTable.from_traces(records, store.settings.max_new_tokens, store.settings.vocab_size)


if __name__ == "__main__":
    main(tyro.cli(FeatureAblation, description=__doc__))
