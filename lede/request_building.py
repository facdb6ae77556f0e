"""From the settings of a call of `lede.generate` to the request that the decoding loops take."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from lede.generation_settings import SAMPLING_ONLY, GenerateConfig, acting
from lede.models import EarlyExitModel
from lede.processors import make_criteria, make_processors, prepared, processors_of_row
from lede.request import Request
from lede.stopping import split_criteria
from lede.verification import Warp


def build_request(
    model: EarlyExitModel,
    rows: Sequence[Sequence[int]],
    config: GenerateConfig,
    rest: GenerationConfig,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
) -> Request:
    """What a call asks of each of its texts.

    Args:
        model: The model.
        rows: Prompts, without padding.
        config: lede's settings.
        rest: The other settings, from `resolve`.
        logits_processor: The caller's own processors.
        stopping_criteria: The caller's own criteria.

    Raises:
        ValueError: A setting is out of range, or a prompt leaves no room for a new token.
    """
    for name, given in (("logits_processor", logits_processor), ("stopping_criteria", stopping_criteria)):
        if given is not None and not isinstance(given, (list, tuple)):
            raise ValueError(f"{name} must be a list, got {type(given).__name__}; put it into one")
    rest.stop_strings = list(config.stops) or None
    rest.max_time = config.max_time
    bound = rest.max_length
    ends = prepared(rest, 0, 1, sorted(_eos(model, config)), model.device)
    ends.max_length = None  # differs from row to row; budgets below
    made = make_criteria(model.hf_model, ends, stopping_criteria, model.tokenizer)
    criteria, eos, longest = split_criteria(made)
    budgets = [_budget(len(row), config.max_new_tokens, bound, longest) for row in rows]
    warp, processors = _processors(model, rows, config, rest, budgets, eos, logits_processor)
    for row, budget in zip(rows, budgets, strict=True):
        if len(row) + budget > model.max_positions:
            raise ValueError(
                f"the prompt has {len(row)} tokens and the budget is {budget}, together more than the "
                f"model's {model.max_positions} positions; shorten the prompt or lower max_new_tokens"
            )
    return Request(
        prompts=tuple(tuple(row) for row in rows),
        budgets=tuple(budgets),
        eos=eos,
        warp=warp,
        seed=int(config.seed),
        stream=int(config.stream),
        processors=processors,
        criteria=tuple(criteria),
        output_scores=config.output_scores,
        output_logits=config.output_logits,
    )


def _budget(n_prompt: int, max_new_tokens: int, max_length: int | None, longest: int | None) -> int:
    """New tokens of a row: a length criterion of the caller's decides, then max_length, then max_new_tokens."""
    if longest is not None:
        return max(1, longest - n_prompt)
    if max_length is None:
        return int(max_new_tokens)
    if max_length <= n_prompt:
        raise ValueError(
            f"max_length is {max_length}, but the prompt has {n_prompt} tokens already; raise it, or set max_new_tokens"
        )
    return int(max_length) - n_prompt


def _processors(
    model: EarlyExitModel,
    rows: Sequence[Sequence[int]],
    config: GenerateConfig,
    rest: GenerationConfig,
    budgets: Sequence[int],
    eos: frozenset[int],
    own: LogitsProcessorList | None,
) -> tuple[Warp, tuple[LogitsProcessorList | None, ...]]:
    """The warp and the processors of each row; none where temperature, top-k and top-p are all there is.

    With others, transformers makes the warpers too, in its order, and what is left to do is a softmax.
    """
    warp, ids = config.warp, sorted(eos)

    def made(sampled: Warp | None) -> list[LogitsProcessorList]:
        every = []
        for i, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
            ready = prepared(rest, len(row), budget, ids, model.device, sampled)
            mine = None if own is None else processors_of_row(own, i, len(rows))
            every.append(make_processors(model.hf_model, ready, row, mine, model.device))
        return every

    plain = made(None)
    others = (set(SAMPLING_ONLY) - {"top_k", "top_p"}) & set(acting(rest))
    if not any(plain) and (warp.greedy or not others):
        return warp, ()
    if warp.greedy:
        return warp, tuple(plain)
    return Warp(1.0), tuple(made(warp))


def _eos(model: EarlyExitModel, config: GenerateConfig) -> frozenset[int]:
    if config.eos_token_id is None:
        return frozenset(model.eos_token_ids)
    given: Any = config.eos_token_id
    try:
        several = given.tolist() if isinstance(given, (torch.Tensor, np.ndarray)) else given
        return frozenset(map(operator.index, [several] if isinstance(several, Integral) else several))
    except TypeError:
        raise ValueError(f"eos_token_id must be a token id or several, got {given!r}") from None
