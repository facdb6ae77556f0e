"""A file or folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from lede.atomic import sync_folder


@contextmanager
def new_path(out: Path) -> Iterator[Path]:
    """A path to write at, next to `out`, which takes its name when the block is done and goes when it fails.

    Raises:
        ValueError: Something is at `out` already, or its folder can't be made.
    """
    if out.exists():
        raise ValueError(f"{out} exists already: choose another path, or remove it first")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"can't make the folder {out.parent}: {error}") from error
    temporary = out.with_name(f".{out.name}.{uuid4().hex}.partial")
    try:
        yield temporary
        _sync(temporary)
        temporary.rename(out)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)
    sync_folder(out.parent)


def _sync(path: Path) -> None:
    """Make a file, or all that a folder holds, durable."""
    for each in [*path.rglob("*"), path] if path.is_dir() else [path]:
        if each.is_dir():
            sync_folder(each)
        else:
            with each.open("rb") as file:
                os.fsync(file.fileno())
