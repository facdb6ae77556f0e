"""Compiles kernels ahead of time, in a process of its own: torch's compiler needs memory that decoding does not.

python -m lede.kernel_compiler REQUEST

The request is a pickled list of `KernelJob`s. Lines on stdout tell, as JSON, that it was read, and then of each kernel
that is there or that failed; whatever else is said, also by C++ compilers, goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lede.kernel_inputs import ALIKE, MASK, Slots, tensors_in, with_tensors
from lede.kernel_source import KernelSource
from lede.kernel_store import CODE, KernelNote, code_digest, maker, new_kernel, note_of, put_in_place
from lede.open_slots import OpenSlots

LONGEST = 300
"""Characters of an error that are told."""


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
    slots: Slots | None
    """A layer's keys and values, on "meta"; None for a head."""
    start: int
    """Where in them the states go, for example."""
    extends: bool
    """Whether it writes there."""
    threads: int
    """Threads that run it."""
    source: str
    """What the code is of, as `source_digest` tells it."""


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


def compile_kernel(job: KernelJob) -> None:
    """Compile one kernel and put it where it is looked for.

    Raises:
        ValueError: Its code would be for one length of text alone.
        Exception: Whatever torch's compiler raises.
    """
    import torch._inductor
    import torch._inductor.test_operators  # registers the operator by which inductor is told to store a value

    started = time.perf_counter()
    torch.set_num_threads(job.threads)
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
        inputs = (_filled(job.hidden), *places, *map(_filled, job.slots), tables, weights)
        masks = {id(each) for each in [job.arguments.get(MASK)] if each is not None}
        seen = [{3: open_size} if id(each) in masks else {} for each in tensors_in(job.arguments)]
        shapes = ({}, {0: open_size}, {0: open_size}, {2: open_size}, {2: open_size}, seen, [{}] * len(weights))
    with new_kernel(job.key) as partial:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's compiler about itself
            exported = torch.export.export(program, inputs, dynamic_shapes=shapes, strict=False)
            _check_open(exported, shapes)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(partial / CODE))
        digest, seconds = code_digest(partial / CODE), time.perf_counter() - started
        put_in_place(partial, job.key, KernelNote(job.about, job.extends, seconds, digest, job.source, maker()))


def _check_open(exported: torch.export.ExportedProgram, shapes: Any) -> None:
    """Raise ValueError where torch took a size that was to stay open for a fixed one, which it does without a word."""
    wanted = tree_leaves(shapes, is_leaf=lambda each: isinstance(each, dict))
    names = set(exported.graph_signature.user_inputs)
    taken = [node for node in exported.graph.nodes if node.name in names]
    for node, sizes in zip(taken, wanted, strict=True):
        fixed = [dim for dim in sizes if not isinstance(node.meta["val"].shape[dim], torch.SymInt)]
        if fixed:
            raise ValueError(f"its code would be for a {node.name} of {node.meta['val'].shape[fixed[0]]} alone")


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()


def reason(error: BaseException) -> str:
    """What went wrong, in a line: torch's errors have the C++ compiler's further down."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:1] + [line for line in lines[1:] if "error:" in line][:1])
    return f"{type(error).__name__}: {said[:LONGEST]}"


def main(request: Path) -> None:
    """Compile what is asked for, telling of each."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as told, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)

        def tell(**what: str) -> None:
            print(json.dumps(what), file=told, flush=True)

        jobs: list[KernelJob] = pickle.loads(request.read_bytes())
        tell(ready="")
        for job in jobs:
            try:
                if note_of(job.key) is None:  # another command may have been faster
                    compile_kernel(job)
                tell(key=job.key)
            except Exception as error:  # whatever the compiler may raise: the layer is compiled otherwise then
                tell(key=job.key, error=reason(error))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(Path(sys.argv[1]))
