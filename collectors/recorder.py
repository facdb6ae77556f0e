"""What a worker does wherever it runs: load the model, collect the prompts it is given, commit them."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from lede.buffers import StoreWriter
from lede.collectors.config import CollectConfig
from lede.collectors.plan import Plan
from lede.models import load_model

ALL_GPUS = "cuda"
"""A device without a number, which workers share out among them."""


@dataclass(frozen=True)
class Order:
    """What all workers of a collection are told at the start."""

    config: CollectConfig
    """Settings of the collection."""
    prompts: list[Any]
    """Prompts, so that workers elsewhere need no file of them."""
    threads: int
    """CPU threads of torch in each worker."""


class StoppedError(Exception):
    """A worker was asked to end; what is complete is committed on the way out."""


class Recorder:
    """One worker's model and its writer: shards of its own in the store that all write to.

    Args:
        order: What to collect.
        device: Where to put the model; the device of the settings when None.

    Raises:
        ValueError: The settings don't fit the model, the prompts or the store.
    """

    def __init__(self, order: Order, device: str | None = None) -> None:
        torch.set_num_threads(order.threads)
        logging.disable_progress_bar()  # one a worker would fight over the terminal
        config = order.config
        model = load_model(config.model, device or config.device, config.dtype, pack_weights=config.pack_weights)
        self._plan = Plan.make(config, model, order.prompts)
        self._writer = StoreWriter.open(config.out, self._plan.settings, shard_prompts=config.shard_prompts)

    def record(self, prompts: Sequence[int], on_progress: Callable[[int, int], None]) -> None:
        """Collect prompts and commit them; on an exception those that are complete.

        Args:
            prompts: Indices of prompts; those that the store had when the worker began, because another collection
                was faster, are passed over.
            on_progress: Called with new tokens and complete prompts, often; what it raises ends the work.
        """
        done = self._writer.done
        waiting = [index for index in prompts if index not in done]
        try:
            for record in self._plan.records(waiting, lambda n_tokens: on_progress(n_tokens, 0)):
                self._writer.add(record)
                on_progress(0, 1)
        except StoppedError:
            raise
        except Exception as error:
            error.add_note(f"while prompts {shown(prompts)} were collected")
            raise
        finally:
            self._writer.commit()


def own_device(device: str | None, worker: int) -> str | None:
    """The device of a worker of this machine: of all GPUs its own, in turn; anything else as it is."""
    if device != ALL_GPUS or torch.cuda.device_count() < 2:
        return device
    return f"{ALL_GPUS}:{worker % torch.cuda.device_count()}"


def portable(error: BaseException, where: str) -> BaseException:
    """An exception that another process can raise on, with the traceback of this one in its notes."""
    error.add_note(f"in {where}:\n{''.join(traceback.format_exception(error)).rstrip()}")
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # whatever a foreign exception class does when it is pickled
        pass
    other = RuntimeError(f"{type(error).__name__}: {error}")
    for note in error.__notes__:
        other.add_note(note)
    return other


def shown(prompts: Sequence[int], most: int = 10) -> str:
    """Prompt indices for a message."""
    some = ", ".join(map(str, sorted(prompts)[:most]))
    return some if len(prompts) <= most else f"{some} and {len(prompts) - most} more"
