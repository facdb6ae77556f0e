"""Compiling a model's layers ahead of time: once, for every process that decodes with `--compile` afterwards."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lede.compiled_layers import ROW_BUCKETS
from lede.families import UnsupportedModelError
from lede.kernel_compiler import KernelJob
from lede.kernel_inputs import tensors_in, told_inputs, with_tensors
from lede.kernel_processes import compile_jobs
from lede.kernel_source import Head, KernelSource, UnknownPartError
from lede.kernel_store import kernels_folder, make_folder, note_of, source_digest
from lede.kernels import kernel_name, kernels_of, reading_row
from lede.logit_reading import LogitReading
from lede.models import EarlyExitModel, load_model
from lede.policies.base import SkipSublayers
from lede.skeletons import numberless, skeleton

PROMPT = 5
"""Tokens of the text behind which kernels are tried out."""
MOST_WORKERS = 4
"""Compilers at once unless told otherwise: each needs some 600 MB."""


@dataclass(frozen=True)
class CompileConfig:
    """Settings."""

    model: str = "demo"
    """Model: demo, a folder, a hub id, or a .gguf file."""
    dtype: str | None = None
    """Dtype of the weights, such as bfloat16; float32 unless given."""
    pack_weights: bool = False
    """Compile for packed weights: for who decodes with `--pack-weights`, which has kernels of its own."""
    gaps: bool = False
    """Also compile layers without their attention and without their MLP, which policies with gaps run (`swift`)."""
    rows: tuple[int, ...] = ROW_BUCKETS
    """Numbers of rows to compile for; blocks are padded to the next of them."""
    workers: int | None = None
    """Compilers that run at once; one for each core unless given, but no more than four."""

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
    """What went wrong and what to do, in a line, by what failed."""
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
    n_workers = workers or min(MOST_WORKERS, _n_cores())
    failed = {}
    for number, (key, said) in enumerate(compile_jobs(jobs, n_workers), start=1):
        print(f"{number} of {len(jobs)} kernels: {wanted[key].about}{' failed' if said else ''}", file=sys.stderr)
        if said:
            failed[wanted[key].about] = said
    return CompileReport(len(jobs) - len(failed), len(wanted) - len(jobs), failed, time.perf_counter() - started)


def _check(rows: Sequence[int], workers: int | None) -> None:
    if not rows or set(rows) - set(ROW_BUCKETS):
        known, got = ", ".join(map(str, ROW_BUCKETS)), ", ".join(map(str, rows)) or "none"
        raise ValueError(f"rows must be among {known}, to which blocks are padded, got {got}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")


@torch.inference_mode()
def _jobs(model: EarlyExitModel, rows: Sequence[int], gaps: bool) -> list[KernelJob]:
    """What there is to compile: each kind of layer, and the head, for each number of rows."""
    threads = torch.get_num_threads()
    found: dict[str, KernelJob] = {}
    head = Head(model.readout)
    head_source = KernelSource(head)
    layers: list[tuple[int, nn.Module, str]] = [(i, layer, "") for i, layer in model.steps]
    if gaps and model.n_layers > 2:  # the first and the last layer are never left out
        every, none = frozenset(range(2, model.n_layers)), frozenset[int]()
        for attention, mlp, without in ((every, none, " without attention"), (none, every, " without MLP")):
            try:
                steps = model.sublayers.skipping(SkipSublayers(attention=attention, mlp=mlp))
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{error}, and compile without --gaps") from None
            layers += [(i, layer, without) for i, layer in steps]
    sources = [(i, layer, without, KernelSource(layer)) for i, layer, without in layers]
    for n in rows:
        cache = model.new_cache(PROMPT + 2 * n)
        prompt = model.block(cache, 0, PROMPT)
        model.run_eagerly(model.embed(torch.zeros(1, PROMPT, dtype=torch.long), prompt), model.steps, prompt)
        block = model.block(cache, PROMPT, n)
        hidden = model.embed(torch.zeros(1, n, dtype=torch.long), block)
        for i, layer, without, source in sources:
            arguments, keys, values = model.tables.arguments(block, i, hidden), cache.keys[i], cache.values[i]
            if keys is None or values is None:
                continue
            key = kernel_name(source, hidden, arguments, (keys, values))
            if key not in found:
                about = f"{type(layer).__name__} {i + 1}{without}, {_rows(n)}"
                cache.rewind(PROMPT)
                model.run_eagerly(hidden, [(i, layer)], block)
                extends = cache.lengths[i] > PROMPT
                bare = with_tensors(arguments, iter([numberless(each.contiguous()) for each in tensors_in(arguments)]))
                slots = (numberless(keys), numberless(values))
                shapes = (bare, model.cache_argument, numberless(hidden), slots, PROMPT, extends, threads)
                told = source_digest(source.text, told_inputs(hidden, arguments, (keys, values)))
                found[key] = KernelJob(key, about, skeleton(layer), *shapes, told)
        found |= _job_alone(head, head_source, f"head, {_rows(n)}", hidden)
    reading, row = LogitReading(), reading_row(model.readout(hidden)[0, 0])
    found |= _job_alone(reading, KernelSource(reading), "reading of logits", row)
    return list(found.values())


def _job_alone(module: nn.Module, source: KernelSource, about: str, given: torch.Tensor) -> dict[str, KernelJob]:
    """What there is to compile for a module that is given one tensor and has no cache."""
    key, told = kernel_name(source, given, None, None), source_digest(source.text, told_inputs(given, None, None))
    shapes = (None, "", numberless(given), None, 0, False, torch.get_num_threads())
    return {key: KernelJob(key, about, skeleton(module), *shapes, told)}


def _n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _rows(n: int) -> str:
    return "1 row" if n == 1 else f"{n} rows"


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
    for reason in dict.fromkeys(report.failed.values()):
        first, *more = [about for about, said in report.failed.items() if said == reason]
        print(f"failed: {first}{f' and {len(more)} more' if more else ''}: {reason}")
    return report
