"""`lede train --algo thresholds`: a survival policy, fitted and searched on the simulator in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lede.run_folder import RunFolder
from lede.stopwatch import Stopwatch
from lede.training import TrainConfig, as_json

if TYPE_CHECKING:
    from lede.buffers.store import TraceStore, TransitionStore
    from lede.policies.survival import SurvivalPolicy


def train_thresholds(
    config: TrainConfig,
    buffer: TransitionStore | TraceStore | None = None,
    validation: TransitionStore | TraceStore | None = None,
    progress: bool = True,
) -> SurvivalPolicy:
    """Fit forecasts of acceptance, search the thresholds and write the run to `config.out`.

    Args:
        config: Settings; those of networks play no part.
        buffer: The store itself, to spare opening `config.buffer`.
        validation: The store itself, to spare opening `config.validation`.
        progress: Whether to print the result.

    Returns:
        The policy, bound to the model of the buffer; also in `out/policy`.

    Raises:
        ValueError: The settings, the data or what lies in `out` can't be used.
    """
    from rich.console import Console

    from lede.buffers.store import open_store
    from lede.checkpoint import versions
    from lede.cost_profile import CostProfile
    from lede.reference_thresholds import reference_thresholds
    from lede.simulation import simulate
    from lede.training_data import load_data
    from lede.wall_clock_data import WallClockData

    folder = RunFolder(config.out)
    if folder.used:
        raise ValueError(f"{config.out} holds a run already, and a search has nothing to resume: give another folder")
    watch = Stopwatch(folder.path)
    buffer = open_store(config.buffer) if buffer is None else buffer
    if validation is None and config.validation is not None:
        validation = open_store(config.validation)
    config = config.settled(buffer.kind)
    profile = None if config.profile is None else CostProfile.load(config.profile)
    data = load_data(config, buffer, validation, profile)
    assert isinstance(data, WallClockData)  # `settled` refuses thresholds for anything else
    settings = data.settings
    policy = reference_thresholds(
        data.training,
        data.costs,
        settings.candidates,
        max_draft=config.max_draft,
        seed=config.seed,
        fingerprint=settings.fingerprint or None,
        trained_temperature=settings.temperature,
    )
    policy.profile = profile
    speedup = simulate(policy, data.validation, data.costs).speedup
    folder.create()
    resolved = {**data.description(), "candidates": list(settings.candidates), "speedup": speedup}
    folder.write_config({**as_json(config), "resolved": resolved, "versions": versions()})
    policy.save_pretrained(str(folder.policy))
    watch.write()
    Console(quiet=not progress).print(
        f"{speedup:.2f}x plain, simulated, at layers {', '.join(map(str, settings.candidates))}; in {folder.policy}",
        soft_wrap=True,
    )
    return policy
