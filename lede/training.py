"""Offline training: a Q-network fitted to recorded decisions and frozen into a policy.

The paper publishes neither network nor schedule: every default here is ours, chosen so that a problem with a known
optimum is solved (see `lede.optimal_stopping`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lede.run_folder import RunFolder
from lede.stopwatch import Stopwatch
from lede.training_config import TrainConfig, fixed_settings, with_defaults

if TYPE_CHECKING:
    from lede.buffers.store import TraceStore, TransitionStore
    from lede.policies.learned import LearnedPolicy
    from lede.processes import Processes

__all__ = ["TrainConfig", "train"]


def train(
    config: TrainConfig,
    buffer: TransitionStore | TraceStore | None = None,
    validation: TransitionStore | TraceStore | None = None,
    progress: bool = True,
) -> LearnedPolicy:
    """Train a policy and write the run to `config.out`.

    In a process that torchrun started, it trains together with the others: each takes a share of every batch, the
    policy is that of one process up to rounding, and the first one writes.

    Args:
        config: All settings.
        buffer: The store itself, to spare opening `config.buffer`.
        validation: The store itself, to spare opening `config.validation`.
        progress: Whether to say how much memory the data will take, and to show a bar, or lines where stdout is no
            terminal.

    Returns:
        The frozen policy, bound to the model that the buffer was collected from; also in `out/policy`.

    Raises:
        ValueError: The settings, the device, the data or what lies in `out` can't be used, or the loss became infinite
            or NaN.
    """
    from lede.processes import joined_processes

    if config.algo == "thresholds":
        raise ValueError("thresholds have no network to train; call lede.threshold_training.train_thresholds")
    with joined_processes(config.device) as processes:
        return _train(config, buffer, validation, progress, processes)


def _train(
    config: TrainConfig,
    buffer: TransitionStore | TraceStore | None,
    validation: TransitionStore | TraceStore | None,
    progress: bool,
    processes: Processes,
) -> LearnedPolicy:
    from lede.buffers.store import open_store
    from lede.cost_profile import CostProfile
    from lede.memory_estimate import estimate_memory
    from lede.training_data import load_data
    from lede.training_run import TrainingRun

    if config.batch_size % processes.size:
        raise ValueError(f"batch_size {config.batch_size} can't be shared evenly among {processes.size} processes")
    folder = RunFolder(config.out, writes=processes.first)
    if folder.used and not config.resume:
        raise ValueError(f"{config.out} holds a run already: resume it (--resume), or give another folder")
    if folder.writes:
        folder.check()
    watch = Stopwatch(folder.path)
    if buffer is None:
        buffer = open_store(config.buffer)
    if validation is None and config.validation is not None:
        validation = open_store(config.validation)
    config = config.settled(buffer.kind)
    _check_device(config.device)
    saved = folder.last_checkpoint() if config.resume else None
    if saved is not None:
        _check_resumable(config, saved, config.out)
    if progress and processes.first:
        print(estimate_memory(config, buffer, validation, processes.size), flush=True)
    profile = None if config.profile is None else CostProfile.load(config.profile)
    data = load_data(config, buffer, validation, profile)
    if saved is not None:
        _check_same_data(data.digest, saved, config.out)
    processes.wait()  # all have seen what lies in the folder before the first one changes it
    folder.create()
    run = TrainingRun(config, data, folder, saved, watch, processes)
    folder.write_config(run.description())
    run.learn(progress)
    policy = run.policy()
    policy.profile = profile
    if processes.first:
        policy.save_pretrained(str(folder.policy))
        if progress:
            print(f"written to {folder.policy}")
    return policy


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # an assertion where torch was built without CUDA
        raise ValueError(f"cannot train on device '{device}': {str(error).strip().splitlines()[0]}") from error


def _check_resumable(config: TrainConfig, saved: dict[str, Any], out: str) -> None:
    then, now = with_defaults(json.loads(saved["settings"])), fixed_settings(config)
    odd = [f"{name}: {then.get(name)} / {now.get(name)}" for name in {**then, **now} if then.get(name) != now.get(name)]
    if odd:
        raise ValueError(
            f"{out} was trained with other settings (then / now): {'; '.join(odd)}. Use those to resume, or "
            "another folder"
        )
    if saved["step"] > (config.steps or 0):
        raise ValueError(f"{out} has had {saved['step']} updates already, more than steps = {config.steps}")


def _check_same_data(digest: str, saved: dict[str, Any], out: str) -> None:
    if saved["digest"] != digest:
        raise ValueError(
            f"{out} was trained on other data: the buffer or the validation store has changed since. Give the same, or "
            "train in another folder"
        )
