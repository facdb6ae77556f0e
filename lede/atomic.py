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


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; only POSIX can, elsewhere nothing is done."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
