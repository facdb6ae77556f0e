"""Throughput of collection: the teacher against bare generation and a forward pass, storage, and the live environment.

python -m benchmarks.collection_throughput --batch-size 32 --repeats 5 --out runs/collection.json

Everything runs the same prompts on the same model in one process. Parts take turns in every repetition, in an order of
its own, and a figure is the median over repetitions of a ratio within one. On a machine that others use, `--clock cpu`
counts the process's own seconds; storage is always by the wall, since it waits for the disk.

Bare generation and the pass are done by lede's engine and by transformers' own `generate` and forward. A pass reads the
last head alone, as one does who wants logits, or every head, as the teacher must.

A transition is one decision of `lede/LayerExit-v0`. What the teacher yields is counted in three ways: one episode a
token under uniform exits, like those that the environment is stepped through; both outcomes, continue and exit, of
every decision that the traces hold; and the steps that would show these outcomes in the environment, one episode for
each exit and one without. The last two also with every layer as a candidate, on both sides. Beside them stands the most
that the first count could be: the products that a token takes, all heads read, as fast as this machine multiplies.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.collection_baselines import Baselines
from benchmarks.collection_bound import multiply_adds, multiply_adds_a_second, steps_for_every_outcome
from lede.buffers import PromptTrace, StoreSettings, StoreWriter, prompts_digest, replay
from lede.buffers.columns import transition_bytes
from lede.collectors import BranchRules, collect_teacher
from lede.collectors.rollout import NumberedPrompt
from lede.environment import environment
from lede.envs import LayerExitEnv, Rules
from lede.features import parse_candidates
from lede.models import EarlyExitModel, load_model
from lede.prompts import DEFAULT_PROMPTS, load_prompts

SHARD = 32
"""Prompts a shard, as `lede collect` has it."""


@dataclass(frozen=True)
class CollectionConfig:
    """Settings."""

    model: str = "demo"
    """Folder or hub id of the model, or "demo"."""
    prompts: Path | None = None
    """Prompts; heads of Python files when not given."""
    batch_size: int = 8
    """Prompts that share forward passes; a prompt is used again where there are fewer."""
    max_new_tokens: int = 64
    """New tokens of every text."""
    env_tokens: int = 48
    """Tokens that the environment is stepped through, one decision after another; 0 leaves it out."""
    repeats: int = 5
    """Timed repetitions, after one that is not counted."""
    clock: Literal["wall", "cpu"] = "wall"
    """What is counted: passing time, or the process's own on the CPU."""
    threads: int | None = None
    """Threads of torch on the CPU; as it is when not given."""
    device: str | None = None
    """Device of the model."""
    dtype: str | None = None
    """Of its weights."""
    pack_weights: bool = False
    """Pack the weights for lede's engine; transformers reads them as they are."""
    seed: int = 0
    """Seed of the turns and of the decisions."""
    out: Path | None = None
    """JSON file of all seconds."""


class Collection:
    """What is measured: one batch of prompts, and the parts that run it."""

    def __init__(self, model: EarlyExitModel, rows: Sequence[list[int]], config: CollectionConfig) -> None:
        self.model, self.config = model, config
        self.prompts: list[NumberedPrompt] = list(enumerate(rows))
        self.rules = Rules(parse_candidates(None, model.n_layers), config.max_new_tokens)
        self.traces = self._teach(None)
        texts = [[*ids, *trace.token_ids.tolist()] for ids, trace in zip(rows, self.traces, strict=True)]
        self.baselines = Baselines(model, rows, texts)
        self.storage_shares: list[float] = []
        self.parts: dict[str, Callable[[], int]] = {
            "generate": self.baselines.generate,
            "forward": lambda: self.baselines.forward(every_layer=False),
            "forward, every head": lambda: self.baselines.forward(every_layer=True),
            "transformers, generate": self.baselines.transformers_generate,
            "transformers, forward": self.baselines.transformers_forward,
            "teacher": lambda: self.n_new(self._teach(None)),
            "teacher, branches": lambda: self.n_new(self._teach(BranchRules())),
            "teacher, stored": self.store,
        }
        if config.env_tokens:
            self.parts |= {
                "teacher, played": self.play,
                "environment": lambda: self.step(None),
                "environment, all layers": lambda: self.step("all"),
            }

    def store(self) -> int:
        """The teacher, batch after batch until a shard is full, and the traces into a store; returns new tokens.

        Notes the share of the wall-clock that storage took.
        """
        start, spent = time.perf_counter(), 0.0
        n_batches = -(-SHARD // len(self.prompts))
        prompts = [(i, self.prompts[i % len(self.prompts)][1]) for i in range(n_batches * len(self.prompts))]
        with tempfile.TemporaryDirectory() as folder:
            writer = StoreWriter.open(Path(folder) / "traces.zarr", self.settings("traces"), shard_prompts=SHARD)
            for trace in collect_teacher(self.model, prompts, self.rules, 0, self.config.batch_size):
                begun = time.perf_counter()
                writer.add(trace)
                spent += time.perf_counter() - begun
            begun = time.perf_counter()
            writer.close()
            spent += time.perf_counter() - begun
            self.storage_shares.append(spent / (time.perf_counter() - start))
        return n_batches * self.n_new(self.traces)

    def play(self) -> int:
        """The teacher, and one episode a token under uniform exits from its traces; returns transitions."""
        settings, luck = self.settings("transitions"), np.random.default_rng(self.config.seed)
        options = np.asarray((0, *self.rules.candidates))
        rollouts = [replay(t, luck.choice(options, t.n_decided), settings) for t in self._teach(None)]
        return sum(rollout.n_rows for rollout in rollouts)

    def step(self, candidates: str | None) -> int:
        """The environment under uniform exits, one decision after another; returns transitions."""
        prompts = [list(ids) for _, ids in self.prompts]
        env = LayerExitEnv(
            self.model, prompts, candidates, max_new_tokens=self.config.env_tokens + 1, order="sequential"
        )
        luck, n_steps = np.random.default_rng(self.config.seed), 0
        options = (0, *env.episodes.rules.candidates)
        for _ in range(self.config.env_tokens):
            _, info = env.reset()
            plan, over = luck.choice(options), False
            while not over:
                _, _, over, _, info = env.step(int(info["layer"] == plan))
                n_steps += 1
        return n_steps

    def settings(self, kind: Literal["traces", "transitions"]) -> StoreSettings:
        """Settings of a store of this collection."""
        model = self.model
        return StoreSettings(
            kind=kind,
            model=model.name,
            n_layers=model.n_layers,
            vocab_size=model.vocab_size,
            candidates=self.rules.candidates,
            seed=0,
            prompts_digest=prompts_digest([ids for _, ids in self.prompts]),
        )

    def n_new(self, traces: Sequence[PromptTrace]) -> int:
        """New tokens."""
        return sum(trace.token_ids.size for trace in traces)

    def _teach(self, branching: BranchRules | None) -> list[PromptTrace]:
        batch = self.config.batch_size
        return list(collect_teacher(self.model, self.prompts, self.rules, 0, batch, branching=branching))


def measure(collection: Collection) -> dict[str, dict[str, Any]]:
    """Seconds of every part in every repetition, and what it yielded: new tokens, or transitions."""
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[collection.config.clock]
    parts = collection.parts
    # warms up as well
    found: dict[str, dict[str, Any]] = {name: {"yield": run(), "seconds": []} for name, run in parts.items()}
    collection.storage_shares.clear()
    order, luck = list(parts), random.Random(collection.config.seed)
    for _ in range(collection.config.repeats):
        luck.shuffle(order)
        for name in order:
            _wait(collection.model)
            start = clock()
            found[name]["yield"] = parts[name]()
            _wait(collection.model)
            found[name]["seconds"].append(clock() - start)
    return found


def figures(collection: Collection, found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What decides, each the median over repetitions of a ratio within one."""
    seconds = {name: each["seconds"] for name, each in found.items()}

    def against(*parts: str) -> float:
        rows = zip(*(seconds[part] for part in (*parts, "teacher")), strict=True)
        return float(statistics.median(sum(row[:-1]) / row[-1] for row in rows))

    told = {
        "teacher over generate + forward with every head": against("generate", "forward, every head"),
        "teacher over generate + forward with the last head": against("generate", "forward"),
        "teacher over transformers' generate + forward": against("transformers, generate", "transformers, forward"),
        "storage share": statistics.median(collection.storage_shares),
        "bytes per transition, rollouts": transition_bytes(collection.settings("transitions")),
        "bytes per transition, traces": transition_bytes(collection.settings("traces")),
    }
    return told | _over_environment(collection, found) if "environment" in found else told


def _over_environment(collection: Collection, found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Transitions a second of the teacher over those of the environment, by each count."""
    model, n_candidates, n_layers = collection.model, len(collection.rules.candidates), collection.model.n_layers
    decided = sum(trace.n_decided for trace in collection.traces)
    played = found["teacher, played"]["yield"]

    def over(teacher: str, transitions: int, environment: str) -> float:
        rows = zip(found[teacher]["seconds"], found[environment]["seconds"], strict=True)
        return float(statistics.median(transitions / a / (found[environment]["yield"] / b) for a, b in rows))

    by = "transitions/s over the environment"
    products, speed = multiply_adds(model), multiply_adds_a_second(model)
    most = played / collection.baselines.n_new * speed / products
    step = statistics.median(found["environment"]["seconds"]) / found["environment"]["yield"]
    return {
        f"{by}, one episode a token": over("teacher, played", played, "environment"),
        f"{by}, both outcomes": over("teacher", 2 * n_candidates * decided, "environment"),
        f"{by}, both outcomes, all layers": over("teacher", 2 * (n_layers - 1) * decided, "environment, all layers"),
        f"{by}, steps for both outcomes": over(
            "teacher", steps_for_every_outcome(n_candidates) * decided, "environment"
        ),
        f"{by}, steps for both outcomes, all layers": over(
            "teacher", steps_for_every_outcome(n_layers - 1) * decided, "environment, all layers"
        ),
        "multiply-adds a token, every head": products,
        "multiply-adds/s of the machine": speed,
        f"{by}, one episode a token, the most that arithmetic allows": most * step,
    }


def _wait(model: EarlyExitModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def main(config: CollectionConfig) -> None:
    """Measure and print, and write the seconds where they are wanted."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model = load_model(config.model, device=config.device, dtype=config.dtype, pack_weights=config.pack_weights)
    if model.hf_model.generation_config is not None:
        model.hf_model.generation_config.eos_token_id = None  # every text has the same length
    texts = [p.text for p in load_prompts(config.prompts)] if config.prompts is not None else list(DEFAULT_PROMPTS)
    ids = [list(model.tokenizer(text)["input_ids"]) for text in texts]
    collection = Collection(model, [ids[i % len(ids)] for i in range(config.batch_size)], config)
    found = measure(collection)
    told = figures(collection, found)
    shown = Table("part", "yield", f"seconds ({config.clock})", "a second")
    for name, each in found.items():
        middle = statistics.median(each["seconds"])
        shown.add_row(name, str(each["yield"]), f"{middle:.3f}", f"{each['yield'] / middle:.0f}")
    console = Console()
    console.print(shown)
    for name, value in told.items():
        console.print(f"{name}: {value:.4g}", highlight=False, soft_wrap=True)
    if config.out is not None:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {**asdict(config), "prompts": config.prompts and str(config.prompts), "out": str(config.out)}
        record = {"settings": settings, "environment": environment(), "figures": told, "parts": found}
        config.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(CollectionConfig, description=__doc__))
