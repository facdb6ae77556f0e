"""The processes of one training run: one alone, or those that torchrun started, joined by d3rlpy's DDP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Processes:
    """One process of a run, and how many there are.

    All do the same work on the same data, but for the batch, of which each takes a share; d3rlpy's DDP averages the
    gradients. The weights are so the same in all of them at any time, and those that one process alone would have, up
    to the order of floating-point sums.
    """

    rank: int = 0
    """Number of this process, from 0."""
    size: int = 1
    """Processes in all."""
    device: str = "cpu"
    """Where this process trains: of its own GPU, where there are several."""

    @property
    def first(self) -> bool:
        """Whether this process writes and shows what all of them do."""
        return self.rank == 0

    def share(self, n_before: int) -> slice:
        """The part of a batch's piece that is this process's, if `n_before` rows of the batch came before it."""
        return slice((self.rank - n_before) % self.size, None, self.size)

    def mean(self, value: float) -> float:
        """The mean of a number over all processes; itself where there is one."""
        if self.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total.item()) / self.size

    def wait(self) -> None:
        """Go on when all processes are here."""
        self.mean(0.0)


ALONE = Processes()
"""A run of one process."""


@contextmanager
def joined_processes(device: str) -> Iterator[Processes]:
    """The processes that torchrun started, or this one alone; the group lasts as long as the block.

    Args:
        device: `cpu`, which talks by gloo, or `cuda`, which talks by nccl and gives each process a GPU of its own.

    Raises:
        ValueError: The device can't be shared among the processes.
    """
    if _started() == 1:
        yield Processes(device="cuda:0" if device == "cuda" else device)
        return
    size, local = _started(), int(os.environ["LOCAL_RANK"])
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device '{device}' for {size} processes: give cuda, of which each takes its own, or cpu")
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"{os.environ['LOCAL_WORLD_SIZE']} processes for {torch.cuda.device_count()} GPUs: start at most one a "
                "GPU (--nproc-per-node), or train on the CPU"
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    from lede.quiet_d3rlpy import import_d3rlpy

    distributed = import_d3rlpy().distributed
    rank = distributed.init_process_group("gloo" if device == "cpu" else "nccl")
    try:
        joined = Processes(rank, size, device)
        yield joined
        joined.wait()  # whoever leaves while others still work tears down what they talk through
    finally:
        distributed.destroy_process_group()


def check_alone(what: str) -> None:
    """Refuse to do with several processes what is not shared among them.

    Raises:
        ValueError: torchrun started several.
    """
    if _started() > 1:
        raise ValueError(f"{what} is not shared among processes, torchrun started {_started()}: start one")


def _started() -> int:
    """Processes that torchrun started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1
