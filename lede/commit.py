"""Which commit of lede is running, where it runs from a checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SECONDS = 10


def commit() -> str | None:
    """The commit of the checkout that lede was imported from, with `-dirty` where tracked files differ from it.

    None where lede was installed without one, or there is no git.
    """
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # another project's checkout may surround the package
        found = _git("rev-parse", "--short=12", "HEAD").strip()
        return found + "-dirty" * bool(_git("status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS).stdout
