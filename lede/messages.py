"""Chat messages, turned into token ids by the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lede.prompts import check_unicode

Message = Mapping[str, Any]
"""What one side says: at least `role` and `content`."""


def encode_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, open for the assistant's answer, or the rest of it where the assistant spoke last.

    The template writes its own special tokens, so none are added to its text, and BOS never stands twice.

    Raises:
        ValueError: There is no tokenizer or it has no chat template, or the messages are none.
    """
    if tokenizer is None:
        raise ValueError("this model has no tokenizer; give input_ids instead of messages")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template; give a prompt instead of messages")
    if not messages:
        raise ValueError("there are no messages; give at least one")
    message: Any
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"message {number} must have the keys role and content, got {message!r}")
        if isinstance(message["content"], str):
            check_unicode(message["content"])
    unfinished = messages[-1]["role"] == "assistant"
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=not unfinished,
        continue_final_message=unfinished,
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
