"""Leads a crew through a queue of prompts, whoever dies on the way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence

from rich.console import Console

from lede.collectors.crew import Committed, Crew, Died, Event, Failed, Progressed, Ready, WorkerError
from lede.collectors.progress import CollectProgress
from lede.collectors.prompt_queue import PromptQueue
from lede.collectors.recorder import shown
from lede.collectors.sitting import Sitting

STARTS = 3
"""Workers that may end one after another while they start, before the collection is given up."""

SHOWS_WITHIN = 60.0
"""Seconds after which a shared file system has shown here what was committed elsewhere; NFS may take thirty."""


class Conductor:
    """Hands prompts to workers until all are committed.

    The store says what is done, not the workers: what a dead one had committed stands, the rest goes to others. Its
    place is taken by a new worker as long as there is something to do. Prompts that end their workers again and again
    are set aside, and named when all others are done.

    Args:
        crew: The workers, none of them started.
        queue: The prompts.
        sitting: Knows the store.
        progress: Is told of tokens and prompts.
        console: Where to say in a line who died.
    """

    def __init__(
        self, crew: Crew, queue: PromptQueue, sitting: Sitting, progress: CollectProgress, console: Console
    ) -> None:
        self._crew = crew
        self._queue = queue
        self._sitting = sitting
        self._progress = progress
        self._console = console
        self._idle: set[int] = set()
        self._empty: set[int] = set()  # places whose worker died
        self._starting: set[int] = set()
        self._trusted: set[int] = set()  # what they committed was seen in the store
        self._complete: Counter[int] = Counter()  # prompts a worker told of and has not committed
        self._failed_starts = 0
        self._deaths_in_vain = 0
        self._begun = False

    def run(self) -> None:
        """Collect all prompts.

        On an exception, Ctrl-C too, the workers commit what is complete before it is raised on; at a second one while
        they do they are killed.

        Raises:
            WorkerError: Prompts killed their workers, workers can't start, or what they commit doesn't show.
            Exception: What a worker met.
        """
        try:
            try:
                for worker in range(self._crew.size):
                    self._start(worker)
                while self._starting or not self._queue.finished:
                    for event in self._crew.events():
                        self._handle(event)
                    if self._trusted and self._queue.finished:
                        break  # nobody waits for those that are still starting
            finally:
                self._crew.stop()
        finally:
            self._crew.kill()
        if self._queue.poison:
            raise WorkerError(self._poison())

    def _handle(self, event: Event) -> None:
        match event:
            case Ready(worker):
                self._starting.discard(worker)
                self._failed_starts = 0
                if not self._begun:
                    self._begun = True
                    self._progress.begin()
                self._hand_out(worker)
            case Progressed(worker, n_tokens, n_prompts):
                self._complete[worker] += n_prompts
                self._progress.tokens(n_tokens)
                self._progress.prompt(n_prompts)
            case Committed(worker):
                self._commit(worker)
                self._hand_out(worker)
            case Failed(_, error):
                raise error
            case Died(worker, how):
                self._bury(worker, how)

    def _start(self, worker: int) -> None:
        self._empty.discard(worker)
        self._starting.add(worker)
        self._crew.start(worker)

    def _hand_out(self, worker: int) -> None:
        """Give a worker prompts, or let it wait: somebody may die yet."""
        self._idle.discard(worker)
        group = self._queue.take(worker) if self._queue.waiting else ()
        if group:
            self._crew.give(worker, group)
        else:
            self._idle.add(worker)

    def _commit(self, worker: int) -> None:
        group = self._queue.at_hand(worker)
        if worker not in self._trusted:
            missing = self._missing(group)
            if missing:
                raise WorkerError(
                    f"worker {worker} has committed prompts {shown(sorted(missing))}, which don't show in "
                    f"{self._sitting.store} here: it runs on a machine with other files. Choose a folder that all "
                    "machines share, or a URL such as s3://bucket/NAME.zarr"
                )
            self._trusted.add(worker)
        self._queue.done(worker)
        self._progress.prompt(len(group) - self._complete.pop(worker, 0))
        self._deaths_in_vain = 0
        self._sitting.write_seconds()

    def _missing(self, group: Collection[int]) -> set[int]:
        """Those of a group that the store does not show here, after a while."""
        end = time.monotonic() + SHOWS_WITHIN
        while (missing := set(group) - self._sitting.committed()) and time.monotonic() < end:
            time.sleep(1.0)
        return missing

    def _bury(self, worker: int, how: str) -> None:
        self._idle.discard(worker)
        self._trusted.discard(worker)
        self._empty.add(worker)
        before = self._queue.at_hand(worker)
        lost = self._queue.lost(worker, how, self._sitting.committed() if before else ())
        kept = len(before) - len(lost)
        self._progress.prompt(kept - self._complete.pop(worker, 0))
        if worker in self._starting:
            self._starting.discard(worker)
            self._failed_starts += 1
            if self._failed_starts >= STARTS:
                raise WorkerError(
                    f"{STARTS} workers ended one after another while they loaded the model, the last with {how}. Is "
                    "there memory for so many models, and does the same command run with one worker? A script that "
                    "calls collect needs `if __name__ == '__main__':` around it"
                )
        self._deaths_in_vain = 0 if kept else self._deaths_in_vain + 1
        if kept:
            self._sitting.write_seconds()
        self._tell(worker, how, lost)
        if self._deaths_in_vain > STARTS * (self._crew.size + 1):
            raise WorkerError(
                f"{self._deaths_in_vain} workers ended one after another and nothing was committed in between, the "
                f"last with {how} at prompts {shown(lost)}"
            )
        self._refill()

    def _tell(self, worker: int, how: str, lost: Sequence[int]) -> None:
        line = f"worker {worker} ended with {how}"
        if lost:
            is_poison = lost[0] in self._queue.poison
            line += f"; prompts {'set aside' if is_poison else 'to redo'}: {shown(lost)}"
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _refill(self) -> None:
        """Put idle workers, then new ones, to the prompts that are free."""
        for worker in sorted(self._idle):
            if self._queue.waiting:
                self._hand_out(worker)
        for worker in sorted(self._empty):
            if self._queue.waiting or not self._begun:  # also where nothing is left to do, one checks the settings
                self._start(worker)

    def _poison(self) -> str:
        poison = sorted(self._queue.poison)
        name, it = (f"prompt {poison[0]}", "it") if len(poison) == 1 else (f"prompts {shown(poison)}", "them")
        ends = ", ".join(sorted(set(self._queue.poison.values())))
        return (
            f"{name} (counted from 0) ended each worker that got hold of {it}, the last with no other prompt at hand, "
            f"with {ends}; all others are in {self._sitting.store}. The same command tries {it} again: without workers "
            "to see why, with fewer of them or a smaller batch_size if memory ran out"
        )
