"""What the runs of a sweep are worth, by setting."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lede.atomic import write_atomically
from lede.intervals import Interval
from lede.learning_curve import read_curve
from lede.run_folder import RunFolder
from lede.seed_interval import seed_interval
from lede.sweep_grid import Setting

RESULT = "result.json"
"""File in a run's folder that is written last: the run is finished."""


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    score: float
    """What the frozen policy is worth on the validation prompts."""
    measure: Literal["speedup", "reward"]
    """Whether the score is a simulated speedup over plain decoding, or a reward of a token."""
    step: int
    """Updates that the frozen policy has had."""
    seconds: float | None
    """Seconds that training took; None where it was stopped and gone on with."""

    @classmethod
    def of_run(cls, folder: RunFolder, seconds: float | None) -> RunResult:
        """The result of a run that has just ended, from its learning curve."""
        points = [point for point in read_curve(folder.curve) if point.step]
        keep = json.loads(folder.config.read_text())["keep"]
        frozen = max(points, key=lambda point: point.score.merit) if keep == "best" else points[-1]
        measure: Literal["speedup", "reward"] = "reward" if frozen.score.speedup is None else "speedup"
        return cls(frozen.score.merit, measure, frozen.step, seconds)

    @classmethod
    def read(cls, folder: RunFolder) -> RunResult | None:
        """The result in a folder; None if the run isn't finished.

        Raises:
            ValueError: The file is damaged.
        """
        path = folder.path / RESULT
        if not path.exists():
            return None
        try:
            return cls(**json.loads(path.read_text()))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: delete it to have the run looked at again") from error

    def write(self, folder: RunFolder) -> None:
        """Mark a run as finished."""
        write_atomically(folder.path / RESULT, (json.dumps(asdict(self), allow_nan=False) + "\n").encode())


@dataclass
class SweepRun:
    """A run of the grid."""

    setting: Setting
    """Its setting."""
    seed: int
    """Its seed."""
    name: str
    """Its folder in the folder of the sweep."""
    result: RunResult | None = None
    """What came out; None until it is finished."""
    error: str | None = None
    """Why it failed; None otherwise."""


@dataclass(frozen=True)
class SettingResult:
    """The runs of one setting."""

    setting: Setting
    """The setting."""
    n_finished: int
    """Seeds that are finished."""
    n_seeds: int
    """Seeds that are wanted."""
    mean: float | None
    """Mean score over the seeds; None as long as none is finished."""
    interval: Interval | None
    """Student's 95 % interval of the mean over seeds; None with fewer than two."""
    seconds: float | None
    """Mean seconds of training over the runs that were not stopped in between."""
    best: str | None
    """Folder of the run with the largest score."""
    error: str | None
    """Why a run failed; None if none did."""


@dataclass(frozen=True)
class SweepResults:
    """A whole sweep, or as much of it as is finished."""

    runs: tuple[SweepRun, ...]
    """All runs of the grid."""
    settings: tuple[SettingResult, ...]
    """By setting, the largest mean first; those of which a run failed, then those without a finished run come last."""
    measure: Literal["speedup", "reward"] | None
    """What the scores are; None without any."""

    @classmethod
    def of(cls, runs: Sequence[SweepRun]) -> SweepResults:
        """Gather the runs by setting."""
        by_setting: dict[Setting, list[SweepRun]] = {}
        for run in runs:
            by_setting.setdefault(run.setting, []).append(run)
        settings = [_setting_result(setting, some) for setting, some in by_setting.items()]
        settings.sort(key=lambda each: (each.mean is None, each.error is not None, -(each.mean or 0.0)))
        measures = [run.result.measure for run in runs if run.result is not None]
        return cls(tuple(runs), tuple(settings), measures[0] if measures else None)

    @property
    def complete(self) -> bool:
        """Whether every run has ended, well or not."""
        return all(run.result is not None or run.error is not None for run in self.runs)

    @property
    def chosen(self) -> str | None:
        """Folder of the run whose policy is chosen: the best seed of the setting with the best mean.

        The best of all runs would be the luckiest one.
        """
        return self.settings[0].best

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        settings = [
            {
                "name": each.setting.name,
                "values": dict(each.setting.values),
                "finished": each.n_finished,
                "seeds": each.n_seeds,
                "mean": each.mean,
                "lower": None if each.interval is None else each.interval.lower,
                "upper": None if each.interval is None else each.interval.upper,
                "seconds": each.seconds,
                "best": each.best,
                "error": each.error,
            }
            for each in self.settings
        ]
        runs = [
            {
                "folder": run.name,
                "values": dict(run.setting.values),
                "seed": run.seed,
                "result": None if run.result is None else asdict(run.result),
                "error": run.error,
            }
            for run in self.runs
        ]
        found = {"measure": self.measure, "complete": self.complete, "chosen": self.chosen}
        return {**found, "settings": settings, "runs": runs}

    def write(self, out: Path) -> None:
        """Write results.json and results.csv."""
        found = self.to_json()
        write_atomically(out / "results.json", (json.dumps(found, indent=1, allow_nan=False) + "\n").encode())
        keys = [key for key, _ in self.settings[0].setting.values]
        figures = ("seeds", "finished", "mean", "lower", "upper", "seconds", "best", "error")
        content = io.StringIO()
        table = csv.writer(content, lineterminator="\n")
        table.writerow([*keys, *figures])
        for each, row in zip(self.settings, found["settings"], strict=True):
            table.writerow([*each.setting.spelled, *(row[name] for name in figures)])
        write_atomically(out / "results.csv", content.getvalue().encode())


def _setting_result(setting: Setting, runs: Sequence[SweepRun]) -> SettingResult:
    finished = [(run, run.result) for run in runs if run.result is not None]
    scores = [result.score for _, result in finished]
    seconds = [result.seconds for _, result in finished if result.seconds is not None]
    best = max(finished, key=lambda pair: pair[1].score)[0].name if finished else None
    return SettingResult(
        setting=setting,
        n_finished=len(finished),
        n_seeds=len(runs),
        mean=statistics.fmean(scores) if scores else None,
        interval=seed_interval(scores),
        seconds=statistics.fmean(seconds) if seconds else None,
        best=best,
        error=next((run.error for run in runs if run.error is not None), None),
    )
