"""A crew without processes: workers take their turns in this one, and die when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lede.collectors.crew import Committed, Died, Event, Progressed, Ready

Fate = Callable[[int, tuple[int, ...]], int | None]
"""How many prompts of its group a worker commits before it dies; None when it lives. At its start it has none."""


class FakeCrew:
    """Workers whose every step is decided by `fate`; `store` counts how often each prompt was committed."""

    def __init__(self, size: int, fate: Fate = lambda worker, group: None) -> None:
        self.size = size
        self.store: dict[int, int] = {}
        self.starts: list[int] = []
        self.groups: list[tuple[int, tuple[int, ...]]] = []
        self.ended: list[str] = []
        self._fate = fate
        self._orders: list[tuple[int, tuple[int, ...] | None]] = []

    def start(self, worker: int) -> None:
        self.starts.append(worker)
        self._orders.append((worker, None))

    def give(self, worker: int, prompts: Sequence[int]) -> None:
        assert prompts
        self.groups.append((worker, tuple(prompts)))
        self._orders.append((worker, tuple(prompts)))

    def events(self) -> Iterator[Event]:
        assert self._orders, "the conductor waits for workers that have nothing to do"
        worker, group = self._orders.pop(0)
        n_committed = self._fate(worker, group or ())
        kept = (group or ()) if n_committed is None else (group or ())[:n_committed]
        if group:
            yield Progressed(worker, 3 * len(group), min(len(group), len(kept) + 1))
        for index in kept:
            self.store[index] = self.store.get(index, 0) + 1
        if n_committed is not None:
            yield Died(worker, "signal 9 (SIGKILL)")
        elif group is None:
            yield Ready(worker)
        else:
            yield Committed(worker)

    def stop(self) -> None:
        self.ended.append("stop")

    def kill(self) -> None:
        self.ended.append("kill")
