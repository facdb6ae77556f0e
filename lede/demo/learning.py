"""What the demo learns: experience collected, costs measured, and a policy trained for each of the two objectives."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lede.buffers import TraceStore, open_store
from lede.collectors import CollectConfig, collect
from lede.cost_profile import CostProfile
from lede.models import EarlyExitModel
from lede.policies import Policy
from lede.profiling import measured_profile
from lede.threshold_training import train_thresholds
from lede.training import train
from lede.training_config import TrainConfig

STORES = ("traces.zarr", "validation.zarr", "rollouts.zarr")
RUNS = {"wall-clock": "run", "paper": "run-paper", "thresholds": "run-thresholds"}
"""Folder of the training run by what is learned: a Q-network for seconds or for the paper's reward, or thresholds."""

CONTEXT = 128
"""Context length that costs are measured at, in tokens: about where the demo decodes."""


@dataclass(frozen=True)
class Effort:
    """How much is learned from, and for how long."""

    train_prompts: int
    """Prompts that traces are collected on."""
    rollout_prompts: int
    """Prompts that the environment is played on."""
    max_new_tokens: int
    """Budget a prompt, in tokens."""
    repeats: int
    """Times that each operation is measured."""
    steps: dict[str, int]
    """Updates of the Q-network, by objective; thresholds need none."""


def shallow_layers(model: EarlyExitModel) -> tuple[int, ...]:
    """Layers that may turn out to be worth drafting at: the second to the middle one."""
    return tuple(range(min(2, model.n_layers // 2), model.n_layers // 2 + 1))


def gather(
    model: EarlyExitModel, prompts: dict[str, list[str]], effort: Effort, seed: int, out: Path
) -> tuple[TraceStore, TraceStore]:
    """Traces of training and validation prompts, and some rollouts of the environment."""
    base = CollectConfig(
        out=out / "traces.zarr",
        collector="teacher",
        candidates=",".join(map(str, shallow_layers(model))),
        max_new_tokens=effort.max_new_tokens,
        seed=seed,
    )
    collect(base, model, prompts["train"][: effort.train_prompts])
    collect(replace(base, out=out / "validation.zarr"), model, prompts["validation"])
    rollout = CollectConfig(
        out=out / "rollouts.zarr", collector="rollout", max_new_tokens=effort.max_new_tokens // 2, seed=seed
    )
    collect(rollout, model, prompts["train"][: effort.rollout_prompts])
    traces, validation = open_store(out / "traces.zarr"), open_store(out / "validation.zarr")
    assert isinstance(traces, TraceStore)
    assert isinstance(validation, TraceStore)
    return traces, validation


def price(model: EarlyExitModel, effort: Effort, console: Console, out: Path) -> CostProfile:
    """Seconds of the engine's operations, measured here and now."""
    columns = (TextColumn("measuring costs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("measuring", total=effort.repeats + 1)
        found = measured_profile(
            model, (CONTEXT,), shallow_layers(model), effort.repeats, lambda: progress.advance(task)
        )
    found.save(out / "profile.json")
    return found


def learn(what: str, effort: Effort, seed: int, out: Path, candidates: tuple[int, ...] | None) -> Policy:
    """A policy of one of `RUNS`, with given candidates or those that a search finds fastest."""
    run = out / RUNS[what]
    steps = effort.steps.get(what, 1)
    config = TrainConfig(
        buffer=str(out / "traces.zarr"),
        out=str(run),
        validation=str(out / "validation.zarr"),
        objective="paper" if what == "paper" else "wall-clock",
        algo="thresholds" if what == "thresholds" else "dqn",
        profile=str(out / "profile.json"),
        candidates="auto" if candidates is None else ",".join(map(str, candidates)),
        steps=steps,
        eval_interval=max(1, steps // 8),
        refresh_interval=max(1, steps // 8),
        checkpoint_interval=max(1, steps // 4),
        min_exits=20,
        seed=seed,
    )
    policy: Policy = train_thresholds(config) if what == "thresholds" else train(config)
    if what == "wall-clock":
        shutil.copytree(run / "policy", out / "policy", dirs_exist_ok=True)
    return policy
