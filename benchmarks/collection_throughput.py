"""Throughput of collection: the teacher against bare generation and a forward pass, storage, and the live environment.

python -m benchmarks.collection_throughput --batch-size 32 --repeats 5 --out runs/collection.json

Everything runs the same prompts on the same model in one process. Parts take turns in every repetition, in an order of
its own, and a figure is the median over repetitions of a ratio within one. On a machine that others use, `--clock cpu`
counts the process's own seconds; storage is always by the wall, since it waits for the disk.

A transition is one decision of `lede/LayerExit-v0`. Three counts of what the teacher yields are told apart: one episode
a token under uniform exits, like those that the environment is stepped through; both outcomes, continue and exit, of
every decision that the traces hold; and the same with every layer as a candidate, on both sides.
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

from lede.buffers import PromptTrace, StoreSettings, StoreWriter, prompts_digest, replay
from lede.buffers.columns import transition_bytes
from lede.collectors import BranchRules, collect_teacher
from lede.collectors.rollout import NumberedPrompt
from lede.environment import environment
from lede.envs import LayerExitEnv, Rules
from lede.features import parse_candidates
from lede.generation import generate
from lede.models import EarlyExitModel, load_model
from lede.prompts import DEFAULT_PROMPTS, load_prompts


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
    env_tokens: int = 12
    """Tokens that the environment is stepped through, one decision after another."""
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
        self.storage_shares: list[float] = []
        self.parts: dict[str, Callable[[], int]] = {
            "generate": self.generate,
            "forward": lambda: self.forward(every_layer=False),
            "forward, every head": lambda: self.forward(every_layer=True),
            "teacher": lambda: self.n_new(self._teach(None)),
            "teacher, branches": lambda: self.n_new(self._teach(BranchRules())),
            "teacher, stored": self.store,
            "teacher, played": self.play,
            "environment": lambda: self.step(None),
            "environment, all layers": lambda: self.step("all"),
        }

    def generate(self) -> int:
        """Write the texts and nothing else."""
        ids = [list(ids) for _, ids in self.prompts]
        outputs = generate(self.model, input_ids=ids, max_new_tokens=self.config.max_new_tokens, eos_token_id=())
        return sum(out.sequences.shape[1] - len(row) for out, row in zip(outputs, ids, strict=True))

    @torch.inference_mode()
    def forward(self, every_layer: bool) -> int:
        """One teacher-forced pass over the texts; logits of the new tokens at the last layer, or at every layer."""
        model = self.model
        texts = [[*trace.prompt_ids.tolist(), *trace.token_ids.tolist()] for trace in self.traces]
        width, first = max(map(len, texts)), min(len(trace.prompt_ids) for trace in self.traces)
        padded = torch.tensor([[*text, *[text[-1]] * (width - len(text))] for text in texts], device=model.device)
        block = model.block(model.new_cache(width, len(texts)), 0, width)
        hidden = model.embed(padded, block)
        for layer in range(model.n_layers):
            hidden = model.run_layers(hidden, layer, layer + 1, block)
            if every_layer or layer == model.n_layers - 1:
                for part in torch.split(hidden[:, first:].flatten(0, 1), 512):  # as much at once as the caches hold
                    model.head(part[None])
        return self.n_new(self.traces)

    def store(self) -> int:
        """The teacher, its traces into a store; notes the share of the wall-clock that storage took."""
        start, spent = time.perf_counter(), 0.0
        with tempfile.TemporaryDirectory() as folder:
            writer = StoreWriter.open(Path(folder) / "traces.zarr", self.settings("traces"))
            for trace in collect_teacher(self.model, self.prompts, self.rules, 0, self.config.batch_size):
                begun = time.perf_counter()
                writer.add(trace)
                spent += time.perf_counter() - begun
            begun = time.perf_counter()
            writer.close()
            spent += time.perf_counter() - begun
            self.storage_shares.append(spent / (time.perf_counter() - start))
        return self.n_new(self.traces)

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
    rules, n_layers = collection.rules, collection.model.n_layers
    decided = sum(trace.n_decided for trace in collection.traces)

    def against(*parts: str) -> float:
        rows = zip(*(seconds[part] for part in (*parts, "teacher")), strict=True)
        return float(statistics.median(sum(row[:-1]) / row[-1] for row in rows))

    def over_env(teacher: str, transitions: int, environment: str) -> float:
        rows = zip(seconds[teacher], seconds[environment], strict=True)
        return float(statistics.median(transitions / a / (found[environment]["yield"] / b) for a, b in rows))

    return {
        "teacher over generate + forward with every head": against("generate", "forward, every head"),
        "teacher over generate + forward with the last head": against("generate", "forward"),
        "storage share": statistics.median(collection.storage_shares),
        "transitions/s over the environment, one episode a token": over_env(
            "teacher, played", found["teacher, played"]["yield"], "environment"
        ),
        "transitions/s over the environment, both outcomes": over_env(
            "teacher", 2 * len(rules.candidates) * decided, "environment"
        ),
        "transitions/s over the environment, both outcomes, all layers": over_env(
            "teacher", 2 * (n_layers - 1) * decided, "environment, all layers"
        ),
        "bytes per transition, rollouts": transition_bytes(collection.settings("transitions")),
        "bytes per transition, traces": transition_bytes(collection.settings("traces")),
    }


def _wait(model: EarlyExitModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def main(config: CollectionConfig) -> None:
    """Measure and print, and write the seconds where they are wanted."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model = load_model(config.model, device=config.device, dtype=config.dtype)
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
        console.print(f"{name}: {value:.4g}", highlight=False)
    if config.out is not None:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {**asdict(config), "prompts": config.prompts and str(config.prompts), "out": str(config.out)}
        record = {"settings": settings, "environment": environment(), "figures": told, "parts": found}
        config.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(CollectionConfig, description=__doc__))
