"""The records of a benchmark: runs.jsonl, one line a decode, prompts.jsonl, and setup.json for what holds throughout.

All of them can be read at any moment of a run, or after a stop; `lede.bench_log` writes the lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from lede.atomic import write_atomically
from lede.statistics import Source

RUNS, SETUP, PROMPTS = "runs.jsonl", "setup.json", "prompts.jsonl"

PROFILE = "profile.json"
"""Cost profile of the model on this machine (`lede.cost_profile.CostProfile`), for the modelled speedup."""

PLAIN = "plain"
"""The contender that decodes on lede's engine without a policy."""
CONTROL = "plain-again"
"""Plain decoding a second time: its ratio to `plain` shows what this machine cannot resolve."""
TRANSFORMERS = "transformers"
"""The contender that is transformers' own `generate`; its text decides what is exact."""
PROMPT_LOOKUP = "prompt-lookup"
"""The contender that is transformers' own prompt lookup."""

ContenderKind = Literal["plain", "policy", "external"]
RoundCounts = tuple[int, int, int, int, int]
"""Drafted, accepted and committed tokens, exit layer (0: none), skipped sublayers; see `source_of`."""


def source_of(counts: RoundCounts) -> Source | None:
    """Where the draft of a round came from; None for a plain pass. Only copied tokens come from no layers at all."""
    drafted, _, _, layer, skipped = counts
    return None if not drafted else "exit" if layer else "gaps" if skipped else "lookup"


@dataclass(frozen=True)
class PromptRun:
    """One decode of one prompt by one contender."""

    suite: str
    """Name of the suite."""
    policy: str
    """Name of the contender."""
    prompt_index: int
    """Place of the prompt in the suite's file, from 0."""
    category: str
    """Category of the prompt; empty where the suite has none."""
    repeat: int
    """Which repetition, from 0."""
    turn: int
    """Place in the order of this prompt's contenders, from 0."""
    prompt_tokens: int
    """Tokens of the prompt."""
    token_ids: tuple[int, ...]
    """New tokens."""
    prefill_seconds: float
    """Seconds until the first new token; contenders on lede's engine share the one prefill of the prompt."""
    decode_seconds: float
    """Seconds after the first new token; with the prefill's they are the whole call. For external contenders a
    difference of two calls, which keeps its sign."""
    sections: dict[str, float]
    """Seconds by `lede.statistics.SECTIONS`; empty for external contenders."""
    rounds: tuple[RoundCounts, ...]
    """One entry a round after the prefill; empty for external contenders."""
    head_reads: int
    """Logits read below the last layer, one a position."""
    peak_memory: int | None
    """Most bytes in use during the decode, weights included; None where nothing tells (see `lede.peak_memory`)."""
    divergence: tuple[int, float, bool] | None
    """Position, margin and whether it is a tie, against the plain text of `reference`; None: equal, or T > 0."""
    error: str | None = None
    """Why the decode failed, figures being zero; None when it did not."""
    text: str | None = None
    """The new tokens as text; None without a tokenizer."""
    reference: str | None = None
    """The contender whose text it was held against: transformers, or plain where that failed on the prompt. None where
    nothing was compared, and in runs that did not record it."""
    unasked: int = 0
    """Tokens of drafts of a fixed length: their head reads were made to draft, and to decide nothing."""

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Suite, contender, prompt and repetition: each once in a run."""
        return self.suite, self.policy, self.prompt_index, self.repeat

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Self:
        """From the object of a line.

        Raises:
            ValueError: The object is of another kind.
        """
        try:
            found = dict(entry)
            found["token_ids"] = tuple(entry["token_ids"])
            found["rounds"] = tuple(tuple(counts) for counts in entry["rounds"])
            found["divergence"] = None if entry["divergence"] is None else _divergence(*entry["divergence"])
            return cls(**found)
        except (KeyError, TypeError) as error:
            raise ValueError(f"is no decode of a prompt: {error}") from None


def _divergence(position: int, margin: float, tie: bool) -> tuple[int, float, bool]:
    """As recorded; a margin that is no finite number is an error of the widest margin, and no tie."""
    return (position, margin, tie) if math.isfinite(margin) else (position, 1.0, False)


@dataclass(frozen=True)
class Cost:
    """What a contender needed before its first token."""

    prompts: int = 0
    """Prompts that it was tuned or trained on."""
    collecting_seconds: float = 0.0
    """Seconds of collecting experience or traces."""
    search_seconds: float = 0.0
    """Seconds of choosing settings."""
    training_seconds: float = 0.0
    """Seconds of training or fitting."""
    evaluations: int = 0
    """Settings times prompts that were decoded or played."""
    note: str = ""
    """What the figures leave out, if anything."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.collecting_seconds + self.search_seconds + self.training_seconds


@dataclass(frozen=True)
class ContenderSetup:
    """One contender of one suite; contenders that are tuned by name are tuned on each suite's validation prompts."""

    suite: str
    """Name of the suite."""
    name: str
    """What tables and runs call it."""
    as_given: str
    """The policy as the command line gave it."""
    settings: str
    """What it resolved to, e.g. `static:exit_layer=4;draft_length=3`."""
    kind: ContenderKind
    """Plain decoding, a policy on lede's engine, or an external one."""
    online: bool = False
    """Whether it goes on learning while it decodes."""
    lossy: bool = False
    """Whether it makes no promise to write the plain text; such rows are shown apart."""
    cost: Cost = field(default_factory=Cost)
    """Before the first token."""
    failed: str | None = None
    """Why it can't run at all; None when it can."""


@dataclass(frozen=True)
class SuiteSetup:
    """One suite of the run."""

    name: str
    """Name in every table."""
    spec: str
    """As the command line gave it."""
    test: tuple[int, ...]
    """Prompt indices that are timed."""
    validation: tuple[int, ...]
    """Prompt indices that contenders are tuned on; none of them is timed."""
    too_long: int
    """Prompts left out for their length."""
    too_short: int = 0
    """Documents left out because too little follows their prompt."""
    agreement: tuple[float, ...] = ()
    """Share of the plain text's tokens that each layer's likeliest token foretells, from layer 1."""


def _suite_setup(entry: dict[str, Any]) -> SuiteSetup:
    lists: dict[str, Any] = {name: tuple(entry[name]) for name in ("test", "validation", "agreement")}
    return SuiteSetup(**{**entry, **lists})


@dataclass(frozen=True)
class Setup:
    """Everything about a run that does not change while it runs."""

    config: dict[str, Any]
    """Settings of the command, resolved."""
    model: dict[str, Any]
    """name, family, n_layers, vocab_size, device, dtype, attention."""
    suites: tuple[SuiteSetup, ...]
    """The suites."""
    contenders: tuple[ContenderSetup, ...]
    """The contenders, suite by suite, in the order of the tables."""
    verification_seconds: tuple[float, ...]
    """Seconds of a full pass over 1, 2, ... tokens: the cost of verifying them."""
    versions: dict[str, Any]
    """Versions of lede and of what it runs on."""
    commit: str | None
    """Commit of the checkout that lede was imported from; None outside one, with -dirty where files differ."""
    device: str
    """What the model ran on, in words."""
    threads: int
    """Threads of torch."""

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Self:
        """From the object of setup.json.

        Raises:
            ValueError: The object is of another kind.
        """
        try:
            found = dict(entry)
            found["suites"] = tuple(_suite_setup(suite) for suite in entry["suites"])
            found["contenders"] = tuple(
                ContenderSetup(**{**contender, "cost": Cost(**contender["cost"])}) for contender in entry["contenders"]
            )
            found["verification_seconds"] = tuple(entry["verification_seconds"])
            return cls(**{name: found[name] for name in (f.name for f in fields(cls))})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"is no setup of a benchmark: {error}") from None


@dataclass(frozen=True)
class PromptRecord:
    """A prompt of the run, for reports."""

    suite: str
    """Name of the suite."""
    prompt_index: int
    """Place in the suite's file, from 0."""
    category: str
    """Category; empty where the suite has none."""
    ids: tuple[int, ...]
    """Token ids."""
    reference: str | None
    """The suite's own answer, where it has one."""


def write_setup(out: Path, setup: Setup) -> None:
    """Write setup.json, whole or not at all."""
    write_atomically(out / SETUP, (json.dumps(asdict(setup), indent=1) + "\n").encode())


def read_setup(out: Path) -> Setup:
    """Read setup.json.

    Raises:
        ValueError: It is missing or damaged.
    """
    path = out / SETUP
    try:
        return Setup.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(f"{out} holds no benchmark: {SETUP} is missing") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def write_prompts(out: Path, prompts: Iterable[PromptRecord]) -> None:
    """Write prompts.jsonl, whole or not at all."""
    lines = [json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts]
    write_atomically(out / PROMPTS, "".join(lines).encode())


def read_prompts(out: Path) -> list[PromptRecord]:
    """The prompts of prompts.jsonl."""
    with (out / PROMPTS).open(encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    return [PromptRecord(**{**entry, "ids": tuple(entry["ids"])}) for entry in entries]


def read_runs(out: Path) -> list[PromptRun]:
    """The complete decodes of runs.jsonl, in the order in which they were made; a torn last line is left out.

    Raises:
        ValueError: A line other than the last is damaged.
    """
    path = out / RUNS
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is torn or empty
    runs = []
    for number, line in enumerate(lines, start=1):
        try:
            runs.append(PromptRun.from_json(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} {error}") from None
    return runs


def differences(ours: dict[str, Any], theirs: dict[str, Any], ignored: Sequence[str] = ()) -> list[str]:
    """Settings that differ, each as `name (ours, was theirs)`."""
    names = [name for name in dict.fromkeys([*ours, *theirs]) if name not in ignored]
    return [f"{n} ({ours.get(n)!r}, was {theirs.get(n)!r})" for n in names if ours.get(n) != theirs.get(n)]
