"""Workers that are actors of a Ray cluster, one a GPU, or one a machine."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from lede.collectors.config import CollectConfig
from lede.collectors.crew import Committed, Died, Event, Failed, Progressed, Ready, WorkerError
from lede.collectors.recorder import ALL_GPUS, Order, Recorder, StoppedError, portable

ASK_EVERY = 0.5
"""Seconds between two questions about progress."""

PATIENCE = 60.0
"""Seconds that actors have to commit what is complete once they are asked to stop."""


class RayWorker:
    """What runs in an actor: one call records, while others ask how far it is, or tell it to stop.

    Args:
        worker: Its number.
        folder: Working folder of the process that leads, where there is one of that name: paths are relative to it.
    """

    def __init__(self, worker: int, folder: str) -> None:
        self._worker = worker
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._tokens = self._prompts = 0
        self._recorder: Recorder | None = None
        if Path(folder).is_dir():
            os.chdir(folder)

    def prepare(self, order: Order) -> Event:
        """Load the model and open the store."""
        try:
            self._recorder = Recorder(order)  # of the GPUs Ray shows an actor its own
        except Exception as error:
            return Failed(self._worker, portable(error, self._name()))
        return Ready(self._worker)

    def record(self, prompts: Sequence[int]) -> Event | None:
        """Collect and commit prompts; None when told to stop."""
        assert self._recorder is not None
        try:
            self._recorder.record(prompts, self._count)
        except StoppedError:
            return None
        except Exception as error:
            return Failed(self._worker, portable(error, self._name()))
        return Committed(self._worker)

    def progress(self) -> Event:
        """Tokens and prompts since the last call."""
        with self._lock:
            tokens, self._tokens = self._tokens, 0
            prompts, self._prompts = self._prompts, 0
        return Progressed(self._worker, tokens, prompts)

    def stop(self) -> None:
        """Let `record` commit what is complete and end."""
        self._stopped.set()

    def pid(self) -> int:
        """Process id."""
        return os.getpid()

    def _count(self, n_tokens: int, n_prompts: int) -> None:
        with self._lock:
            self._tokens += n_tokens
            self._prompts += n_prompts
        if self._stopped.is_set():
            raise StoppedError

    def _name(self) -> str:
        return f"worker {self._worker} on {ray.util.get_node_ip_address()}"


class RayCrew:
    """Actors of a cluster. Ray keeps no state of ours and restarts nobody: a dead actor's place is taken by a new one.

    A cluster that was joined or started here is left or shut down again; one that the process had joined before stays.

    Args:
        config: Settings of the collection, with the address of the cluster.
        prompts: Its prompts.
        most: Actors at most.

    Raises:
        ConnectionError: There is no cluster at the address.
        WorkerError: The cluster has no GPU, and the settings want one.
    """

    def __init__(self, config: CollectConfig, prompts: list[Any], most: int) -> None:
        self._ours = not ray.is_initialized()
        if self._ours:
            ray.init(address=config.ray or None, log_to_driver=False)
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, int] = {}  # what actors were last told to do, by reference
        self._questions: dict[Any, int] = {}
        self._asked = 0.0
        self._ready: set[int] = set()
        try:
            self._size, self._options, threads = _shares(config, most)
            self._order = ray.put(Order(config, prompts, threads))
        except BaseException:
            self.kill()
            raise

    @property
    def size(self) -> int:
        """Actors that there should be."""
        return self._size

    def actor(self, worker: int) -> Any:
        """The handle of an actor that was started."""
        return self._actors[worker]

    def start(self, worker: int) -> None:
        """Ask for an actor; it starts when the cluster has room."""
        actor = ray.remote(RayWorker).options(**self._options).remote(worker, os.getcwd())
        self._actors[worker] = actor
        self._calls[actor.prepare.remote(self._order)] = worker

    def give(self, worker: int, prompts: Sequence[int]) -> None:
        """Let an actor collect prompts."""
        self._calls[self._actors[worker].record.remote(tuple(prompts))] = worker

    def events(self) -> Iterator[Event]:
        """What the actors have done, how far they are, and who died."""
        done, _ = ray.wait(list(self._calls), num_returns=1, timeout=ASK_EVERY)
        yield from self._progress()
        for call in done:
            event = self._outcome(call)
            if event is not None:
                yield event

    def stop(self) -> None:
        """Tell those at work to stop, end the others, and wait for all."""
        for worker in list(self._actors):
            if worker in self._ready:
                self._actors[worker].stop.remote()
            else:
                self._end(worker)
        end = time.monotonic() + PATIENCE
        while self._calls and time.monotonic() < end:
            done, _ = ray.wait(list(self._calls), num_returns=1, timeout=ASK_EVERY)
            for call in done:
                self._outcome(call)
        self.kill()

    def kill(self) -> None:
        """End all actors, and leave the cluster."""
        if ray.is_initialized():
            for worker in list(self._actors):
                self._end(worker)
            if self._ours:
                ray.shutdown()

    def _outcome(self, call: Any) -> Event | None:
        worker = self._calls.pop(call)
        try:
            event: Event | None = ray.get(call)
        except RayTaskError as error:  # Ray's own trouble with a call, what our code meets comes as an event
            return Failed(worker, RuntimeError(f"worker {worker}: {error}"))
        except RayError as error:
            self._end(worker)
            return Died(worker, _reason(error))
        if isinstance(event, Ready):
            self._ready.add(worker)
        return event

    def _progress(self) -> Iterator[Event]:
        """Answers about progress, and the next questions where it is time."""
        if self._questions:
            answered, _ = ray.wait(list(self._questions), num_returns=len(self._questions), timeout=0)
            for question in answered:
                del self._questions[question]
                with contextlib.suppress(RayError):  # it died, which its call will tell
                    yield ray.get(question)
        if time.monotonic() - self._asked >= ASK_EVERY:
            self._asked = time.monotonic()
            asked = set(self._questions.values())
            for worker in set(self._calls.values()) - asked:
                self._questions[self._actors[worker].progress.remote()] = worker

    def _end(self, worker: int) -> None:
        """Make sure that an actor is gone, even one that is only out of reach."""
        actor = self._actors.pop(worker)
        self._ready.discard(worker)
        for asked in (self._calls, self._questions):
            for reference in [reference for reference, number in asked.items() if number == worker]:
                del asked[reference]
        ray.kill(actor)


def _shares(config: CollectConfig, most: int) -> tuple[int, dict[str, Any], int]:
    """Actors, what each asks of the cluster, and the CPU threads of each."""
    machines = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    options: dict[str, Any] = {"max_concurrency": 3, "max_restarts": 0, "scheduling_strategy": "SPREAD", "num_cpus": 1}
    if (config.device or "").split(":")[0] == ALL_GPUS:
        n_gpus = int(ray.cluster_resources().get("GPU", 0))
        if not n_gpus:
            raise WorkerError(f"the Ray cluster has no GPU, and device is {config.device}; leave out device")
        size = min(config.workers or n_gpus, most)
        options["num_gpus"] = 1 / -(-size // n_gpus)
    else:
        size = min(config.workers or len(machines), most)
    cores = int(min(machines)) // -(-size // len(machines))
    if "OMP_NUM_THREADS" in os.environ:  # Ray sets it in its actors, so that they can't know
        cores = min(cores, torch.get_num_threads())
    return size, options, max(1, cores)


def _reason(error: BaseException) -> str:
    """Why an actor died: the first line of what Ray says, or the last where it ends in a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"'{lines[-1] if 'creation task' in lines[0] else lines[0].rstrip('.:')}'"
