"""Throughput of batches: a loop of single calls, lede's batch and transformers' batched `generate`.

python -m benchmarks.batch_throughput --batch-sizes 4 8 --out runs/batch.json

Every cell writes the same texts: prompts of unequal length, greedily, to the same number of new tokens, no text ending
before. Cells take turns in every repetition, in an order of its own; the table has medians, and how many rows are the
text of transformers' single calls (float32 may part at a near-tie). transformers drafts for single texts alone, so its
batch decodes plainly.
"""

from __future__ import annotations

import json
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Column, Table

from lede.environment import environment
from lede.generation import generate
from lede.models import EarlyExitModel, load_model
from lede.policies import parse_policy
from lede.prompts import DEFAULT_PROMPTS, load_prompts

Texts = list[list[int]]


@dataclass(frozen=True)
class ThroughputConfig:
    """Settings."""

    model: str = "demo"
    """Folder or hub id of the model, or "demo"."""
    policy: str = "static:exit_layer=5;draft_length=4"
    """The policy beside plain decoding."""
    prompts: Path | None = None
    """Prompts, as `lede bench` reads them; heads of Python files when not given."""
    batch_sizes: tuple[int, ...] = (4, 8)
    """Rows of a batch; a prompt is used again where there are fewer."""
    max_new_tokens: int = 64
    """New tokens of every row."""
    repeats: int = 7
    """Timed repetitions, after one that is not counted."""
    threads: int | None = None
    """Threads of torch on the CPU; as it is when not given."""
    device: str | None = None
    """Device of the model."""
    dtype: str | None = None
    """Of its weights."""
    seed: int = 0
    """Seed of the order of the cells."""
    out: Path | None = None
    """JSON file of all seconds."""


@dataclass(frozen=True)
class Cell:
    """One way to decode one batch, measured."""

    batch_size: int
    """Rows."""
    policy: str
    """Policy, or "plain"."""
    how: str
    """"loop", "lede" or "transformers"."""
    tokens: int
    """New tokens of all rows."""
    seconds: tuple[float, ...]
    """Of each repetition, prefill included."""
    equal_rows: int
    """Rows that are the text of transformers' single calls."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the median seconds."""
        return self.tokens / statistics.median(self.seconds)


def measure(model: EarlyExitModel, rows: Texts, config: ThroughputConfig) -> list[Cell]:
    """All cells of one batch of prompts."""
    policy = parse_policy(config.policy)
    cells: dict[tuple[str, str], Callable[[], Texts]] = {
        ("plain", "loop"): lambda: [_lede(model, [row], None, config)[0] for row in rows],
        ("plain", "lede"): lambda: _lede(model, rows, None, config),
        ("plain", "transformers"): lambda: _transformers(model, rows, config),
        (config.policy, "loop"): lambda: [_lede(model, [row], policy, config)[0] for row in rows],
        (config.policy, "lede"): lambda: _lede(model, rows, policy, config),
    }
    wanted = [_transformers(model, [row], config)[0] for row in rows]
    equal = {cell: sum(map(list.__eq__, decode(), wanted)) for cell, decode in cells.items()}  # warms up as well
    seconds: dict[tuple[str, str], list[float]] = {cell: [] for cell in cells}
    order, luck = list(cells), random.Random(config.seed)
    for _ in range(config.repeats):
        luck.shuffle(order)
        for cell in order:
            _wait(model)
            start = time.perf_counter()
            cells[cell]()
            _wait(model)
            seconds[cell].append(time.perf_counter() - start)
    tokens = len(rows) * config.max_new_tokens
    return [Cell(len(rows), *cell, tokens, tuple(seconds[cell]), equal[cell]) for cell in cells]


def _lede(model: EarlyExitModel, rows: Texts, policy: Any, config: ThroughputConfig) -> Texts:
    if policy is not None:
        policy.reset()
    outputs = generate(model, input_ids=rows, policy=policy, max_new_tokens=config.max_new_tokens, eos_token_id=())
    return [out.sequences[0, len(row) :].tolist() for out, row in zip(outputs, rows, strict=True)]


def _transformers(model: EarlyExitModel, rows: Texts, config: ThroughputConfig) -> Texts:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.hf_model.generate(
            ids, attention_mask=mask, max_new_tokens=config.max_new_tokens, do_sample=False, pad_token_id=0
        )
    texts: Texts = out[:, width:].tolist()
    return texts


def _wait(model: EarlyExitModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def table(cells: list[Cell]) -> Table:
    """Cells as rows, with ratios over the loop of the same policy and over transformers' batch."""
    shown = Table("batch", "policy", Column("how", no_wrap=True), "tokens/s")
    for name in ("over its loop", "over transformers", "exact rows"):
        shown.add_column(name)
    by = {(cell.batch_size, cell.policy, cell.how): cell.tokens_per_second for cell in cells}
    for cell in cells:
        rate = cell.tokens_per_second
        loop, batched = by[cell.batch_size, cell.policy, "loop"], by[cell.batch_size, "plain", "transformers"]
        if cell.how == "transformers":
            loop = by[cell.batch_size, "plain", "loop"]
        shown.add_row(
            str(cell.batch_size),
            cell.policy.partition(":")[0],
            cell.how,
            f"{rate:.1f}",
            f"{rate / loop:.2f}",
            f"{rate / batched:.2f}",
            f"{cell.equal_rows}/{cell.batch_size}",
        )
    return shown


def main(config: ThroughputConfig) -> None:
    """Measure and print, and write the seconds where they are wanted."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model = load_model(config.model, device=config.device, dtype=config.dtype)
    if model.hf_model.generation_config is not None:
        model.hf_model.generation_config.eos_token_id = None  # every text has the same length
    texts = [p.text for p in load_prompts(config.prompts)] if config.prompts is not None else list(DEFAULT_PROMPTS)
    ids = [list(model.tokenizer(text)["input_ids"]) for text in texts]
    cells: list[Cell] = []
    for size in config.batch_sizes:
        cells += measure(model, [ids[i % len(ids)] for i in range(size)], config)
    Console().print(table(cells))
    if config.out is not None:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {**asdict(config), "prompts": config.prompts and str(config.prompts), "out": str(config.out)}
        record = {"settings": settings, "environment": environment(), "cells": [asdict(cell) for cell in cells]}
        config.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(ThroughputConfig, description=__doc__))
