"""What a benchmark refuses before it loads a model or measures anything: arguments that could not work out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lede.policies import parse_policy
from lede.policy_cost import stores_of
from lede.presets import learned_folders
from lede.rivals import is_rival
from lede.suites import check_spec
from lede.tuned import is_tuned
from lede.tuning import check_disjoint

if TYPE_CHECKING:
    from lede.bench_config import BenchConfig
    from lede.suites import Suite


def check_before_loading(config: BenchConfig, texts: Sequence[str]) -> None:
    """Check what needs no model.

    Args:
        config: Settings.
        texts: The policies, as given.

    Raises:
        ValueError: A suite or its file does not exist, the preset can't be made of these policies, or somebody is to be
            tuned on no validation prompts.
    """
    for spec in config.suites:
        _, path = check_spec(spec)
        try:
            path.open("rb").close()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    if config.preset == "ablation":
        learned_folders(texts)
    needing = _tuned(config, texts)
    if needing and not config.validation_prompts:
        raise ValueError(f"{needing[0]} is tuned on validation prompts, and --validation-prompts is 0; {_REMEDY}")


def check_prompts(config: BenchConfig, suites: Sequence[Suite], texts: Sequence[str]) -> None:
    """Check the prompts of all suites, and warn of test prompts that a learned policy has seen.

    Args:
        config: Settings.
        suites: The suites.
        texts: The policies, as given.

    Raises:
        ValueError: A suite has no validation prompts for those that are tuned, or, where a preset moves what was found
            from suite to suite, a validation prompt of one is a test prompt of another.
    """
    needing = _tuned(config, texts)
    for suite in suites:
        if needing and not suite.validation:
            raise ValueError(f"{needing[0]} is tuned on validation prompts, and suite {suite.name} has none; {_REMEDY}")
    if config.preset == "transfer":
        every = [item.ids for suite in suites for item in suite.test]
        for suite in suites:
            try:
                check_disjoint([item.ids for item in suite.validation], every)
            except ValueError as error:
                raise ValueError(f"suite {suite.name}, moved to all suites: {error}") from None
    for text in texts:
        if is_tuned(text) or is_rival(text):
            continue
        if Path(text).is_dir():
            _warn_of_seen(text, suites)
        _warn_of_remembered(text, suites)


_NOTHING = np.zeros(0, dtype=np.int64)
_REMEDY = "give it settings, or prompts"


def _tuned(config: BenchConfig, texts: Sequence[str]) -> list[str]:
    """Who is tuned, or counted, on validation prompts."""
    found = [f"'{text}'" for text in texts if is_tuned(text)]
    return [*found, f"what preset {config.preset} adds"] if config.preset is not None else found


def _warn_of_seen(folder: str, suites: Sequence[Suite]) -> None:
    """Warn where test prompts are in the stores that a policy was trained or validated on, as far as they are found."""
    seen = {ids for store in stores_of(Path(folder)) for ids in _prompt_ids(store)}
    for suite in suites:
        shared = sum(item.ids in seen for item in suite.test)
        if shared:
            warnings.warn(
                f"{shared} of the {len(suite.test)} test prompts of {suite.name} are among those that {folder} was "
                "trained or validated on: its rows there tell nothing about new prompts",
                stacklevel=4,
            )


def _warn_of_remembered(text: str, suites: Sequence[Suite]) -> None:
    """Warn where a policy's memory of phrases holds test prompts, whose answers it would draft by heart."""
    policy = parse_policy(text)
    if policy is None or policy.memory is None:
        return
    for suite in suites:
        known = policy.memory.known((np.asarray(item.ids), _NOTHING) for item in suite.test)
        if known:
            warnings.warn(
                f"the memory of {text} holds {known} of the {len(suite.test)} test prompts of {suite.name}, and what "
                "was written there: its rows tell nothing about new prompts",
                stacklevel=4,
            )


def _prompt_ids(store: Path) -> set[tuple[int, ...]]:
    """The prompts of a store; none where it can't be read."""
    try:
        from lede.buffers import open_store

        return {tuple(record.prompt_ids.tolist()) for record in open_store(store)}
    except (ImportError, ValueError, OSError):
        return set()
