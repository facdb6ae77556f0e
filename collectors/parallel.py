"""A collection by several workers, of this machine or of a Ray cluster."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from lede.buffers.storage import place_url
from lede.collectors.conductor import Conductor
from lede.collectors.config import CollectConfig
from lede.collectors.crew import Crew
from lede.collectors.plan import prompts_of
from lede.collectors.progress import CollectProgress
from lede.collectors.prompt_queue import PromptQueue
from lede.collectors.recorder import Order
from lede.collectors.sitting import Sitting
from lede.collectors.workers import ProcessCrew
from lede.envs.episodes import PromptSource
from lede.models import EarlyExitModel
from lede.prompts import Prompt


def collect_in_parallel(
    config: CollectConfig, model: EarlyExitModel | None, prompts: PromptSource | None, console: Console
) -> None:
    """Collect with workers, which load the model and write to the store; this process does neither.

    Args:
        config: Settings, with `workers` or `ray`.
        model: Must be None.
        prompts: Prompts to use instead of `config.prompts`.
        console: Where to show progress.

    Raises:
        ValueError: A model object was given, the store is in the memory of one process, there are too few prompts, or
            what `Plan.make` and `StoreWriter.open` raise in a worker.
        WorkerError: See `Conductor.run`.
    """
    if model is not None:
        raise ValueError(
            "workers load the model themselves: save it, name its folder in the settings, and leave the object out; or "
            "collect without workers and ray"
        )
    if place_url(config.out).startswith("memory:"):
        raise ValueError(
            f"{place_url(config.out)} is the memory of one process, which workers don't share; choose a folder or "
            "another URL"
        )
    prompts = prompts_of(config) if prompts is None else prompts
    if isinstance(prompts, (str, Prompt)):
        raise ValueError("prompts must be a list of prompts, got a single one; put it into a list")
    prompts = list(prompts)
    episodes = config.count_episodes(len(prompts))
    sitting = Sitting(config.out)
    done = sitting.committed()
    waiting = [index for index in range(episodes) if index not in done]
    crew = _crew(config, prompts, max(1, len(waiting)))
    queue = PromptQueue(waiting, crew.size, config.batch_size, config.shard_prompts)
    try:
        with CollectProgress(episodes, episodes - len(waiting), console) as progress:
            Conductor(crew, queue, sitting, progress, console).run()
    except KeyboardInterrupt:
        sitting.tell_interrupted(console)
        raise
    finally:
        sitting.end()


def _crew(config: CollectConfig, prompts: list[Any], most: int) -> Crew:
    """The workers, no more than there are prompts."""
    if config.ray is None:
        size = min(config.workers or 1, most)
        return ProcessCrew(Order(config, prompts, max(1, torch.get_num_threads() // size)), size)
    from lede.collectors.ray_workers import RayCrew  # needs the package ray

    return RayCrew(config, prompts, most)
