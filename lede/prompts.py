"""Prompts: read from files, turned into token ids.

A file is .jsonl, one object a line with the key `prompt`, `turns` (a conversation, of which the first user turn is
taken) or `question`, or .txt, one prompt a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Chat = Literal["auto", "on", "off"]
"""Whether prompts go through the chat template; `auto` is on for prompts from `turns` and off for all others."""

DEFAULT_PROMPTS = (
    '"""Read and write comma separated files."""\n\nimport csv',
    "def fibonacci(n):",
    "import numpy as np\n\n\ndef normalize(x, axis=-1):",
    'class Stack:\n    """A last-in first-out stack."""\n\n    def __init__(self):',
    "from collections import Counter\n\n\ndef most_common_words(text, n=10):",
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def setUp(self):",
    "def binary_search(items, target):\n    low, high = 0, len(items) - 1",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
)
"""Heads of Python files, for the bundled model when no prompts are given; none ends with a line break, which its
vocabulary joins with the indentation behind it, so that a bare one looks like the end of a file."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file."""

    text: str
    """What the user wrote."""
    from_turns: bool = False
    """Whether it is the first turn of a conversation."""


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read the prompts of a .jsonl or .txt file, in file order.

    Raises:
        ValueError: The file is missing, of another kind, empty, or a line holds no usable prompt; the message has the
            line's number.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".txt"):
        raise ValueError(f"prompts must be a .jsonl or .txt file, got '{path}'")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read prompts '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts '{path}' are not UTF-8: {error.reason} at byte {error.start}") from error
    if lines[-1] == "":
        lines.pop()
    read = _read_object if path.suffix == ".jsonl" else Prompt
    prompts = []
    for number, line in enumerate(lines, start=1):
        if path.suffix == ".jsonl" and not line.strip():
            continue
        try:
            prompt = read(line.removesuffix("\r"))
            _check_text(prompt.text)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def encode_prompts(
    tokenizer: Any, prompts: Iterable[str | Prompt | Sequence[int]], chat: Chat = "auto"
) -> list[list[int]]:
    """Token ids of prompts.

    Args:
        tokenizer: The model's; None is enough when every prompt is a sequence of ids already.
        prompts: Texts, prompts of a file, or token ids, which are taken as they are.
        chat: Whether texts go through the chat template, which then opens the assistant's answer. A template writes
            its own special tokens, so none are added to its text, and BOS never stands twice.

    Raises:
        ValueError: A prompt is empty or not a prompt, or texts come without a tokenizer or without the chat template
            they need.
    """
    if chat not in get_args(Chat):
        raise ValueError(f"chat must be one of {', '.join(get_args(Chat))}, got '{chat}'")
    if isinstance(prompts, (str, Prompt)):
        raise ValueError("prompts must be a list of prompts, got a single one; put it into a list")
    encoded = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            ids = _encode(tokenizer, prompt, chat)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None
        encoded.append(ids)
    if not encoded:
        raise ValueError("there are no prompts; give at least one")
    return encoded


def check_lengths(prompts: Sequence[Sequence[int]], max_new_tokens: int, max_positions: int) -> None:
    """Raise ValueError, with both numbers, when a prompt and its budget exceed the model's positions."""
    for number, ids in enumerate(prompts, start=1):
        if len(ids) + max_new_tokens > max_positions:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens, which with {max_new_tokens} new ones exceeds the model's "
                f"{max_positions} positions; shorten it or lower max_new_tokens"
            )


def _read_object(line: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"must be a JSON object, got {type(entry).__name__}")
    return prompt_from(entry)


def prompt_from(entry: dict[str, Any]) -> Prompt:
    """The prompt of a JSON object with a key `prompt`, `turns` or `question`; its text is not yet checked.

    Raises:
        ValueError: It has none of the keys, or its turns hold none of the user's.
    """
    if "prompt" in entry:
        return Prompt(entry["prompt"])
    if "turns" in entry:
        return Prompt(_first_user_turn(entry["turns"]), from_turns=True)
    if "question" in entry:
        return Prompt(entry["question"])
    raise ValueError(f"needs a key out of prompt, turns, question; it has {', '.join(entry) or 'none'}")


def _first_user_turn(turns: Any) -> Any:
    """The first turn that the user speaks; turns are texts, the user's first, or objects with role and content."""
    if not isinstance(turns, list) or not turns:
        raise ValueError("turns must be a list with at least one turn")
    if isinstance(turns[0], str):
        return turns[0]
    for turn in turns:
        if isinstance(turn, dict) and turn.get("role") == "user":
            return turn.get("content")
    raise ValueError("no turn is a text or has the role 'user'")


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"the prompt must be a text, got {type(text).__name__}")
    if not text.strip():
        raise ValueError("the prompt is empty")
    check_unicode(text)


def check_unicode(text: str) -> None:
    """Raise ValueError when a text holds half a surrogate pair, as undecodable bytes of a command line do."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid Unicode: {error.reason} at character {error.start}") from None


def _encode(tokenizer: Any, prompt: str | Prompt | Sequence[int], chat: Chat) -> list[int]:
    if isinstance(prompt, str):
        prompt = Prompt(prompt)
    if not isinstance(prompt, Prompt):
        try:
            ids = [int(i) for i in prompt]
        except (TypeError, ValueError):
            raise ValueError(f"must be a text or token ids, got {type(prompt).__name__}") from None
        if not ids:
            raise ValueError("it has no tokens")
        return ids
    _check_text(prompt.text)
    if tokenizer is None:
        raise ValueError("the model has no tokenizer, so prompts must be token ids")
    if chat == "on" or (chat == "auto" and prompt.from_turns):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; use chat 'off'")
        messages = [{"role": "user", "content": prompt.text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt.text)["input_ids"]
    if not ids:
        raise ValueError("it has no tokens")
    return list(ids)
