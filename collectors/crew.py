"""A crew of workers, whatever they run on, and what they tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Ready:
    """A worker has loaded its model and opened the store."""

    worker: int
    """Its number."""


@dataclass(frozen=True)
class Progressed:
    """A worker has written tokens or completed prompts, which are not yet committed."""

    worker: int
    """Its number."""
    n_tokens: int
    """New tokens since it last told."""
    n_prompts: int
    """Prompts completed since it last told."""


@dataclass(frozen=True)
class Committed:
    """All prompts that a worker had are in the store."""

    worker: int
    """Its number."""


@dataclass(frozen=True)
class Failed:
    """A worker met an exception, which is raised on: another worker would meet it too."""

    worker: int
    """Its number."""
    error: BaseException
    """The exception."""


@dataclass(frozen=True)
class Died:
    """A worker is gone without a word."""

    worker: int
    """Its number."""
    how: str
    """What is known of its end."""


Event = Ready | Progressed | Committed | Failed | Died


class WorkerError(OSError):
    """Workers ended again and again, or don't share the store."""


class Crew(Protocol):
    """Workers by number, from 0. Each has a process of its own and dies alone."""

    @property
    def size(self) -> int:
        """Workers that there should be."""

    def start(self, worker: int) -> None:
        """Start a worker, or another one in place of one that died; `Ready` follows."""

    def give(self, worker: int, prompts: Sequence[int]) -> None:
        """Let a worker that is ready collect prompts; `Committed` follows."""

    def events(self) -> Iterable[Event]:
        """What has happened; waits for a moment when it is nothing."""

    def stop(self) -> None:
        """Ask all to commit what is complete and to end, and wait until they have."""

    def kill(self) -> None:
        """End all at once; what they held is lost. Does nothing after `stop`."""
