"""What a learned policy took before its first token, from the files of the run that made it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lede.bench_runs import Cost
from lede.run_folder import RunFolder
from lede.stopwatch import Spent

_SWEEP = "sweep.json"
_CONFIG = "config.json"


def cost_of_folder(folder: Path) -> Cost:
    """The cost of a policy in a folder, as far as the files around it tell; what they don't is said in the note.

    The run is the folder that holds the policy's, or one beside it whose policy has the same weights, as where a policy
    was copied out of a run. The policy of a sweep has cost all of its runs. Evaluations are points of learning curves
    times validation prompts.
    """
    runs, odd = _runs_of(folder)
    if not runs:
        return Cost(note="no training run was found beside the folder: its cost is not known")
    parts = [_RunCost.of(run) for run in runs]
    notes = [odd] if odd else []
    for part in parts:
        notes += [note for note in part.notes if note not in notes]
    stores = {path: spent for part in parts for path, spent in part.stores.items()}  # runs share their stores
    seconds = [spent.seconds for _, spent in stores.values() if spent is not None]
    for path, (_, spent) in stores.items():
        if spent is None:
            notes.append(f"the seconds of collecting {path.name} were not recorded")
        elif spent.sittings > 1:
            notes.append(f"collecting {path.name} took {spent.sittings} sittings")
    return Cost(
        prompts=sum(n for n, _ in stores.values()),
        collecting_seconds=sum(seconds),
        training_seconds=sum(part.seconds for part in parts),
        evaluations=sum(part.evaluations for part in parts),
        note="; ".join(notes),
    )


def stores_of(folder: Path) -> list[Path]:
    """The stores that the policy in a folder was trained and validated on, as far as the files around it tell."""
    runs, _ = _runs_of(folder)
    return list(dict.fromkeys(path for run in runs for path in _RunCost.of(run).stores))


@dataclass(frozen=True)
class _RunCost:
    """The cost of one training run."""

    seconds: float
    evaluations: int
    stores: dict[Path, tuple[int, Spent | None]]
    """Prompts and seconds of the buffer and the validation store."""
    notes: list[str]

    @classmethod
    def of(cls, run: RunFolder) -> _RunCost:
        config, notes = _read(run.config), []
        spent = Spent.read(run.path)
        if spent is None:
            notes.append("the seconds of training were not recorded")
        elif spent.sittings > 1:
            notes.append(f"training took {spent.sittings} sittings")
        if config.get("profile"):
            notes.append("the cost profile's seconds are not counted")
        stores = {}
        for name in ("buffer", "validation"):
            if config.get(name):
                path = _found(Path(config[name]), run.path)
                if path is None:
                    notes.append(f"the {name} store {config[name]} was not found")
                else:
                    stores[path.resolve()] = _prompts(path), Spent.read(path)
        resolved = config.get("resolved") or {}
        n_validation = int(resolved.get("validation_prompts") or len(resolved.get("held_out") or ()))
        points = len(run.curve.read_text().splitlines()) if run.curve.exists() else 1
        return cls(spent.seconds if spent else 0.0, points * n_validation, stores, notes)


def _runs_of(folder: Path) -> tuple[list[RunFolder], str]:
    """The runs that made a policy, and what is odd about them."""
    weights = _read(folder / _CONFIG).get("weights_sha256")
    parent = folder.resolve().parent
    if (parent / _SWEEP).exists() and folder.resolve().name == "policy":
        names = _read(parent / _SWEEP).get("runs") or []
        runs = [RunFolder(parent / name) for name in names if (parent / name / _CONFIG).exists()]
        return runs, f"a sweep of {len(runs)} runs"
    own = RunFolder(parent)
    if own.policy == folder.resolve() and own.config.exists():
        return [own], ""
    for config in sorted(parent.glob("*/policy/config.json")):
        if weights and _read(config).get("weights_sha256") == weights:
            run = RunFolder(config.parent.parent)
            return ([run], f"copied from {run.path.name}") if run.config.exists() else ([], "")
    return [], ""


def _found(path: Path, run: Path) -> Path | None:
    """A store as the run's settings name it, from here or from beside the run."""
    places = [path, run / path, run.parent / path.name, run.parent.parent / path.name]
    return next((place for place in places if (place / "zarr.json").exists()), None)


def _prompts(store: Path) -> int:
    """Prompts in a store, by its commit records."""
    seen: set[int] = set()
    for commit in (store / "commits").glob("*.json"):
        seen.update(_read(commit).get("prompts") or ())
    return len(seen)


def _read(path: Path) -> dict[str, Any]:
    """An object of a JSON file; empty where there is none: a cost is no reason to fail."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
