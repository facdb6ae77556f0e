"""Streams: whole characters, nothing behind the end, transformers' own streamers."""

from __future__ import annotations

from functools import cache
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

from lede.generation import generate
from lede.models import EarlyExitModel, load_model
from lede.policies import StaticPolicy
from tests.stop_at import StopAt
from tests.tiny_models import prompt, tiny_config, tiny_model

TEXT = (
    "a \N{GRINNING FACE} \N{FAMILY}\N{ROCKET} caf\N{LATIN SMALL LETTER E WITH ACUTE} "
    "\N{CJK UNIFIED IDEOGRAPH-6F22}!\n\N{GLOBE WITH MERIDIANS}"
)
PROMPT = [120, 121]


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def decode(self, ids: Any, **_: Any) -> str:
        return bytes([ids] if isinstance(ids, int) else ids).decode(errors="replace")


class Writes(LogitsProcessor):
    """Makes every model write one text, byte by byte."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        wanted = (TEXT.encode() * 2)[input_ids.shape[1] - len(PROMPT)]
        return scores.fill_(-float("inf")).index_fill_(1, torch.tensor([wanted]), 0.0)  # type: ignore[return-value]


@cache
def byte_model() -> EarlyExitModel:
    config = tiny_config("llama")
    config.vocab_size = 256
    return load_model((AutoModelForCausalLM.from_config(config).eval(), Bytes()))


class Pieces(TextStreamer):
    """Keeps what it would print."""

    def __init__(self) -> None:
        super().__init__(Bytes(), skip_prompt=True)  # type: ignore[arg-type]  # decodes like one
        self.pieces: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)


def write(streamer: Any, n_bytes: int, draft_length: int) -> Any:
    return generate(
        byte_model(),
        input_ids=PROMPT,
        policy=StaticPolicy(exit_layer=2, draft_length=draft_length),
        logits_processor=LogitsProcessorList([Writes()]),
        max_new_tokens=n_bytes,
        streamer=streamer,
    )


@pytest.mark.parametrize("draft_length", [1, 2, 3, 12])
def test_a4_9_no_character_is_cut_between_rounds(draft_length: int) -> None:
    """Emoji of three and four tokens, accepted in two rounds and more; the tail comes at the end."""
    streamer = Pieces()
    out = write(streamer, len(TEXT.encode()), draft_length)
    assert out.text == TEXT
    assert "".join(streamer.pieces) == TEXT
    assert len(streamer.pieces) > 2
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in streamer.pieces)
    done, cuts = 1, 0
    for r in out.rounds:
        cuts += "\N{REPLACEMENT CHARACTER}" in Bytes().decode(TEXT.encode()[:done])
        done += len(r.tokens)
    assert cuts  # rounds did end inside characters


def test_a_text_that_ends_inside_a_character_streams_what_it_decodes_to() -> None:
    streamer = Pieces()
    out = write(streamer, 4, 2)
    assert "".join(streamer.pieces) == out.text == "a \N{REPLACEMENT CHARACTER}"


def test_iterator_streamer_in_a_thread() -> None:
    streamer = TextIteratorStreamer(Bytes(), skip_prompt=True, timeout=60)  # type: ignore[arg-type]  # decodes like one
    thread = Thread(target=write, args=(streamer, len(TEXT.encode()), 3))
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == TEXT


class Recorder:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.values.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_nothing_behind_a_stop_is_streamed() -> None:
    model, ids = tiny_model("llama"), prompt(3, 6)
    policy = StaticPolicy(exit_layer=3, draft_length=4)
    whole = generate(model, input_ids=ids, policy=policy, max_new_tokens=30)
    for token in dict.fromkeys(whole.sequences[0, len(ids) :].tolist()):
        recorder = Recorder()
        out = generate(
            model,
            input_ids=ids,
            policy=policy,
            max_new_tokens=30,
            streamer=recorder,
            stopping_criteria=StoppingCriteriaList([StopAt(token)]),
        )
        assert [t for value in recorder.values for t in value] == out.sequences[0].tolist()
        assert recorder.values[-1][-1] == token
        assert recorder.ended == 1
