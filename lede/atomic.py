"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash of process or machine at any moment, finds the old content or the new.

    The name of the temporary file starts with a dot and ends in .partial.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def prepare_file(path: Path, option: str = "--out") -> None:
    """Make the folder that a file will lie in: called before the work that fills it, so that nothing fails after it.

    Args:
        path: The file.
        option: What the user gave it as.

    Raises:
        ValueError: It is a folder, or its own folder can't be made or written.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file as {option}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder of {path}: {error.strerror}; give another {option}") from error
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"cannot write into the folder of {path}; give another {option}")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; only POSIX can, elsewhere nothing is done."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
