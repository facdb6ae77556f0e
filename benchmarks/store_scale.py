"""What a store of transitions costs by its size: to write, check, read and train on, and a batch beside d3rlpy's own.

python -m benchmarks.store_scale --folder /tmp/scale --out store_scale.json

Every stage runs in a process of its own, so that its peak memory is its own; that of a process that only imports what
the stage needs stands beside it. Stages are repeated and medians reported. Batches are paired: one of ours, one of
d3rlpy's own buffer, in turn, from the same store, of returns over the same number of decisions.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.synthetic_store import write_store
from lede.atomic import write_atomically
from lede.buffers.checking import check_store
from lede.buffers.store import TransitionStore, open_store
from lede.checkpoint import versions
from lede.learner import Learner
from lede.training import TrainConfig, train
from lede.training_data import TrainingData, load_data

Stage = Literal["import", "write", "check", "load", "train", "batch"]

N_STEPS = 3
BATCH = 256


@dataclass(frozen=True)
class ScaleSettings:
    """Settings."""

    folder: Path
    """Where the stores are put, one for each size; a store that is there is used again."""
    out: Path
    """File for everything as JSON; replaced whole."""
    rows: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    """Decisions of each store."""
    steps: int = 1000
    """Updates of a training run."""
    repeats: int = 3
    """Times that each stage runs."""
    batches: int = 300
    """Pairs of batches in a run of the stage."""
    most_for_d3rlpy: int = 10_000_000
    """Largest store that d3rlpy's own buffer is filled from: it takes hundreds of bytes a decision."""
    stage: Stage | None = None
    """Run one stage on the store of the first size, and print what it measured."""


def main(settings: ScaleSettings) -> dict[str, Any]:
    """Measure all stages at all sizes, write them and print a table.

    Raises:
        RuntimeError: A stage failed.
    """
    if settings.stage is not None:
        begin = time.process_time()
        found = _STAGES[settings.stage](settings, settings.rows[0])
        found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found["cpu_seconds"] = time.process_time() - begin  # other work on the machine hardly moves it
        print(json.dumps(found))
        return found
    settings.folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"settings": _plain(settings), "versions": versions(), "sizes": {}}
    for rows in settings.rows:
        result["sizes"][str(rows)] = {stage: _measure(settings, stage, rows) for stage in _STAGES}
        write_atomically(settings.out, (json.dumps(result, indent=1) + "\n").encode())
    Console().print(table(result))
    return result


def table(result: dict[str, Any]) -> Table:
    """The medians for a terminal."""
    shown = Table("decisions", "write", "check", "load", "train", "ms/batch", "d3rlpy", "ratio", "peak of train")
    for name, stages in result["sizes"].items():
        batch, imports = stages["batch"], stages["import"]["peak_bytes"]
        theirs, ratio, peak = batch.get("theirs_ms"), batch.get("ratio"), stages["train"]["peak_bytes"]
        shown.add_row(
            f"{int(name):,}",
            *(
                f"{stages[stage]['rows'] / stages[stage]['seconds']:,.0f} rows/s"
                for stage in ("write", "check", "load")
            ),
            f"{stages['train']['seconds_survey']:.1f} s + {stages['train']['ms_update']:.2f} ms a step",
            f"{batch['ours_ms']:.2f}",
            "-" if theirs is None else f"{theirs:.2f}",
            "-" if ratio is None else f"{ratio:.1f}",
            f"{peak / 1e6:,.0f} MB, {(peak - imports) / 1e6:,.0f} of data",
        )
    return shown


def _measure(settings: ScaleSettings, stage: Stage, rows: int) -> dict[str, Any]:
    """Medians of the stage's repeats, each in a process of its own, and all of them."""
    command = [sys.executable, "-m", "benchmarks.store_scale", "--stage", stage, "--rows", str(rows)]
    for name in ("folder", "out", "steps", "batches", "most_for_d3rlpy"):
        command += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    runs = []
    for _ in range(settings.repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {**{name: statistics.median(run[name] for run in runs) for name in runs[0]}, "runs": runs}


def _path(settings: ScaleSettings, rows: int) -> Path:
    return settings.folder / f"{rows}.zarr"


def _open(settings: ScaleSettings, rows: int) -> TransitionStore:
    store = open_store(_path(settings, rows))
    if not isinstance(store, TransitionStore):
        raise ValueError(f"{_path(settings, rows)} holds {store.kind}, wanted transitions")
    return store


def _size(rows: int, seconds: float, store: TransitionStore) -> dict[str, float]:
    """What a stage that goes through the whole store reports."""
    kept = sum(commit.size for commit in store.shards)
    width = len(store.settings.features.names)
    return {"rows": rows, "seconds": seconds, "stored_bytes": kept, "row_bytes": rows * (15 + 4 * width)}


def _import(settings: ScaleSettings, rows: int) -> dict[str, float]:
    """Nothing: what the imports and a network of the same size take."""
    Learner(TrainConfig(buffer="none", out="none"), np.zeros(4), np.ones(4), 0)
    return {}


def _write(settings: ScaleSettings, rows: int) -> dict[str, float]:
    """Write a store; the one that stays is written by the first repeat."""
    kept = _path(settings, rows)
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        path = Path(folder) / "a.zarr" if kept.exists() else kept
        n_rows, seconds = write_store(path, rows)
        return _size(n_rows, seconds, open_store(path))  # type: ignore[arg-type]  # it was just written


def _check(settings: ScaleSettings, rows: int) -> dict[str, float]:
    """`lede buffer check`."""
    begin = time.perf_counter()
    report = check_store(_path(settings, rows))
    if report.damage:
        raise ValueError(f"{_path(settings, rows)} is damaged: {report.damage}")
    store = _open(settings, rows)
    return _size(store.n_rows, time.perf_counter() - begin, store)


def _load(settings: ScaleSettings, rows: int) -> dict[str, float]:
    """Go through all prompts."""
    begin = time.perf_counter()
    store = _open(settings, rows)
    return _size(sum(rollout.n_rows for rollout in store), time.perf_counter() - begin, store)


def _config(settings: ScaleSettings, rows: int, out: str) -> TrainConfig:
    steps = settings.steps
    return TrainConfig(
        buffer=str(_path(settings, rows)), out=out, steps=steps, eval_interval=steps, checkpoint_interval=steps,
        batch_size=BATCH, n_steps=N_STEPS,
    )  # fmt: skip


def _train(settings: ScaleSettings, rows: int) -> dict[str, float]:
    """`lede train`, split into what comes before the first update and the updates."""
    marks: list[float] = []
    update = Learner.update

    def marked(self: Learner, batch: Any) -> float:
        marks.append(time.perf_counter())
        return update(self, batch)

    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        begin = time.perf_counter()
        Learner.update = marked  # type: ignore[method-assign]  # to see when it is called
        try:
            train(_config(settings, rows, str(Path(folder) / "run")), progress=False)
        finally:
            Learner.update = update  # type: ignore[method-assign]  # as it was
    # the first window is read before the first update
    between = (marks[-1] - marks[0]) / (len(marks) - 1)
    return {"seconds": time.perf_counter() - begin, "seconds_survey": marks[0] - begin, "ms_update": between * 1e3}


def _batch(settings: ScaleSettings, rows: int) -> dict[str, float]:
    """A batch of `lede train` and one of d3rlpy's own buffer in turn, without a cut at the greedy action."""
    store = _open(settings, rows)
    data = load_data(_config(settings, rows, "unused").settled("transitions"), store, None)
    if not isinstance(data, TrainingData):
        raise ValueError("the paper's objective was wanted")
    transitions, rng = data.transitions, np.random.default_rng(0)

    def ours(number: int) -> None:
        for held, drawn in transitions.draw(rng, number * BATCH, BATCH):
            held.batch(drawn, N_STEPS, 1.0)

    ours(0)  # the first window
    theirs = store.to_d3rlpy("token", n_steps=N_STEPS) if rows <= settings.most_for_d3rlpy else None
    spent: dict[str, list[float]] = {"ours_ms": [], "theirs_ms": []}
    for number in range(1, settings.batches + 1):
        spent["ours_ms"].append(_milliseconds(lambda: ours(number)))  # noqa: B023  # called at once
        if theirs is not None:
            spent["theirs_ms"].append(_milliseconds(lambda: theirs.sample_transition_batch(BATCH)))
    found = {name: statistics.median(values) for name, values in spent.items() if values}
    if theirs is not None:
        found["ratio"] = statistics.median(
            other / one for one, other in zip(spent["ours_ms"], spent["theirs_ms"], strict=True)
        )
    return found


def _milliseconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def _plain(settings: ScaleSettings) -> dict[str, Any]:
    return dict(json.loads(json.dumps(asdict(settings), default=str)))


_STAGES: dict[Stage, Callable[[ScaleSettings, int], dict[str, float]]] = {
    "import": _import,
    "write": _write,
    "check": _check,
    "load": _load,
    "train": _train,
    "batch": _batch,
}

if __name__ == "__main__":
    main(tyro.cli(ScaleSettings, description=__doc__))
