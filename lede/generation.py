"""`generate`: text from a model under a policy, exactly the plain model's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from lede import decoding
from lede.checkpoint import check_fingerprint
from lede.decoding import Decoder, Prefill
from lede.generation_settings import GenerateConfig, ignored_of_the_model, resolve
from lede.messages import Message, encode_messages
from lede.models import EarlyExitModel
from lede.output import GenerateOutput, Streamer
from lede.policies.base import Policy
from lede.prompt_rows import ids_of, is_batch, rows_of
from lede.prompts import check_unicode
from lede.request import Request
from lede.request_building import build_request
from lede.statistics import Meter

__all__ = ["GenerateConfig", "GenerateOutput", "Prefill", "Streamer", "decode_rows", "generate", "prefill"]


@overload
def generate(
    model: EarlyExitModel,
    prompt: str | None = None,
    *,
    input_ids: torch.Tensor | Sequence[int] | None = None,
    messages: Sequence[Message] | None = None,
    **arguments: Any,
) -> GenerateOutput: ...
@overload
def generate(
    model: EarlyExitModel,
    prompt: list[str] | tuple[str, ...],
    /,
    *,
    input_ids: None = None,
    messages: None = None,
    **arguments: Any,
) -> list[GenerateOutput]: ...
@overload
def generate(
    model: EarlyExitModel,
    prompt: None = None,
    *,
    input_ids: Sequence[Sequence[int]],
    messages: None = None,
    **arguments: Any,
) -> list[GenerateOutput]: ...
@overload
def generate(
    model: EarlyExitModel,
    prompt: None = None,
    *,
    input_ids: None = None,
    messages: Sequence[Sequence[Message]],
    **arguments: Any,
) -> list[GenerateOutput]: ...
def generate(  # type: ignore[misc]  # a keyword `prompt` beside a list of prompts would be a second one
    model: EarlyExitModel,
    prompt: str | Sequence[str] | None = None,
    *,
    input_ids: Any = None,
    attention_mask: Any = None,
    messages: Any = None,
    policy: Policy | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    streamer: Streamer | None = None,
    prefilled: Prefill | None = None,
    **settings: Any,
) -> GenerateOutput | list[GenerateOutput]:
    """Decode a prompt, or several at once; whatever the policy does, the text is the plain model's.

    Greedy unless `temperature` is above 0 or a `generation_config` that samples is given. Of the model's own generation
    config only the EOS ids are used.

    Args:
        model: From `lede.load_model`.
        prompt: Text, encoded by the model's tokenizer as the tokenizer is configured (BOS included where it adds one),
            or a list of texts, which are decoded in one batch.
        input_ids: Instead of text, token ids `(1, prompt)` or `(prompt,)`; or of a batch, a list of id lists of any
            lengths, or a tensor `(row, token)` padded on the left.
        attention_mask: Of a padded tensor, 0 where it is padded.
        messages: Instead of text, a conversation for the chat template, `{"role": ..., "content": ...}` each, which the
            model answers; or a list of conversations.
        policy: Who decides when to exit; None decodes plainly on the same engine. What it keeps between calls (the
            luck of a random policy) it keeps until its `reset()`.
        generation_config: transformers settings. What would change the text and is not supported (beams, several
            returned sequences, guidance, assistants, static caches and the like) is refused by name.
        logits_processor: transformers logits processors, applied to draft and whole model alike; they must be functions
            of ids and logits, without a memory.
        stopping_criteria: transformers stopping criteria, asked token by token, inside accepted blocks too.
        streamer: Receives the prompt and then the tokens of each round, e.g. transformers' TextStreamer.
        prefilled: From `prefill` on this model and prompt, which then doesn't run again; it stays as it is.
        **settings: Fields of `GenerateConfig` (max_new_tokens, temperature, top_k, top_p, seed, stream, eos_token_id,
            stop_strings, max_time, output_scores, output_logits) and of transformers' GenerationConfig
            (repetition_penalty, min_p, ...), which they precede.

    Returns:
        The output, or a list of outputs where a batch was given.

    Raises:
        ValueError: An argument is unusable or not supported, the policy belongs to another model, the prefill is of
            another model or prompt, or prompt and budget don't fit into the model's positions. Before any work.
    """
    _check_model(model)
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(f"policy must be a policy or None, got {type(policy).__name__}; lede.parse_policy reads names")
    config, rest = resolve(generation_config, settings)
    rows, many = _rows(model, prompt, input_ids, attention_mask, messages)
    request = build_request(model, rows, config, rest, logits_processor, stopping_criteria)
    _warn_ignored(model, generation_config, settings)
    if policy is not None:
        check_fingerprint(policy, model)
        policy.check_model(model)
        policy.check_temperature(config.temperature)
    outputs = decode_rows(model, request, policy, streamer, prefilled, many)
    return outputs if many else outputs[0]


def decode_rows(
    model: EarlyExitModel,
    request: Request,
    policy: Policy | None,
    streamer: Streamer | None = None,
    prefilled: Prefill | None = None,
    many: bool = False,
) -> list[GenerateOutput]:
    """Decode what was asked for: one text by the loop for one, several in lockstep.

    Args:
        model: The model.
        request: The texts and what to do with them.
        policy: Who decides, checked; None decodes plainly.
        streamer: Receives the tokens of a single text.
        prefilled: Of a single text.
        many: Whether the caller thinks of them as a batch, if only of one row.

    Raises:
        ValueError: A streamer or a prefill comes with a batch, or the prefill is of something else.
    """
    if not many:
        return [_decode_one(model, request, policy, streamer, prefilled)]
    for name, given in (("streamer", streamer), ("prefilled", prefilled)):
        if given is not None:
            raise ValueError(f"{name} is for one prompt, got a batch of {len(request.prompts)}; call once a prompt")
    from lede.batch_generation import generate_batch

    return generate_batch(model, [list(row) for row in request.prompts], policy, request)


def _decode_one(
    model: EarlyExitModel,
    request: Request,
    policy: Policy | None,
    streamer: Streamer | None,
    prefilled: Prefill | None,
) -> GenerateOutput:
    meter = Meter()
    ids = list(request.prompts[0])
    chooser = request.chooser(0, model.device)
    decoder = Decoder(model, policy, chooser, request.eos, meter, request.stopping(0, chooser, model.device))
    if prefilled is not None:
        if not isinstance(prefilled, Prefill):
            raise ValueError(f"prefilled must come from lede.generation.prefill, got {type(prefilled).__name__}")
        prefilled.check(model, ids)
    if streamer is not None:
        streamer.put(torch.tensor(ids))
    new: list[int] = []
    for tokens in decoder.decode(ids, request.budgets[0], prefilled):
        new.extend(tokens)
        if streamer is not None:
            streamer.put(torch.tensor(tokens))
    stats = meter.stats()  # what follows is not decoding
    if streamer is not None:
        streamer.end()
    return request.output(model, 0, new, chooser, stats, meter.rounds, decoder.stopped)


def prefill(model: EarlyExitModel, input_ids: torch.Tensor | Sequence[int]) -> Prefill:
    """Run a prompt through all layers once, for any number of `generate(..., prefilled=...)` of the same prompt.

    Args:
        model: From `lede.load_model`.
        input_ids: Token ids `(1, prompt)` or `(prompt,)`.

    Raises:
        ValueError: The model is none of `lede.load_model`, or they are no prompt of it.
    """
    _check_model(model)
    ids = _checked(model, ids_of(input_ids))
    if len(ids) > model.max_positions:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, more than the model's {model.max_positions} positions; shorten it"
        )
    return decoding.prefill(model, ids)


def _check_model(model: object) -> None:
    if not isinstance(model, EarlyExitModel):
        raise ValueError(
            f"model must come from lede.load_model, got {type(model).__name__}; wrap it: load_model((m, t))"
        )


def _rows(
    model: EarlyExitModel, prompt: Any, input_ids: Any, attention_mask: Any, messages: Any
) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether the caller gave a batch."""
    if sum(given is not None for given in (prompt, input_ids, messages)) != 1:
        raise ValueError("give either a prompt or input_ids or messages")
    if input_ids is None and attention_mask is not None:
        raise ValueError("attention_mask goes with input_ids; leave it out")
    if input_ids is not None:
        many = is_batch(input_ids)
        rows = rows_of(input_ids if many else [ids_of(input_ids)], attention_mask)
    elif messages is not None:
        many = bool(messages) and not isinstance(messages[0], Mapping)
        rows = [encode_messages(model.tokenizer, each) for each in (messages if many else [messages])]
    else:
        many = isinstance(prompt, (list, tuple))
        rows = [_encode(model, text) for text in (prompt if many else [prompt])]
    if not rows:
        raise ValueError("there are no prompts; give at least one")
    return [_checked(model, row) for row in rows], many


def _encode(model: EarlyExitModel, text: Any) -> list[int]:
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer; give input_ids instead of a prompt")
    if not isinstance(text, str):
        raise ValueError(f"the prompt must be text, or a list of texts, got {type(text).__name__}")
    check_unicode(text)
    return list(model.tokenizer(text)["input_ids"])


def _checked(model: EarlyExitModel, ids: list[int]) -> list[int]:
    if not ids:
        raise ValueError("the prompt is empty; it needs at least one token")
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        raise ValueError(f"input_ids reach from {min(ids)} to {max(ids)}, the vocabulary has {model.vocab_size} ids")
    return ids


def _warn_ignored(model: EarlyExitModel, generation_config: GenerationConfig | None, settings: dict[str, Any]) -> None:
    own = getattr(model.hf_model, "generation_config", None)
    ignored = [] if own is None else ignored_of_the_model(own, generation_config, settings)
    if ignored:
        warnings.warn(
            f"the model's generation config sets {', '.join(ignored)}, which lede ignores; set it in the call to "
            "decide yourself",
            stacklevel=3,
        )
