"""A collection from settings to store: `collect` is the program behind `lede collect`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lede.buffers import StoreWriter
from lede.collectors.config import CollectConfig
from lede.collectors.parallel import collect_in_parallel
from lede.collectors.plan import Plan, prompts_of
from lede.collectors.progress import CollectProgress
from lede.collectors.sitting import Sitting
from lede.envs.episodes import PromptSource
from lede.models import EarlyExitModel, load_model


def collect(config: CollectConfig, model: EarlyExitModel | None = None, prompts: PromptSource | None = None) -> Path:
    """Fill a store with rollouts or traces, or go on filling it.

    Prompts that the store has are skipped, so running again with the same settings resumes; more `episodes` extend a
    store. Ctrl-C commits the prompts that are complete, says how to go on, and is raised on as KeyboardInterrupt (exit
    code 130 by custom).

    With workers the prompts are shared out among processes that each write shards of their own. The content is the same
    as without, and what a worker had at hand when it died is redone by another.

    Args:
        config: Settings.
        model: A model to use instead of loading `config.model`; workers load their own.
        prompts: Prompts to use instead of `config.prompts`.

    Returns:
        The store's place, `config.out`.

    Raises:
        ValueError: A setting is out of range, there are too few prompts, or the store was made with other settings;
            the message names them.
        WorkerError: Workers ended again and again; the message names the prompts that killed them.
    """
    console = Console()
    if config.alone:
        _collect_alone(config, model, prompts, console)
    else:
        collect_in_parallel(config, model, prompts, console)
    return config.out


def _collect_alone(
    config: CollectConfig, model: EarlyExitModel | None, prompts: PromptSource | None, console: Console
) -> None:
    if model is None:
        model = load_model(config.model, config.device, config.dtype, pack_weights=config.pack_weights)
    plan = Plan.make(config, model, prompts_of(config) if prompts is None else prompts)
    sitting = Sitting(config.out)
    writer = StoreWriter.open(config.out, plan.settings, shard_prompts=config.shard_prompts)
    done = writer.done  # a copy, and as long as the collection
    waiting = [index for index in range(plan.episodes) if index not in done]
    n_done = writer.n_done
    try:
        with writer, CollectProgress(plan.episodes, plan.episodes - len(waiting), console) as progress:
            for record in plan.records(waiting, progress.tokens):
                writer.add(record)
                progress.prompt()
                if writer.n_done > n_done:  # a shard was committed: its seconds are as safe as it is
                    n_done = writer.n_done
                    sitting.write_seconds()
    except KeyboardInterrupt:
        sitting.tell_interrupted(console)
        raise
    finally:
        sitting.end()
