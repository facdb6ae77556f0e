"""Names of writers, which tell whether a writer may still be at work."""

from __future__ import annotations

import hashlib
import os
import platform
import uuid
from functools import cache
from pathlib import Path


def writer_name() -> str:
    """This process as `machine-pid`: shards are named after their writer, so that no two share one."""
    return f"{_machine()}-{os.getpid()}"


def is_abandoned(name: str) -> bool:
    """Whether the writer that a shard's name tells of ran on this machine, since it was started, and has ended."""
    machine, pid, *_ = (*name.split("-"), "")
    return machine == _machine() and pid.isdigit() and not _is_alive(int(pid))


@cache
def _machine() -> str:
    """A hash of what process ids are unique in: this start of this machine and, in a container, its name space."""
    parts = [platform.node()]
    try:
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:  # not Linux
        parts.append(f"{uuid.getnode():x}")
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


def _is_alive(pid: int) -> bool:
    if os.name != "posix":
        return True  # signal 0 would end the process elsewhere
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
