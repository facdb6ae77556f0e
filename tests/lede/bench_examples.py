"""Decodes and setups written by hand, for tests of reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lede.bench_runs import (
    CONTROL,
    PLAIN,
    PROMPTS,
    RUNS,
    TRANSFORMERS,
    ContenderKind,
    ContenderSetup,
    Cost,
    PromptRecord,
    PromptRun,
    RoundCounts,
    Setup,
    SuiteSetup,
    write_prompts,
    write_setup,
)

N_LAYERS = 8


def rounds(*accepted: int, drafted: int = 4, layer: int = 3, skipped: int = 0) -> tuple[RoundCounts, ...]:
    """Rounds that draft, each with a correction or bonus token."""
    return tuple((drafted, n, n + 1, layer, skipped) for n in accepted)


def run(policy: str = PLAIN, prompt_index: int = 0, seconds: float = 1.0, **given: Any) -> PromptRun:
    """A decode of 5 tokens that took a second after a prefill of a tenth."""
    values: dict[str, Any] = {
        "suite": "code",
        "category": "",
        "repeat": 0,
        "turn": 0,
        "prompt_tokens": 3,
        "token_ids": (1, 2, 3, 4, 5),
        "prefill_seconds": 0.1,
        "sections": {},
        "rounds": (),
        "head_reads": 0,
        "peak_memory": None,
        "divergence": None,
        **given,
    }
    return PromptRun(policy=policy, prompt_index=prompt_index, decode_seconds=seconds, **values)


def failed(policy: str, prompt_index: int, **given: Any) -> PromptRun:
    """A decode that failed."""
    return run(policy, prompt_index, 0.0, token_ids=(), prefill_seconds=0.0, error="RuntimeError: no", **given)


def contender(
    name: str, settings: str | None = None, kind: ContenderKind = "policy", suite: str = "code", **given: Any
) -> ContenderSetup:
    """A contender that was given by its name."""
    return ContenderSetup(suite, name, given.pop("as_given", name), settings or name, kind, **given)


def standing(suite: str = "code") -> tuple[ContenderSetup, ...]:
    """The contenders of every benchmark."""
    return (
        contender(TRANSFORMERS, kind="external", suite=suite),
        contender(PLAIN, kind="plain", suite=suite),
        contender(CONTROL, PLAIN, kind="plain", suite=suite, as_given=PLAIN),
    )


def setup(*contenders: ContenderSetup, n_prompts: int = 2, **given: Any) -> Setup:
    """What holds throughout, of a model of eight layers; the contenders of every benchmark come first."""
    suites = list(dict.fromkeys(each.suite for each in contenders)) or ["code"]
    values: dict[str, Any] = {
        "config": {"model": "tiny", "temperature": 0.0, "seed": 7},
        "model": {"name": "tiny", "n_layers": N_LAYERS, "dtype": "float32"},
        "suites": tuple(SuiteSetup(name, f"jsonl:{name}", tuple(range(n_prompts)), (9,), 0) for name in suites),
        "contenders": tuple(
            each for name in suites for each in (*standing(name), *(c for c in contenders if c.suite == name))
        ),
        "verification_seconds": (),
        "versions": {"lede": "0.1.0", "torch": "2.13.0"},
        "commit": "abc1234",
        "device": "a processor",
        "threads": 2,
        **given,
    }
    return Setup(**values)


def baseline_runs(n_prompts: int, again: float = 1.01, **given: Any) -> list[PromptRun]:
    """Plain decoding in 1 s a prompt, the same again with a little noise, and transformers in 2 s."""
    found = []
    for i in range(n_prompts):
        noise = again if i % 2 else 1 / again
        found += [run(PLAIN, i, **given), run(CONTROL, i, noise, **given), run(TRANSFORMERS, i, 2.0)]
    return found


def write(out: Path, runs: Sequence[PromptRun], found: Setup, prompts: Sequence[PromptRecord] = ()) -> None:
    """A benchmark's folder."""
    out.mkdir(parents=True, exist_ok=True)
    write_setup(out, found)
    (out / RUNS).write_text("".join(json.dumps(asdict(each)) + "\n" for each in runs))
    (out / PROMPTS).unlink(missing_ok=True)
    if prompts:
        write_prompts(out, prompts)


COST = Cost(prompts=10, collecting_seconds=6.0, search_seconds=1.0, training_seconds=3.0, evaluations=24)
