"""Learning from a store that is too large to be held: it is read once to be checked and measured, then in windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from lede.buffers.store import TraceStore
from lede.store_parts import HoldOut, Play, StoreParts, Survey, sample_shards
from lede.training_data import (
    TrainingData,
    check_ends,
    check_exits,
    check_finite_record,
    check_profile,
    check_validation,
    digest_of,
    make_scorer,
    uniform_passes,
    warn_of_shared,
)
from lede.windows import TransitionWindows

if TYPE_CHECKING:
    from lede.buffers.settings import StoreSettings
    from lede.buffers.store import TransitionStore
    from lede.cost_profile import CostProfile
    from lede.training_config import TrainConfig

SCORED_SHARE = 0.1
"""Share of a window that is scored on where nothing is held out and no validation store is given."""


def load_windows(
    config: TrainConfig,
    buffer: TransitionStore | TraceStore,
    validation: TransitionStore | TraceStore | None,
    profile: CostProfile | None = None,
) -> TrainingData:
    """Check the stores and prepare the run's data, with no more than a shard and what is scored on in memory.

    What is held out is a share of a window, not of the store, and is chosen by a hash of the prompts.

    Args:
        config: Settled settings of the paper's objective.
        buffer: On disk.
        validation: Traces of other prompts, which are held whole.
        profile: What operations cost.

    Raises:
        ValueError: As `lede.training_data.load_data` raises it, or chance held nothing out.
    """
    if profile is not None:
        check_profile(buffer, profile)
    if validation is not None:
        check_validation(buffer, validation)
        for record in validation.prompts:
            check_finite_record(record, 0, f"{validation.path or 'the store'}, counted within the prompt,")
    chosen = _chooser(config, buffer, validation)
    settings, plays = _played(config, buffer, profile, chosen)
    parts = StoreParts(buffer, plays, "prompt" if config.episode == "prompt" else "token")
    survey = Survey(settings, len(parts))
    own = _survey(config, parts, survey, validation, chosen)
    check_exits(survey.exits, config.min_exits)
    check_ends(config, survey.terminated)
    windows = TransitionWindows(
        parts.load, survey.sizes, parts.episode, config.window, config.seed, survey.mean, survey.std, survey.probe
    )
    scored = own if validation is None else validation
    # one at a time: their checksums as one text would be large
    shards = (SimpleNamespace(name=commit.name, files=commit.files) for commit in buffer.shards)
    return TrainingData(
        transitions=windows,
        settings=settings,
        validation=scored.prompts,
        validation_kind=scored.kind,
        held_out=tuple(sorted(parts.held_out)),
        digest=digest_of(chain(shards, scored.prompts, [] if profile is None else [profile.costs])),
        scorer=make_scorer(config, settings, scored, profile),
    )


def _played(
    config: TrainConfig, buffer: TransitionStore | TraceStore, profile: CostProfile | None, chosen: HoldOut
) -> tuple[StoreSettings, list[Play]]:
    """Settings of the transitions, and what is played on traces."""
    if not isinstance(buffer, TraceStore):
        return buffer.settings, []
    settings = buffer.settings
    searched = buffer
    if config.candidates == "auto":
        sample = sample_shards(buffer, config.window, config.seed)
        held = {record.prompt_index for record in sample.prompts if config.holdout > 0 and chosen(record.prompt_ids)}
        rest = sorted(set(sample.prompt_indices) - held)
        searched = sample.select(rest or sample.prompt_indices)
    passes = uniform_passes(config, searched, profile)

    def player(each: Callable[[TraceStore], TransitionStore]) -> Play:
        return lambda traces: list(each(TraceStore(settings, traces)))

    return passes[0](TraceStore(settings)).settings, [player(each) for each in passes]


def _chooser(
    config: TrainConfig, store: TransitionStore | TraceStore, validation: TransitionStore | TraceStore | None
) -> HoldOut:
    """Chooses what is scored on, and held out if anything is."""
    share = (config.holdout or SCORED_SHARE) * min(1.0, config.window / store.n_rows)
    return HoldOut(share if validation is None else 0.0, config.splits_by)


def _survey(
    config: TrainConfig,
    parts: StoreParts,
    survey: Survey,
    validation: TransitionStore | TraceStore | None,
    chosen: HoldOut,
) -> TransitionStore | TraceStore:
    """Read every part once; what is held out goes into `parts.held_out`, and comes back as what is scored on."""
    store = parts.store
    wanted = set() if validation is None else {record.prompt_ids.tobytes() for record in validation.prompts}
    seen, kept, held_out = set[bytes](), list[Any](), set[int]()
    some: Any = None  # to score on where chance chose none and none need be held out
    for commit in store.shards:
        records: Sequence[Any] = store.shard(commit)
        first_row = 0
        some = some or next((_copy(record) for record in records if record.n_rows), None)
        for record in records:
            check_finite_record(record, first_row, f"shard {commit.name} of {store.path}")
            first_row += record.n_rows
            if wanted and (text := record.prompt_ids.tobytes()) in wanted:
                seen.add(text)
            if record.n_rows and chosen(record.prompt_ids):
                kept.append(_copy(record))
        if config.holdout > 0:
            held_out.update(record.prompt_index for record in kept)
            parts.held_out = held_out
        for number in range(parts.n_passes):
            rollouts = parts.play(records, number)
            if number == 0:
                survey.count_exits(rollouts)
            survey.add(parts.transitions(rollouts))
    if config.holdout == 0:
        kept = kept or [some]
    elif validation is None and not kept:
        raise ValueError(
            f"of {len(store)} prompts none was held out by chance: {chosen.share:.2%} were to be, holdout "
            f"{config.holdout:g} of a window of {config.window} rows. Give a validation store, or a larger holdout or "
            "window"
        )
    if validation is not None:
        warn_of_shared(seen, validation)
    return type(store)(store.settings, kept)


def _copy(record: Any) -> Any:
    """The record with arrays of its own: those of a shard are views that would keep all of it in memory."""
    arrays = {name: value.copy() for name, value in vars(record).items() if isinstance(value, np.ndarray)}
    return replace(record, **arrays)
