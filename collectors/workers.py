"""Workers that are processes of this machine, spawned: a fork would copy locks and threads of torch and zarr."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from lede.collectors.crew import Committed, Died, Event, Failed, Progressed, Ready
from lede.collectors.recorder import Order, Recorder, StoppedError, own_device, portable

TELL_EVERY = 0.2
"""Seconds between two reports of a worker."""

PATIENCE = 60.0
"""Seconds that workers have to commit what is complete once they are asked to stop."""

_CONTEXT = multiprocessing.get_context("spawn")
_MOMENT = 1.0

_GOODBYE = 10.0
"""Seconds for a process whose pipe has ended to end too, and tell how."""


class ProcessCrew:
    """Spawned processes, each at the other end of a pipe.

    Ctrl-C reaches this process alone, which then asks the workers to stop. If this process is killed, the workers find
    their pipes closed, commit what is complete, and end.

    Args:
        order: What to collect.
        size: Workers that there should be.
    """

    def __init__(self, order: Order, size: int) -> None:
        self._size = size
        self._order = bytes(ForkingPickler.dumps(order))
        self._processes: dict[int, BaseProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._ready: set[int] = set()
        self._goodbye = _GOODBYE

    @property
    def size(self) -> int:
        """Workers that there should be."""
        return self._size

    def pid(self, worker: int) -> int | None:
        """Process id of a worker that was started."""
        return self._processes[worker].pid

    def start(self, worker: int) -> None:
        """Spawn a worker."""
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=work, args=(theirs, worker), name=f"lede collect {worker}", daemon=True)
        with _without_interrupts():
            process.start()
        theirs.close()  # so that the pipe ends with the worker
        self._processes[worker], self._pipes[worker] = process, ours

    def give(self, worker: int, prompts: Sequence[int]) -> None:
        """Send a worker prompts."""
        with contextlib.suppress(OSError):  # it is dead, which its pipe will tell
            self._pipes[worker].send(tuple(prompts))

    def events(self) -> Iterator[Event]:
        """What the workers have told, and who died."""
        for worker in self._speaking():
            event = self._hear(worker)
            if event is not None:
                yield event

    def stop(self) -> None:
        """Tell those that are ready to stop, end those that are not, and wait for all."""
        for worker, process in self._processes.items():
            if worker in self._ready:
                with contextlib.suppress(OSError):
                    self._pipes[worker].send(None)
            else:
                process.terminate()
        self._goodbye = 0.0  # who has closed its pipe has committed, and tells nothing new
        end = time.monotonic() + PATIENCE
        while self._pipes and time.monotonic() < end:
            for worker in self._speaking():  # what they still tell has to be read, or they wait for ever
                self._hear(worker)
        self.kill()

    def kill(self) -> None:
        """End those that are left."""
        for worker, process in list(self._processes.items()):
            process.kill()
            self._end(worker)

    def _speaking(self) -> list[int]:
        """The workers from which there is something to hear, or whose pipe has ended."""
        heard = wait(list(self._pipes.values()), _MOMENT)
        return [worker for worker, pipe in self._pipes.items() if pipe in heard]

    def _hear(self, worker: int) -> Event | None:
        """The next event of a worker; None for one that is of no consequence to others."""
        try:
            event: Event | None = self._pipes[worker].recv()
        except (EOFError, OSError):  # OSError: it was killed while it told something
            return Died(worker, self._end(worker))
        if event is None:  # it runs, and asks what for
            with contextlib.suppress(OSError):
                self._pipes[worker].send_bytes(self._order)
        elif isinstance(event, Ready):
            self._ready.add(worker)
        return event

    def _end(self, worker: int) -> str:
        """Clear up after a worker that is gone, and tell how it went."""
        self._ready.discard(worker)
        self._pipes.pop(worker).close()
        process = self._processes.pop(worker)
        process.join(self._goodbye)
        process.kill()  # its pipe has ended, and nobody could reach it any more
        process.join()
        how = ending(process.exitcode or 0)
        process.close()
        return how


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def work(pipe: Connection, worker: int) -> None:
    """The life of a worker, from its first message until it is told to stop or its pipe ends.

    Args:
        pipe: To the process that started it.
        worker: Its number.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
    line = _Line(pipe, worker)
    try:
        line.say(None)
        order: Order = line.hear()
        recorder = Recorder(order, own_device(order.config.device, worker))
        line.say(Ready(worker))
        while True:
            recorder.record(line.hear(), line.progress)
            line.flush()
            line.say(Committed(worker))
    except StoppedError:
        return  # what is complete is committed
    except Exception as error:
        with contextlib.suppress(StoppedError):
            line.say(Failed(worker, portable(error, f"worker {worker}")))
    finally:
        pipe.close()  # it takes the interpreter a while to end


class _Line:
    """A worker's end of its pipe. Everything raises StoppedError when the other end wants no more, or is gone."""

    def __init__(self, pipe: Connection, worker: int) -> None:
        self._pipe = pipe
        self._worker = worker
        self._tokens = self._prompts = 0
        self._told = 0.0

    def say(self, event: Event | None) -> None:
        try:
            self._pipe.send(event)
        except OSError:
            raise StoppedError from None

    def hear(self) -> Any:
        try:
            said = self._pipe.recv()
        except (EOFError, OSError):
            raise StoppedError from None
        if said is None:
            raise StoppedError
        return said

    def progress(self, n_tokens: int, n_prompts: int) -> None:
        """Count progress and tell of it now and then."""
        self._tokens += n_tokens
        self._prompts += n_prompts
        if time.monotonic() - self._told >= TELL_EVERY:
            self.flush()
        if self._pipe.poll():  # while it works there is nothing else to hear
            raise StoppedError

    def flush(self) -> None:
        """Tell what was counted."""
        self.say(Progressed(self._worker, self._tokens, self._prompts))
        self._tokens = self._prompts = 0
        self._told = time.monotonic()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C waits meanwhile; a process started here never sees it, not even before it can say so itself."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
