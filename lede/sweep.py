"""`lede train`, once or as a sweep: a grid of settings times seeds, a folder a run, a table at the end."""

from __future__ import annotations

import hashlib
import importlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from lede.run_folder import RunFolder
from lede.sweep_grid import flag, grid, parse_sweeps, spell
from lede.training import train
from lede.training_config import TrainConfig, fixed_settings, with_defaults

if TYPE_CHECKING:
    from rich.console import Console

    from lede.buffers.store import TraceStore, TransitionStore
    from lede.policies.learned import LearnedPolicy
    from lede.policies.lookup_value import LookupValuePolicy
    from lede.policies.source_value import SourceValuePolicy
    from lede.policies.survival import SurvivalPolicy
    from lede.sweep_results import RunResult, SweepResults, SweepRun

DEFAULT_SEEDS = 5
"""Seeds of a sweep unless told otherwise."""

_RECORD = "sweep.json"


@dataclass(frozen=True)
class SweepConfig(TrainConfig):
    """Settings of `lede train`: those of a run, and what varies between runs."""

    sweep: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A setting and the values to try, such as n-steps=1,3 or hidden=32x32,64x64; give it again for a grid. Every run
    gets a folder in `out`, and the best policy goes to out/policy."""
    seeds: int | None = None
    """Runs of each setting, with seeds from `seed` on; None for 5 in a sweep, otherwise 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")

    @property
    def single(self) -> TrainConfig:
        """The settings of one run."""
        return TrainConfig(**{each.name: getattr(self, each.name) for each in fields(TrainConfig)})

    @property
    def n_seeds(self) -> int:
        """Runs of each setting."""
        return self.seeds or (DEFAULT_SEEDS if self.sweep else 1)


def train_or_sweep(
    config: SweepConfig,
) -> LearnedPolicy | SurvivalPolicy | LookupValuePolicy | SourceValuePolicy | SweepResults:
    """Train once, or sweep if there is something to vary.

    Raises:
        ValueError: As `lede.training.train` and `sweep` raise it.
    """
    if config.sweep or config.n_seeds > 1:
        return sweep(config)
    if (Path(config.out) / _RECORD).exists():
        raise ValueError(f"{config.out} holds a sweep: give its --sweep and --seeds again, or another folder")
    if config.algo == "thresholds":
        from lede.threshold_training import train_thresholds

        return train_thresholds(config.single)
    return train(config.single)


def sweep(
    config: SweepConfig,
    buffer: TransitionStore | TraceStore | None = None,
    validation: TransitionStore | TraceStore | None = None,
    progress: bool = True,
) -> SweepResults:
    """Train every setting with every seed, and choose the best setting's best seed by the validation score.

    A run that fails, as one whose loss explodes, is reported and the others go on. Finished runs are in results.json
    and results.csv at any time; the chosen policy comes to out/policy when all have ended.

    Args:
        config: All settings.
        buffer: The store itself, to spare opening `config.buffer`.
        validation: The store itself, to spare opening `config.validation`.
        progress: Whether to print a line a run, and the table.

    Raises:
        ValueError: The sweep, the settings or what lies in `out` can't be used, or every run failed.
    """
    from rich.console import Console

    from lede.buffers.store import open_store
    from lede.checkpoint import load_policy
    from lede.cost_profile import CostProfile
    from lede.processes import check_alone
    from lede.sweep_report import plot_sweep, report
    from lede.sweep_results import SweepResults, SweepRun

    check_alone("a sweep")
    out, settings = Path(config.out), grid(parse_sweeps(config.sweep))
    _check_out(out, config.resume)
    runs = [  # all settings with the first seed come first, so that an early look compares them all
        SweepRun(setting, seed, setting.run_name(seed))
        for seed in range(config.seed, config.seed + config.n_seeds)
        for setting in settings
    ]
    configs = [_run_config(config, run) for run in runs]
    buffer = open_store(config.buffer) if buffer is None else buffer
    if validation is None and config.validation is not None:
        validation = open_store(config.validation)
    if config.profile is not None:
        CostProfile.load(config.profile)
    # complain before the first run
    if any(each.algo == "thresholds" for each in configs):
        raise ValueError(
            "a sweep trains networks, and --algo thresholds searches for thresholds without one: leave it out of the "
            "sweep, or give it alone without --sweep and --seeds"
        )
    settled = [each.settled(buffer.kind) for each in configs]
    for run, each in zip(runs, settled, strict=True):
        run.result = _earlier(RunFolder(each.out), each)
    files = [each for each in (config.profile, config.memory) if each not in (None, "train", "none")]
    _record(out, runs, _digest(buffer, validation, files))

    importlib.import_module("lede.training_run")  # takes seconds, which aren't the first run's
    console = Console(quiet=not progress, highlight=False)
    clock = _Clock(console, runs)
    try:
        for run, each in zip(runs, configs, strict=True):
            if run.result is None:
                clock.start(run)
                try:
                    run.result = _train(each, run, buffer, validation)
                except ValueError as error:
                    run.error = " ".join(str(error).split())
                clock.end(run)
                SweepResults.of(runs).write(out)
    except KeyboardInterrupt:
        clock.stop()
        raise
    results = SweepResults.of(runs)
    results.write(out)
    if results.chosen is None:
        raise ValueError(f"every run failed; {runs[0].name}: {runs[0].error}")
    load_policy(out / results.chosen / "policy").save_pretrained(str(out / "policy"))
    plot_sweep(results, out)
    console.print(report(results))
    console.print(f"{out / 'policy'} is that of {results.chosen}", soft_wrap=True)
    return results


def _run_config(config: SweepConfig, run: SweepRun) -> TrainConfig:
    single = replace(
        config.single,
        seed=run.seed,
        split_seed=config.splits_by,  # what is held out is the same for all seeds
        out=str(Path(config.out) / run.name),
        resume=True,  # a run whose folder is there already goes on from its last checkpoint
    )
    return run.setting.apply(single)


def _train(
    config: TrainConfig,
    run: SweepRun,
    buffer: TransitionStore | TraceStore,
    validation: TransitionStore | TraceStore | None,
) -> RunResult:
    from lede.sweep_results import RunResult

    folder = RunFolder(config.out)
    fresh, begin = not folder.used, time.perf_counter()
    train(config, buffer, validation, progress=False)
    result = RunResult.of_run(folder, time.perf_counter() - begin if fresh else None)
    _note_for_tensorboard(folder, run, result)
    result.write(folder)
    return result


def _note_for_tensorboard(folder: RunFolder, run: SweepRun, result: RunResult) -> None:
    """Put the setting and the score into a folder below the run's logs, for TensorBoard's tab of hyperparameters.

    TensorBoard reads the files of one folder by name, so within the logs a short run's curve might purge the score.
    """
    from torch.utils.tensorboard import SummaryWriter

    values = {
        key: value if isinstance(value, bool | int | float) else spell(value) for key, value in run.setting.values
    }
    score = {f"sweep/{result.measure}": result.score}
    with SummaryWriter(str(folder.logs)) as writer:
        writer.add_hparams({**values, "seed": run.seed}, score, run_name="hparams", global_step=result.step)


def _earlier(folder: RunFolder, config: TrainConfig) -> RunResult | None:
    """The result of a run that was finished before.

    Raises:
        ValueError: The folder holds a run with other settings, or damaged files.
    """
    from lede.sweep_results import RunResult

    if not folder.config.exists():
        return None
    then = with_defaults(_read_json(folder.config))
    now = {**fixed_settings(config), "steps": config.steps}
    odd = [f"{flag(name)}: {then.get(name)} / {now[name]}" for name in now if then.get(name) != now[name]]
    if odd:
        raise ValueError(
            f"{folder.path} was trained with other settings (then / now): {'; '.join(odd)}. Use those to resume, or "
            "another folder"
        )
    return RunResult.read(folder)


def _check_out(out: Path, resume: bool) -> None:
    if RunFolder(out).used:
        raise ValueError(f"{out} holds a single run; give the sweep another folder")
    if (out / _RECORD).exists() and not resume:
        raise ValueError(f"{out} holds a sweep already: --resume goes on with it, or give another folder")


def _record(out: Path, runs: Sequence[SweepRun], digest: str) -> None:
    """Write what is swept, or compare the data with those of the sweep that is gone on with."""
    from lede.atomic import write_atomically

    path = out / _RECORD
    if path.exists() and _read_json(path).get("data") != digest:
        raise ValueError(
            f"{out} was trained on other data: the buffer, the validation store or the profile has changed since. Give "
            "the same, or another folder"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder of the sweep: {error}") from error
    content = json.dumps({"data": digest, "runs": [run.name for run in runs]}, indent=1) + "\n"
    write_atomically(path, content.encode())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: give another folder") from error


def _digest(
    buffer: TransitionStore | TraceStore, validation: TransitionStore | TraceStore | None, files: Sequence[str]
) -> str:
    """SHA-256 over all that is learned from, scored on, priced and remembered by."""
    digest = hashlib.sha256()
    for store in (buffer, validation):
        digest.update(repr(None if store is None else store.settings).encode())
        for record in () if store is None else store:  # read once, not kept: it may be too large
            for name, value in vars(record).items():
                whole = np.ascontiguousarray(value).tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
                digest.update(name.encode() + whole)
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


class _Clock:
    """A line for each run that ends, with the time that the others may take."""

    def __init__(self, console: Console, runs: Sequence[SweepRun]) -> None:
        self._console, self._runs = console, runs
        self._n_before = sum(run.result is not None for run in runs)
        self._n_ended = 0
        self._begin = self._start = time.perf_counter()
        self._status = console.status("")
        n_settings = len({run.setting for run in runs})
        before = f", {self._n_before} of them finished before" if self._n_before else ""
        self._say(f"{n_settings} setting(s) x {len(runs) // n_settings} seed(s) = {len(runs)} runs{before}")

    def start(self, run: SweepRun) -> None:
        """A run starts."""
        self._start = time.perf_counter()
        if self._console.is_terminal:
            self._status.update(f"{self._n_before + self._n_ended + 1}/{len(self._runs)} {run.name}")
            self._status.start()

    def end(self, run: SweepRun) -> None:
        """A run ended, well or not."""
        self._status.stop()
        now = time.perf_counter()
        self._n_ended += 1
        done = self._n_before + self._n_ended
        left = round((now - self._begin) / self._n_ended * (len(self._runs) - done))
        if run.result is None:
            said = f"failed: {run.error}"
        else:
            said = f"{run.result.measure} {run.result.score:.3f}, {now - self._start:.1f} s"
        self._say(f"{done}/{len(self._runs)} {run.name}: {said}{f'; {timedelta(seconds=left)} left' if left else ''}")

    def stop(self) -> None:
        """Ctrl-C: say how to go on."""
        self._status.stop()
        done = sum(run.result is not None for run in self._runs)
        self._say(f"stopped with {done} of {len(self._runs)} runs finished; the same command with --resume goes on")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)
