"""Chat messages: through the template, one BOS, the assistant's turn open."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from transformers import AutoTokenizer

from lede.generation import generate
from lede.messages import encode_messages
from lede.models import DEMO_FOLDER, EarlyExitModel, load_model

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort a list."}]


@cache
def chat_tokenizer() -> Any:
    """The bundled tokenizer with a chat template, and with BOS in front of whatever it encodes."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
    tokenizer.add_bos_token = True
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chat_model() -> EarlyExitModel:
    return load_model((load_model("demo").hf_model, chat_tokenizer()))


def test_messages_open_the_assistants_turn_behind_one_bos() -> None:
    tokenizer = chat_tokenizer()
    ids = encode_messages(tokenizer, ASK)
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    assert tokenizer.decode(ids) == f"{bos}[system] Be brief.{eos}[user] Sort a list.{eos}[assistant] "
    assert ids[0] == tokenizer.bos_token_id
    assert ids[1] != tokenizer.bos_token_id


def test_an_unfinished_answer_goes_on() -> None:
    tokenizer = chat_tokenizer()
    ids = encode_messages(tokenizer, [*ASK, {"role": "assistant", "content": "Use sorted"}])
    assert tokenizer.decode(ids).endswith("[assistant] Use sorted")


def test_messages_decode_as_their_ids_do() -> None:
    model = chat_model()
    ids = encode_messages(model.tokenizer, ASK)
    out = generate(model, messages=ASK, max_new_tokens=4)
    assert out.sequences[0, : len(ids)].tolist() == ids
    assert out.sequences.tolist() == generate(model, input_ids=ids, max_new_tokens=4).sequences.tolist()


def test_several_conversations_are_a_batch() -> None:
    model = chat_model()
    first, second = generate(model, messages=[ASK, ASK[1:]], max_new_tokens=3)
    assert first.sequences.tolist() == generate(model, messages=ASK, max_new_tokens=3).sequences.tolist()
    assert second.sequences.tolist() == generate(model, messages=ASK[1:], max_new_tokens=3).sequences.tolist()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there are no messages"),
        (["hello"], "message 0 must have the keys role and content"),
        ([{"role": "user"}], "message 0 must have the keys role and content"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_messages(chat_tokenizer(), messages)


def test_messages_need_a_template() -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        encode_messages(None, ASK)
    with pytest.raises(ValueError, match="no chat template"):
        generate(load_model("demo"), messages=ASK)
    with pytest.raises(ValueError, match="either a prompt or input_ids or messages"):
        generate(chat_model(), "text", messages=ASK)
