"""Compiling a model's layers ahead of time: once, for every process that decodes with `--compile` afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lede.compiled_layers import ROW_BUCKETS
from lede.kernel_compiler import KernelJob
from lede.kernel_inputs import tensors_in, with_tensors
from lede.kernel_source import Head, KernelSource, UnknownPartError, numberless, skeleton
from lede.kernel_store import kernels_folder, make_folder, note_of
from lede.kernels import kernel_name, kernels_of, reading_row
from lede.logit_reading import LogitReading
from lede.models import EarlyExitModel, load_model
from lede.policies.base import SkipSublayers

PROMPT = 5
"""Tokens of the text behind which kernels are tried out."""
MOST_WORKERS = 4
"""Compilers at once unless told otherwise: each needs some 600 MB."""


@dataclass(frozen=True)
class CompileConfig:
    """Settings."""

    model: str = "demo"
    """Folder or hub id of the model, a .gguf file, or "demo"."""
    dtype: str | None = None
    """Of its weights; float32 when not given."""
    pack_weights: bool = False
    """Whether it will run with `--pack-weights`, which has kernels of its own."""
    gaps: bool = False
    """Also compile layers without their attention and without their MLP, which policies with gaps run (`swift`)."""
    rows: tuple[int, ...] = ROW_BUCKETS
    """Numbers of rows to compile for; blocks are padded to the next of them."""
    workers: int | None = None
    """Compilers that run at once; one for each core when not given, but no more than four."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ValueError: Layers are never run with so many rows, or there are no workers.
        """
        _check(self.rows, self.workers)


@dataclass(frozen=True)
class CompileReport:
    """What was compiled."""

    compiled: int
    """Kernels that were compiled now."""
    found: int
    """Kernels that had been before."""
    failed: dict[str, str]
    """What went wrong, by what failed."""
    seconds: float
    """Seconds that it took."""

    @property
    def exit_code(self) -> int:
        """1 where a kernel could not be compiled, else 0."""
        return int(bool(self.failed))


def compile_ahead(
    model: EarlyExitModel,
    rows: Sequence[int] = ROW_BUCKETS,
    gaps: bool = False,
    workers: int | None = None,
) -> CompileReport:
    """Compile the kernels of a model that are not there yet, in processes of their own.

    Args:
        model: The model, on the CPU, with packed weights or without, as it is to run.
        rows: Numbers of rows.
        gaps: Whether layers without one of their sublayers are compiled too.
        workers: Processes at once.

    Raises:
        ValueError: The model is not on the CPU, this torch can't load kernels, they can't be written, layers are never
            run with so many rows, or there are no workers.
        UnknownPartError: A layer is made of something whose code can't be told by its source.
        UnsupportedModelError: With `gaps`: the layers can't be run in part.
    """
    started = time.perf_counter()
    _check(rows, workers)
    make_folder()
    if model.device.type != "cpu":
        raise ValueError(
            f"kernels are compiled ahead for models on the CPU alone, and this one is on {model.device}; on a GPU "
            "--compile records CUDA graphs when the model is loaded"
        )
    if model.places is not None:
        raise ValueError("accelerate's hooks move the layers or their input between devices; load the model onto one")
    if kernels_of(model) is None:
        raise ValueError(
            "this torch can't load kernels that were compiled ahead; --compile compiles them when it loads a model"
        )
    wanted = {job.key: job for job in _jobs(model, rows, gaps)}
    jobs = [job for key, job in wanted.items() if note_of(key) is None]
    n_workers = workers or min(MOST_WORKERS, os.cpu_count() or 1)
    told = _run([jobs[i::n_workers] for i in range(min(n_workers, len(jobs)))])
    failed = {job.about: told.get(job.key, "its compiler died") for job in jobs if told.get(job.key) != ""}
    compiled = sum(said == "" for said in told.values())
    return CompileReport(compiled, len(wanted) - len(jobs), failed, time.perf_counter() - started)


def _check(rows: Sequence[int], workers: int | None) -> None:
    if not rows or set(rows) - set(ROW_BUCKETS):
        known, got = ", ".join(map(str, ROW_BUCKETS)), ", ".join(map(str, rows)) or "none"
        raise ValueError(f"rows must be among {known}, to which blocks are padded, got {got}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")


@torch.inference_mode()
def _jobs(model: EarlyExitModel, rows: Sequence[int], gaps: bool) -> list[KernelJob]:
    """What there is to compile: each kind of layer, and the head, for each number of rows."""
    threads, found = torch.get_num_threads(), {}
    head = Head(model.readout)
    head_source = KernelSource(head)
    layers: list[tuple[int, nn.Module]] = list(model.steps)
    if gaps and model.n_layers > 2:  # the first and the last layer are never left out
        every = frozenset(range(2, model.n_layers))
        for plan in (SkipSublayers(attention=every, mlp=frozenset()), SkipSublayers(attention=frozenset(), mlp=every)):
            layers += model.sublayers.skipping(plan)
    sources = [(i, layer, KernelSource(layer)) for i, layer in layers]
    for n in rows:
        cache = model.new_cache(PROMPT + 2 * n)
        prompt = model.block(cache, 0, PROMPT)
        model.run_eagerly(model.embed(torch.zeros(1, PROMPT, dtype=torch.long), prompt), model.steps, prompt)
        block = model.block(cache, PROMPT, n)
        hidden = model.embed(torch.zeros(1, n, dtype=torch.long), block)
        for i, layer, source in sources:
            arguments, slots = model.tables.arguments(block, i, hidden), cache.keys[i]
            if slots is None:
                continue
            key, about = kernel_name(source, hidden, arguments, slots), f"{type(layer).__name__}, {n} rows"
            if key not in found:
                cache.rewind(PROMPT)
                model.run_eagerly(hidden, [(i, layer)], block)
                extends = cache.lengths[i] > PROMPT
                bare = with_tensors(arguments, iter([numberless(each.contiguous()) for each in tensors_in(arguments)]))
                shapes = (bare, model.cache_argument, numberless(hidden), numberless(slots), PROMPT)
                found[key] = KernelJob(key, about, skeleton(layer), *shapes, extends, threads)
        key, about = kernel_name(head_source, hidden, None, None), f"head, {n} rows"
        found[key] = KernelJob(key, about, skeleton(head), None, "", numberless(hidden), None, 0, False, threads)
    reading, row = LogitReading(), reading_row(model.readout(hidden)[0, 0])
    key = kernel_name(KernelSource(reading), row, None, None)
    found[key] = KernelJob(key, "reading of logits", reading, None, "", numberless(row), None, 0, False, threads)
    return list(found.values())


def _run(shares: list[list[KernelJob]]) -> dict[str, str]:
    """Let a process each compile its share; what went wrong by kernel, empty where nothing did."""
    told: dict[str, str] = {}
    n_jobs = sum(map(len, shares))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = []
        for number, share in enumerate(shares):
            request = Path(folder) / f"{number}.pickle"
            request.write_bytes(pickle.dumps(share))
            command = [sys.executable, "-m", "lede.kernel_compiler", str(request)]
            process = stack.enter_context(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=_environment()
                )
            )
            stack.callback(process.kill)  # before it is waited for
            running.append(process)
        for process in running:
            for line in process.stdout or ():
                done: dict[str, Any] = json.loads(line)
                told[done["key"]] = done.get("error", "")
                print(f"compiled {len(told)} of {n_jobs} kernels", file=sys.stderr)
            process.wait()
    return told


def _environment() -> dict[str, str]:
    """The environment of a compiler: it finds the modules that this process finds, and starts no helpers of its own."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def run_compile(config: CompileConfig) -> CompileReport:
    """The command: load, compile, tell."""
    model = load_model(config.model, device="cpu", dtype=config.dtype, pack_weights=config.pack_weights)
    try:
        report = compile_ahead(model, config.rows, config.gaps, config.workers)
    except UnknownPartError as error:
        raise ValueError(f"the layers can't be compiled ahead of time: {error}; --compile compiles them anew") from None
    print(
        f"{report.compiled} kernels compiled in {report.seconds:.0f} s, {report.found} were there: {kernels_folder()}"
    )
    for about, said in report.failed.items():
        print(f"failed: {about}: {said}")
    return report
