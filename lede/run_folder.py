"""The folder of a training run: policy/, config.json, checkpoints/ and logs/, each file replaced whole."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

from lede.atomic import write_atomically


class RunFolder:
    """Paths of a run, and its checkpoints.

    Args:
        path: The folder; made, with its subfolders, by `create`.
        writes: Whether anything is written; of several processes only one does.
    """

    def __init__(self, path: str | os.PathLike[str], writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes
        self.policy = self.path / "policy"
        self.config = self.path / "config.json"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.curve = self.logs / "learning_curve.jsonl"

    def check(self) -> None:
        """See that the folder can be made, without making anything: before the work that fills it.

        Raises:
            ValueError: A file is in the way, or the place can't be written.
        """
        there = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        if not there.is_dir():
            raise ValueError(f"cannot make the folder of the run {self.path}: {there} is a file; give another --out")
        if not os.access(there, os.W_OK):
            raise ValueError(
                f"cannot make the folder of the run {self.path}: {there} can't be written; give another --out"
            )

    def create(self) -> None:
        """Make the folders.

        Raises:
            ValueError: A file is in the way, or the place can't be written.
        """
        if not self.writes:
            return
        try:
            for folder in (self.path, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot make the folder of the run: {error}") from error

    @property
    def used(self) -> bool:
        """Whether a run was started here."""
        return self.config.exists() or bool(self._steps())

    def write_config(self, config: dict[str, Any]) -> None:
        """Write config.json."""
        if self.writes:
            write_atomically(self.config, (json.dumps(config, indent=2, allow_nan=False) + "\n").encode())

    def save_checkpoint(self, step: int, state: dict[str, Any]) -> None:
        """Write the state after `step` updates: tensors and plain values."""
        import torch

        if not self.writes:
            return
        content = io.BytesIO()
        torch.save(state, content)
        write_atomically(self.checkpoints / f"step_{step:09d}.pt", content.getvalue())

    def last_checkpoint(self, device: str = "cpu") -> dict[str, Any] | None:
        """The state after most updates; None when there is no checkpoint.

        Raises:
            ValueError: The file is damaged.
        """
        import torch

        steps = self._steps()
        if not steps:
            return None
        path = self.checkpoints / f"step_{steps[-1]:09d}.pt"
        try:
            state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        except Exception as error:  # torch raises whatever the archive or the unpickler raises
            raise ValueError(f"checkpoint {path} is damaged: delete it to resume from the one before") from error
        return state

    def _steps(self) -> list[int]:
        names = [path.stem.removeprefix("step_") for path in self.checkpoints.glob("step_*.pt")]
        return sorted(int(name) for name in names if name.isdigit())
