"""What a benchmark does before it decodes: its folder, what decoding costs here, and who takes part."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lede.bench_lineup import CANNOT_RUN, enter, failed, register, standing
from lede.bench_runs import (
    PROFILE,
    PROMPTS,
    SETUP,
    ContenderSetup,
    PromptRecord,
    Setup,
    SuiteSetup,
    differences,
    read_prompts,
    read_setup,
    write_prompts,
    write_setup,
)
from lede.checkpoint import fingerprint, versions
from lede.commit import commit
from lede.cost_measurement import MAX_Q, device_name
from lede.features import default_candidates
from lede.fingerprints import compare_fingerprints
from lede.presets import Named, preset_contenders, sweep_contenders
from lede.profiling import measured_profile
from lede.tuning import Tuner, budget_of

if TYPE_CHECKING:
    from lede.bench_config import BenchConfig
    from lede.models import EarlyExitModel
    from lede.suites import Suite

RUNNERS_UP = 4
"""Settings that a sweep also decodes with, besides the one chosen on validation prompts."""

Tell = Callable[[str], None]
"""Shows a line of progress."""


def open_folder(config: BenchConfig, model: EarlyExitModel, suites: Sequence[Suite]) -> Setup:
    """Begin a folder, or go on with one of the same settings, model, machine and prompts.

    Raises:
        ValueError: The folder holds something else, or a benchmark of other settings; the message names them.
    """
    fresh = fresh_setup(config, model, suites)
    prompts = [
        PromptRecord(suite.name, item.prompt_index, item.category, item.ids, item.reference)
        for suite in suites
        for item in suite.test
    ]
    out = config.out
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder as --out")
    if not (out / SETUP).exists():
        if out.exists() and any(path.name != PROMPTS for path in out.iterdir()):
            raise ValueError(f"{out} holds something that no benchmark wrote; give a new or empty folder as --out")
        out.mkdir(parents=True, exist_ok=True)
        write_prompts(out, prompts)
        write_setup(out, fresh)
        return fresh
    found = read_setup(out)
    ours, theirs = (
        {**s.model, "versions": s.versions, "device": s.device, "threads": s.threads} for s in (fresh, found)
    )
    apart = differences(fresh.config, found.config) + differences(ours, theirs, ("fingerprint",))
    apart += compare_fingerprints(found.model["fingerprint"], fresh.model["fingerprint"])
    if not apart and read_prompts(out) != prompts:
        apart = ["prompts: the files of the suites have changed"]
    if apart:
        raise ValueError(f"{out} holds a benchmark with other settings: {'; '.join(apart)}; give another --out")
    if found.commit != fresh.commit:
        warnings.warn(f"{out} was begun by lede at commit {found.commit}, this is {fresh.commit}", stacklevel=3)
    return found


def fresh_setup(config: BenchConfig, model: EarlyExitModel, suites: Sequence[Suite]) -> Setup:
    """What is known before anything is measured."""
    import torch

    settings = {**asdict(config), "suite": config.suites}
    del settings["out"]
    return Setup(
        config={name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()},
        model={
            "name": model.name,
            "family": model.config.model_type,
            "n_layers": model.n_layers,
            "vocab_size": model.vocab_size,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": model.attention,
            "fingerprint": fingerprint(model),
        },
        suites=tuple(
            SuiteSetup(
                suite.name,
                suite.spec,
                tuple(item.prompt_index for item in suite.test),
                tuple(item.prompt_index for item in suite.validation),
                suite.too_long,
                suite.too_short,
            )
            for suite in suites
        ),
        contenders=(),
        verification_seconds=(),
        versions=versions(),
        commit=commit(),
        device=device_name(model.device),
        threads=torch.get_num_threads(),
    )


def price(config: BenchConfig, model: EarlyExitModel, suites: Sequence[Suite], setup: Setup, tell: Tell) -> Setup:
    """Measure what decoding costs at the lengths of these prompts; the full passes of it are the verification curve."""
    if setup.verification_seconds:
        return setup
    typical = int(statistics.median(len(item.ids) for suite in suites for item in suite.test))
    longest = model.max_positions - MAX_Q
    contexts = sorted({min(typical, longest), min(typical + config.max_new_tokens, longest)})
    tell("measuring what decoding costs")
    profile = measured_profile(model, contexts, default_candidates(model.n_layers), config.profile_repeats)
    profile.save(config.out / PROFILE)
    passes = [m for m in profile.of_kind("verify") if m.first == 0 and m.context == contexts[0]]
    setup = replace(setup, verification_seconds=tuple(m.seconds for m in sorted(passes, key=lambda m: m.q)))
    write_setup(config.out, setup)
    return setup


def line_up(
    config: BenchConfig, model: EarlyExitModel, suites: Sequence[Suite], names: dict[str, str], setup: Setup, tell: Tell
) -> Setup:
    """Add the contenders that are not in the setup yet, suite by suite, and write it after each.

    Args:
        config: Settings.
        model: The model.
        suites: The suites.
        names: Names of the policies, by what was given.
        setup: What is known so far.
        tell: Shows progress.

    Raises:
        ValueError: A validation prompt is a test prompt too, or the folder holds tunings of something else.
    """

    def add(contender: ContenderSetup) -> None:
        nonlocal setup
        setup = replace(setup, contenders=(*setup.contenders, contender))
        write_setup(config.out, setup)

    tuners = {suite.name: _tuner(config, model, suite, list(names), tell) for suite in suites}
    for suite, tuner in tuners.items():
        known = {contender.name for contender in setup.contenders if contender.suite == suite}
        for contender in standing(suite):
            if contender.name not in known:
                add(contender)
        for text, name in names.items():
            if name not in known:
                add(enter(tuner, text, name, config.out))
    for suite, tuner in tuners.items():
        known = {contender.name for contender in setup.contenders if contender.suite == suite}
        for other in _others(config, suite, tuners, names):
            if other.name not in known:
                add(other if isinstance(other, ContenderSetup) else _registered(other, tuner, config.out))
                known.add(other.name)
    return setup


def _others(
    config: BenchConfig, suite: str, tuners: Mapping[str, Tuner], names: Mapping[str, str]
) -> list[Named | ContenderSetup]:
    """What a sweep and a preset add on a suite; where they can't be made, a contender that says why."""
    others: list[Named | ContenderSetup] = []
    for swept in dict.fromkeys(config.sweep):
        try:
            others += sweep_contenders(tuners[suite].tune(swept), RUNNERS_UP)
        except CANNOT_RUN as error:
            others.append(failed(suite, names[swept], swept, error))
    if config.preset is not None:
        try:
            others += preset_contenders(config.preset, suite, tuners, names)
        except CANNOT_RUN as error:
            others.append(failed(suite, f"preset {config.preset}", f"preset {config.preset}", error))
    return others


def _registered(other: Named, tuner: Tuner, out: Path) -> ContenderSetup:
    try:
        return register(other.tuned, tuner, other.name, out)
    except CANNOT_RUN as error:
        return failed(tuner.suite, other.name, other.tuned.as_given, error)


def _tuner(config: BenchConfig, model: EarlyExitModel, suite: Suite, texts: Sequence[str], tell: Tell) -> Tuner:
    n_validation = len(suite.validation)
    return Tuner(
        model,
        [item.ids for item in suite.validation],
        suite=suite.name,
        test=[item.ids for item in suite.test],
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=config.seed,
        budget=budget_of(texts, model.n_layers, n_validation, config.max_new_tokens) if n_validation else 0,
        out=config.out,
        tell=lambda line: tell(f"{suite.name}: {line}"),
    )
