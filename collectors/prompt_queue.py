"""Prompts waiting for workers: handed out in groups, taken back from the dead, set aside where they kill."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence

DEATHS = 3
"""Workers that a prompt may end, the last one with no other prompt at hand, before it is set aside."""

PARTS = 8
"""Groups that a dead worker's prompts are dealt out in, so that few deaths find the prompt that is to blame."""


class PromptQueue:
    """Which prompts are free, with a worker, done, or set aside.

    Groups are as large as a shard, and smaller towards the end, so that the workers end at about the same time. What a
    dead worker had at hand comes back in smaller groups, after everything that is fresh.

    Args:
        prompts: Indices of the prompts to collect.
        n_workers: Workers that there will be.
        batch_size: Prompts that share forward passes in a worker.
        shard_prompts: Prompts a shard.
    """

    def __init__(self, prompts: Sequence[int], n_workers: int, batch_size: int, shard_prompts: int) -> None:
        self._fresh = deque(prompts)
        self._again: deque[tuple[int, ...]] = deque()
        self._given: dict[int, tuple[int, ...]] = {}
        self._deaths: Counter[int] = Counter()
        self._n_workers = n_workers
        self._batch = max(1, min(batch_size, -(-len(prompts) // n_workers)))
        self._most = max(shard_prompts, self._batch)
        self.poison: dict[int, str] = {}
        """Prompts that were set aside, with how their last worker ended."""

    @property
    def waiting(self) -> bool:
        """Whether there is a group to take."""
        return bool(self._fresh or self._again)

    @property
    def finished(self) -> bool:
        """Whether every prompt is done or set aside."""
        return not (self.waiting or any(self._given.values()))

    def at_hand(self, worker: int) -> tuple[int, ...]:
        """The prompts that a worker has."""
        return self._given.get(worker, ())

    def take(self, worker: int) -> tuple[int, ...]:
        """Give a group of prompts to a worker that has none; an empty one when nothing is free."""
        if self.at_hand(worker):
            raise ValueError(f"worker {worker} still has prompts {list(self.at_hand(worker))}")
        group: tuple[int, ...] = ()
        if self._fresh:
            group = tuple(self._fresh.popleft() for _ in range(min(self._size(), len(self._fresh))))
        elif self._again:
            group = self._again.popleft()
        self._given[worker] = group
        return group

    def done(self, worker: int) -> None:
        """Note that a worker has committed its group."""
        del self._given[worker]

    def lost(self, worker: int, how: str, committed: Collection[int]) -> tuple[int, ...]:
        """Take back the group of a worker that ended.

        Args:
            worker: The worker.
            how: How it ended.
            committed: Prompts that are in the store; those of them that the worker had stay done.

        Returns:
            The prompts that it had not committed.
        """
        rest = tuple(index for index in self._given.pop(worker, ()) if index not in committed)
        self._deaths.update(rest)
        if len(rest) == 1 and self._deaths[rest[0]] >= DEATHS:
            self.poison[rest[0]] = how
        elif rest:
            size = -(-len(rest) // PARTS)
            self._again.extend(rest[start : start + size] for start in range(0, len(rest), size))
        return rest

    def _size(self) -> int:
        """Prompts of the next fresh group: whole batches, two groups a worker ahead of the end, a shard at most."""
        size = min(len(self._fresh) // (2 * self._n_workers), self._most)
        return max(size - size % self._batch, self._batch)
