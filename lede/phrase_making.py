"""`lede phrases`: a memory of phrases from stores, or from any texts in a model's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lede.atomic import prepare_file
from lede.lookup import MAX_MATCH
from lede.phrases import MAX_SUFFIX, PhraseMemory, Text
from lede.prompts import Chat, encode_prompts

if TYPE_CHECKING:
    from lede.models import EarlyExitModel

_KINDS = (".jsonl", ".txt")


@dataclass(frozen=True)
class PhrasesConfig:
    """Settings of `lede phrases`."""

    out: Path
    """File of the memory, safetensors; replaced whole."""
    buffer: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A store whose texts are remembered, traces or transitions; give it again for more."""
    texts: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """A file to remember: .txt, which is one text, or .jsonl, one object a line with `text`, or with `prompt` and
    `answer`; give it again for more."""
    model: str | None = None
    """Model whose tokens files are read in, folder or name."""
    chat: Chat = "off"
    """Whether prompts of .jsonl files go through the model's chat template."""
    max_suffix: int = MAX_SUFFIX
    """Tokens of the longest n-grams that are remembered."""

    def __post_init__(self) -> None:
        if not self.buffer and not self.texts:
            raise ValueError("give texts to remember: stores as --buffer, files as --texts")
        if bool(self.texts) != (self.model is not None):
            raise ValueError(
                "files are read in the tokens of a model, and stores have theirs: give texts and model both, or neither"
            )
        odd = [str(path) for path in self.texts if path.suffix not in _KINDS]
        if odd:
            raise ValueError(f"texts must be {' or '.join(_KINDS)} files, got {', '.join(odd)}")
        if not 1 <= self.max_suffix <= MAX_MATCH:
            raise ValueError(f"max_suffix must be within 1..{MAX_MATCH}, got {self.max_suffix}")


def make_phrases(config: PhrasesConfig, model: EarlyExitModel | None = None) -> PhraseMemory:
    """Make a memory, write it, and say what it takes.

    Args:
        config: Settings.
        model: The model itself, to spare loading `config.model`.

    Raises:
        ValueError: A store or a file can't be read, they are of different tokenizers, or they hold nothing to remember.
    """
    from lede.models import load_model

    hashes: dict[str, str | None] = {}
    texts: list[Text] = []
    for name in config.buffer:
        found, hashes[name] = _of_store(name)
        texts += found
    if config.texts:
        from lede.fingerprints import hash_tokenizer

        model = load_model(str(config.model)) if model is None else model
        if model.tokenizer is None:
            raise ValueError(f"model '{model.name}' has no tokenizer to read texts with; make a store of them instead")
        hashes[model.name] = hash_tokenizer(model.tokenizer)
        for path in config.texts:
            texts += _of_file(path, model.tokenizer, config.chat)
    known = {digest for digest in hashes.values() if digest is not None}
    if len(known) > 1:
        raise ValueError(f"{', '.join(hashes)} have different tokenizers; their tokens can't be in one memory")
    whose = next(iter(known)) if known and None not in hashes.values() else None  # or nothing is known for sure
    memory = PhraseMemory.from_texts(texts, config.max_suffix, whose)
    if not len(memory):
        raise ValueError("the texts hold nothing to remember: give some of at least two tokens")
    prepare_file(config.out)
    memory.save(config.out)
    print(
        f"{len(memory):,} n-grams of up to {memory.max_suffix} tokens, of {len(texts):,} texts, "
        f"{memory.n_bytes / 1e6:.1f} MB, in {config.out}"
    )
    return memory


def _of_store(name: str) -> tuple[list[Text], str | None]:
    """The texts of a store, and the hash of their tokenizer."""
    from lede.buffers.store import open_store

    store = open_store(name)
    texts: list[Text] = [(record.prompt_ids, record.token_ids) for record in store.prompts]
    return texts, store.settings.fingerprint.get("tokenizer") if store.settings.fingerprint else None


def _of_file(path: Path, tokenizer: Any, chat: Chat) -> Iterator[Text]:
    """The texts of a file in tokens."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read texts '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"texts '{path}' are not UTF-8: {error.reason} at byte {error.start}") from error
    if path.suffix == ".txt":
        yield (), _tokens(tokenizer, content)
        return
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt, answer = _read(line)
            before = encode_prompts(tokenizer, [prompt], chat)[0] if prompt is not None else ()
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        yield before, _tokens(tokenizer, answer)


def _read(line: str) -> tuple[str | None, str]:
    """Prompt, None where there is none, and what was written behind it."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    if isinstance(entry, dict):
        text, prompt, answer = (entry.get(key) for key in ("text", "prompt", "answer"))
        if isinstance(text, str):
            return None, text
        if isinstance(prompt, str) and isinstance(answer, str):
            return prompt, answer
    raise ValueError("must be an object with `text`, or with `prompt` and `answer`, all of them texts")


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
