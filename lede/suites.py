"""Suites of a benchmark: prompts with categories and references, split into those that are timed and those that tune.

`demo` is the bundled model's own set; `FORMAT:FILE` reads a published one, .gz too, an object a line. Nothing is put
before or after a prompt, but for the chat template where `lede.prompts` would use it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lede.prompts import Chat, Prompt, encode_prompts, prompt_from
from lede.seeding import Purpose, numpy_stream

DEMO_PROMPTS = Path(__file__).parent / "demo" / "prompts.jsonl"
LM_WORDS = 100
"""Words of a document that `lm` gives as prompt."""
LM_REFERENCE_WORDS = 400
"""Words after them that it gives as reference, at most."""


@dataclass(frozen=True)
class Item:
    """One prompt of a suite."""

    prompt_index: int
    """Place in the suite's file, from 0; of an item, not of a line."""
    ids: tuple[int, ...]
    """Token ids."""
    category: str
    """Category; empty where the suite has none."""
    reference: str | None
    """The suite's own answer, where it has one."""


@dataclass(frozen=True)
class Suite:
    """A suite, ready to be decoded."""

    name: str
    """Its name in tables."""
    spec: str
    """As the command line gave it."""
    test: tuple[Item, ...]
    """Prompts that are timed."""
    validation: tuple[Item, ...]
    """Prompts that contenders are tuned on; none of them is a test prompt."""
    too_long: int
    """Prompts left out for their length."""
    too_short: int = 0
    """Documents left out because too little follows their prompt."""


@dataclass(frozen=True)
class _Entry:
    """An item before it is encoded."""

    prompt: Prompt
    category: str = ""
    reference: str | None = None
    split: str | None = None


def _spec_bench(entry: dict[str, Any]) -> _Entry:
    reference = entry.get("reference")
    if isinstance(reference, list):  # one a turn
        reference = reference[0] if reference else None
    return _Entry(prompt_from(entry), _text(entry, "category"), str(reference) if reference else None)


def _human_eval(entry: dict[str, Any]) -> _Entry:
    """A prompt without the line break at its end, which tokenizers join with the indentation that follows."""
    return _Entry(Prompt(_text(entry, "prompt").rstrip()), reference=_text(entry, "canonical_solution"))


def _gsm8k(entry: dict[str, Any]) -> _Entry:
    return _Entry(Prompt(_text(entry, "question")), reference=_text(entry, "answer"))


def _cnn_dm(entry: dict[str, Any]) -> _Entry:
    return _Entry(Prompt(_text(entry, "article")), reference=_text(entry, "highlights"))


def _xsum(entry: dict[str, Any]) -> _Entry:
    return _Entry(Prompt(_text(entry, "document")), reference=_text(entry, "summary"))


def _language_modelling(entry: dict[str, Any]) -> _Entry | None:
    """The first words of a document as they stand there, and the words that follow; None where none do."""
    text = _text(entry, "text")
    ends = list(islice(_word_ends(text), LM_WORDS + LM_REFERENCE_WORDS))
    if len(ends) <= LM_WORDS:
        return None
    cut = ends[LM_WORDS - 1]
    return _Entry(Prompt(text[:cut]), reference=text[cut : ends[-1]].strip())


def _any(entry: dict[str, Any]) -> _Entry:
    reference, split = entry.get("reference"), entry.get("split")
    return _Entry(
        prompt_from(entry),
        str(entry.get("category") or ""),
        str(reference) if reference else None,
        None if split is None else str(split),
    )


FORMATS: dict[str, Callable[[dict[str, Any]], _Entry | None]] = {
    "spec-bench": _spec_bench,
    "humaneval": _human_eval,
    "gsm8k": _gsm8k,
    "cnn-dm": _cnn_dm,
    "xsum": _xsum,
    "lm": _language_modelling,
    "jsonl": _any,
}
"""What a line of each kind of file says; None where it is too short to be a prompt."""


def check_spec(spec: str) -> tuple[str, Path]:
    """Name and file of a suite.

    Raises:
        ValueError: There is no such suite, or it needs a file.
    """
    kind, _, file = spec.partition(":")
    if spec == "demo":
        return spec, DEMO_PROMPTS
    if kind not in FORMATS:
        raise ValueError(
            f"there is no suite '{spec}'; suites are demo, {', '.join(f'{name}:FILE' for name in FORMATS)}"
        )
    if not file:
        raise ValueError(f"suite '{kind}' needs a file, as in {kind}:FILE")
    return (Path(file).name.partition(".")[0] if kind in ("jsonl", "lm") else kind), Path(file)


def load_suite(
    spec: str,
    tokenizer: Any,
    chat: Chat = "auto",
    n_prompts: int | None = None,
    validation_prompts: int = 16,
    max_prompt_tokens: int | None = None,
    seed: int = 0,
) -> Suite:
    """Read a suite and split it.

    A file whose lines have a `split` keeps it, of which `validation` and `test` are used. Any other is split by lot:
    `validation_prompts` of it, stratified by category, are for validation and the rest is for test. Which those are
    depends neither on `n_prompts` nor on the contenders.

    Args:
        spec: `demo` or `FORMAT:FILE` with a format of `FORMATS`.
        tokenizer: The model's.
        chat: Whether prompts go through the chat template; `auto` is on for prompts from `turns`.
        n_prompts: Test prompts to take, stratified by category; None for all.
        validation_prompts: Validation prompts to take.
        max_prompt_tokens: Prompts with more are left out; None for no limit.
        seed: Of the lots.

    Raises:
        ValueError: There is no such suite, its file can't be read, a line (named) has no usable prompt, or too few
            prompts are left.
    """
    name, path = check_spec(spec)
    lines = list(_entries(path, FORMATS.get(spec.partition(":")[0], _any)))
    entries = [(number, entry) for number, entry in lines if entry is not None]
    too_short = len(lines) - len(entries)
    ids = _encode(tokenizer, [entry.prompt for _, entry in entries], chat, path, [number for number, _ in entries])
    items = [Item(i, tuple(ids[i]), entry.category, entry.reference) for i, (_, entry) in enumerate(entries)]
    limit = max_prompt_tokens
    fitting = [item for item in items if limit is None or len(item.ids) <= limit]
    splits = [entry.split for _, entry in entries]
    if any(split is not None for split in splits):
        usable = [item for item in items if splits[item.prompt_index] in ("validation", "test")]
        offered = [item for item in fitting if splits[item.prompt_index] == "validation"]
        rest = [item for item in fitting if splits[item.prompt_index] == "test"]
        too_long = len(usable) - len(offered) - len(rest)
    else:
        offered = rest = fitting
        too_long = len(items) - len(fitting)
    validation = _stratified(offered, validation_prompts, seed)
    seen = {item.ids for item in validation}
    test = [item for item in rest if item.ids not in seen]  # files hold some prompts twice
    if not test:
        short = f", {too_short} documents of at most {LM_WORDS} words beside" if too_short else ""
        raise ValueError(
            f"{path} leaves no prompt for test: {len(items)} in all{short}, {too_long} longer than {limit} tokens, "
            f"{len(validation)} for validation"
        )
    kept = test if n_prompts is None else _stratified(test, n_prompts, seed)
    return Suite(name, spec, tuple(kept), tuple(validation), too_long, too_short)


def _entries(path: Path, read: Callable[[dict[str, Any]], _Entry | None]) -> Iterator[tuple[int, _Entry | None]]:
    """Entries with the numbers of their lines; empty lines are passed over."""
    found = False
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError(f"must be a JSON object, got {type(entry).__name__}")
            item = read(entry)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error.msg} at column {error.colno}") from None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        found = True
        yield number, item
    if not found:
        raise ValueError(f"{path} holds no prompts")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig", newline="\n") as file
        ):
            for number, line in enumerate(file, start=1):
                yield number, line
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, after line {number}: not UTF-8: {error.reason}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}, after line {number}: damaged gzip file: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


def _encode(
    tokenizer: Any, prompts: Sequence[Prompt], chat: Chat, path: Path, numbers: Sequence[int]
) -> list[list[int]]:
    encoded = []
    for number, prompt in zip(numbers, prompts, strict=True):
        try:
            encoded += encode_prompts(tokenizer, [prompt], chat)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {str(error).removeprefix('prompt 1: ')}") from None
    return encoded


def _stratified(items: Sequence[Item], n: int, seed: int) -> list[Item]:
    """`n` items by lot, as many of every category as there are, one more of some where they don't divide; in order.

    Categories take turns, so each is there as soon as `n` reaches their number.
    """
    by_category: dict[str, list[Item]] = {}
    for item in items:
        by_category.setdefault(item.category, []).append(item)
    stream = numpy_stream(seed, Purpose.PROMPT_ORDER)
    queues = [[members[i] for i in stream.permutation(len(members))] for members in by_category.values()]
    chosen: list[Item] = []
    while len(chosen) < n and any(queues):
        for queue in queues:
            if queue and len(chosen) < n:
                chosen.append(queue.pop())
    return sorted(chosen, key=lambda item: item.prompt_index)


def _word_ends(text: str) -> Iterator[int]:
    """Where each word ends."""
    inside = False
    for i, character in enumerate(text):
        if inside and character.isspace():
            yield i
        inside = not character.isspace()
    if inside:
        yield len(text)


def _text(entry: dict[str, Any], key: str) -> str:
    if key not in entry:
        raise ValueError(f"needs the key {key}; it has {', '.join(entry) or 'none'}")
    value = entry[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a text, got {type(value).__name__}")
    return value
