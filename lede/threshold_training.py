"""`lede train --algo thresholds`: policies without a network, fitted and searched on the simulator in seconds.

Of layers a survival policy; of lookups one that weighs expected tokens against prices; of both sources one that takes
the plan that saves most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lede.run_folder import RunFolder
from lede.stopwatch import Stopwatch
from lede.training_config import TrainConfig, as_json

if TYPE_CHECKING:
    from lede.buffers.store import TraceStore, TransitionStore
    from lede.lookup import LookupConfig
    from lede.policies.lookup_value import LookupValuePolicy
    from lede.policies.source_value import SourceValuePolicy
    from lede.policies.survival import SurvivalPolicy
    from lede.wall_clock_data import WallClockData


def train_thresholds(
    config: TrainConfig,
    buffer: TransitionStore | TraceStore | None = None,
    validation: TransitionStore | TraceStore | None = None,
    progress: bool = True,
) -> SurvivalPolicy | LookupValuePolicy | SourceValuePolicy:
    """Fit forecasts, search the thresholds or prices and write the run to `config.out`.

    Args:
        config: Settings; those of networks play no part.
        buffer: The store itself, to spare opening `config.buffer`.
        validation: The store itself, to spare opening `config.validation`.
        progress: Whether to say how much memory the data will take, and to print the result.

    Returns:
        The policy, bound to the model of the buffer; also in `out/policy`.

    Raises:
        ValueError: The settings, the data or what lies in `out` can't be used.
    """
    from rich.console import Console

    from lede.buffers.store import open_store
    from lede.checkpoint import versions
    from lede.cost_profile import CostProfile
    from lede.memory_estimate import estimate_memory
    from lede.processes import check_alone
    from lede.simulation import simulate
    from lede.training_data import load_data
    from lede.wall_clock_data import WallClockData

    check_alone("the search for thresholds")
    folder = RunFolder(config.out)
    if folder.used:
        raise ValueError(f"{config.out} holds a run already, and a search has nothing to resume: give another folder")
    folder.check()
    watch = Stopwatch(folder.path)
    buffer = open_store(config.buffer) if buffer is None else buffer
    if validation is None and config.validation is not None:
        validation = open_store(config.validation)
    config = config.settled(buffer.kind)
    if progress:
        print(estimate_memory(config, buffer, validation), flush=True)
    profile = None if config.profile is None else CostProfile.load(config.profile)
    data = load_data(config, buffer, validation, profile)
    assert isinstance(data, WallClockData)  # `settled` refuses thresholds for anything else
    policy = _fitted(config, data)
    policy.profile = profile
    speedup = simulate(policy, data.validation, data.costs).speedup
    folder.create()
    resolved = {**data.description(), "candidates": list(data.candidates), "speedup": speedup}
    folder.write_config({**as_json(config), "resolved": resolved, "versions": versions()})
    policy.save_pretrained(str(folder.policy))
    watch.write()
    layers = f"at layers {', '.join(map(str, data.candidates))}" if data.candidates else ""
    where = " and ".join(part for part in (layers, _told(data.lookup) if data.lookup else "") if part)
    Console(quiet=not progress).print(f"{speedup:.2f}x plain, simulated, {where}; in {folder.policy}", soft_wrap=True)
    return policy


def _fitted(config: TrainConfig, data: WallClockData) -> SurvivalPolicy | LookupValuePolicy | SourceValuePolicy:
    from lede.copy_forecast import copy_features
    from lede.features import FeatureConfig
    from lede.policies.source_value import source_features
    from lede.reference_lookups import reference_lookups
    from lede.reference_sources import reference_sources
    from lede.reference_thresholds import reference_thresholds
    from lede.training_sources import features_for

    settings = data.settings
    common: dict[str, Any] = {
        "fingerprint": settings.fingerprint or None,
        "trained_temperature": settings.temperature,
        "seed": config.seed,
    }
    # the defaults are a network's, which learns where it decides itself
    remembers = data.memory is not None
    given = config.features if config.features != features_for(config.sources, remembers) else None
    if data.lookup is None:
        followed = tuple(name for name in given or () if name not in ("in_scan", "in_draft"))  # which stages tell
        seen = FeatureConfig(names=followed, top_k=settings.features.top_k) if followed else None
        return reference_thresholds(
            data.training,
            data.costs,
            data.candidates,
            seen,
            max_draft=config.max_draft,
            fixed_lengths=config.fixed_lengths,
            **common,
        )
    names = given or (source_features if data.candidates else copy_features)(remembers)
    features = FeatureConfig(names=names, top_k=settings.features.top_k, window=settings.features.window)
    common["memory"] = data.memory
    if not data.candidates:
        return reference_lookups(data.training, data.costs, data.lookup, config.lookups, features, **common)
    return reference_sources(
        data.training, data.costs, data.candidates, data.lookup, data.lookups, features, config.max_draft, **common
    )


def _told(lookup: LookupConfig) -> str:
    """How the text is searched, in the words of the options."""
    return (
        f"by lookup (--max-suffix {lookup.max_suffix}, min_suffix {lookup.min_suffix}, "
        f"--continuation {lookup.continuation})"
    )
