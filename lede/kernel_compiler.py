"""Compiles kernels ahead of time, in a process of its own: torch's compiler needs memory that decoding does not.

python -m lede.kernel_compiler REQUEST

The request is a pickled list of `KernelJob`s; a line on stdout tells of each kernel that is there, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from lede.atomic import write_atomically
from lede.compiled_layers import OpenSlots
from lede.kernel_inputs import ALIKE, MASK, tensors_in, with_tensors
from lede.kernel_source import KernelSource
from lede.kernel_store import KernelNote, code_digest, note_bytes, package_of


@dataclass(frozen=True)
class KernelJob:
    """A kernel to compile."""

    key: str
    """Its name."""
    about: str
    """What it runs, in words."""
    skeleton: nn.Module
    """The layer or head, without numbers."""
    arguments: dict[str, Any] | None
    """What a layer is given beside states and cache, tensors being empty ones on "meta"; None for a head."""
    cache_argument: str
    """What it calls its cache."""
    hidden: torch.Tensor
    """States that it is given, on "meta"."""
    slots: torch.Tensor | None
    """A layer's keys or values, on "meta"; None for a head."""
    start: int
    """Where in them the states go, for example."""
    extends: bool
    """Whether it writes there."""
    threads: int
    """Threads that run it."""


class _LayerProgram(nn.Module):
    """A layer whose weights, cache and place are inputs."""

    job: KernelJob
    source: KernelSource

    def __init__(self, job: KernelJob) -> None:
        super().__init__()
        vars(self).update(job=job, source=KernelSource(job.skeleton))

    def forward(
        self,
        hidden: torch.Tensor,
        start: torch.Tensor,
        first: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: list[torch.Tensor],
        weights: list[torch.Tensor],
    ) -> torch.Tensor:
        """States after the layer; `start` and `first` are told by lengths, which may stay open."""
        self.source.place(weights)
        slots = OpenSlots(keys, values, start.shape[0] - ALIKE, first.shape[0])
        arguments = with_tensors(self.job.arguments, iter(tables))
        out = self.job.skeleton(hidden, **arguments, **{self.job.cache_argument: slots})
        states: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return states


class _HeadProgram(nn.Module):
    """A head whose weights are inputs."""

    job: KernelJob
    source: KernelSource

    def __init__(self, job: KernelJob) -> None:
        super().__init__()
        vars(self).update(job=job, source=KernelSource(job.skeleton))

    def forward(self, hidden: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        """Logits."""
        self.source.place(weights)
        logits: torch.Tensor = self.job.skeleton(hidden)
        return logits


def compile_kernel(job: KernelJob) -> KernelNote:
    """Compile one kernel and put it where it is looked for."""
    import torch._inductor
    import torch._inductor.test_operators  # registers the operator by which inductor is told to store a value

    started = time.perf_counter()
    torch.set_num_threads(job.threads)
    file = package_of(job.key)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{job.key}.{uuid4().hex}.pt2")
    open_size = torch.export.Dim.AUTO
    weights = [_filled(tensor) for tensor in KernelSource(job.skeleton).tensors()]
    program: nn.Module
    inputs: tuple[Any, ...]
    shapes: tuple[Any, ...]
    if job.arguments is None or job.slots is None:
        program, inputs, shapes = _HeadProgram(job), (_filled(job.hidden), weights), ({}, [{}] * len(weights))
    else:
        program = _LayerProgram(job)
        tables = [_filled(tensor) for tensor in tensors_in(job.arguments)]
        places = [torch.empty(n + ALIKE, dtype=torch.uint8) for n in (job.start, 0)]
        inputs = (_filled(job.hidden), *places, _filled(job.slots), _filled(job.slots), tables, weights)
        masks = {id(each) for each in [job.arguments.get(MASK)] if each is not None}
        seen = [{3: open_size} if id(each) in masks else {} for each in tensors_in(job.arguments)]
        shapes = ({}, {0: open_size}, {0: open_size}, {2: open_size}, {2: open_size}, seen, [{}] * len(weights))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's compiler about itself
            exported = torch.export.export(program, inputs, dynamic_shapes=shapes, strict=False)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(partial))
        digest = code_digest(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    note = KernelNote(job.about, job.extends, time.perf_counter() - started, digest)
    write_atomically(file.with_suffix(".json"), note_bytes(note))
    return note


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()


def main(request: Path) -> None:
    """Compile what is asked for, telling of each."""
    jobs: list[KernelJob] = pickle.loads(request.read_bytes())
    for job in jobs:
        told: dict[str, Any] = {"key": job.key}
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                told["seconds"] = compile_kernel(job).seconds
        except Exception as error:  # whatever the compiler may raise: the layer is compiled otherwise then
            told["error"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(Path(sys.argv[1]))
