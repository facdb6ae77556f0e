"""Seconds that a job took over all its sittings, kept in a file beside what the job makes."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lede.atomic import write_atomically

SECONDS = "seconds.json"
"""Name of the file in the folder of a store or a run."""


@dataclass(frozen=True)
class Spent:
    """What a job took."""

    seconds: float
    """Wall-clock over all sittings, up to the last time that each was written."""
    sittings: int = 1
    """How often the job was started. More than 1: it was stopped, and what a kill threw away is not counted."""

    @classmethod
    def read(cls, folder: Path) -> Spent | None:
        """What the file in a folder says; None where there is none, or a damaged one: nothing depends on it."""
        try:
            entry = json.loads((folder / SECONDS).read_bytes())
            return cls(float(entry["seconds"]), int(entry["sittings"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


class Stopwatch:
    """Runs from when it is made, on top of what earlier sittings took.

    Args:
        folder: Folder of what the job makes; it may come to exist later.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = Spent.read(folder) or Spent(0.0, 0)
        self._begin = time.perf_counter()

    def write(self) -> Spent:
        """Write the seconds so far."""
        spent = Spent(self._before.seconds + time.perf_counter() - self._begin, self._before.sittings + 1)
        write_atomically(self._folder / SECONDS, (json.dumps(asdict(spent)) + "\n").encode())
        return spent
