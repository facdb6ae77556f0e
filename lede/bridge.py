"""The way in through transformers: `hf_model.generate(..., custom_generate=lede.custom_generate(policy))`.

`generate` does all that it does before it decodes, merging the model's own generation config, making processors and
criteria, and then calls us in place of its own loop. It hands over neither its `tokenizer` and `streamer` nor an
`assistant_model`, which it takes without a word, so the first two are given to `custom_generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lede.bridged_model import bridged_model
from lede.checkpoint import check_fingerprint
from lede.generation import decode_rows
from lede.generation_settings import GenerateConfig, refuse_unsupported
from lede.models import EarlyExitModel
from lede.output import GenerateOutput, Streamer
from lede.policies.base import Policy
from lede.processors import check_processors, processors_of_row
from lede.prompt_rows import padding_of
from lede.request import Request
from lede.stopping import split_criteria
from lede.verification import Warp

_CACHES = ("cache", "past_key_values")
_PASSED_OVER = frozenset((*_CACHES, "use_cache", "logits_to_keep", "cache_position", "attention_mask", "position_ids"))


class CustomGenerate:
    """What transformers' `generate` calls to decode; made by `custom_generate`."""

    def __init__(
        self, policy: Policy | None, tokenizer: Any, streamer: Streamer | None, stop_strings: Sequence[str]
    ) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.streamer = streamer
        self.stop_strings = stop_strings
        self.outputs: tuple[GenerateOutput, ...] = ()
        """What lede knows of the texts of the last call: statistics, rounds, finish reasons; one a row."""

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Decode what `generate` prepared.

        Args:
            model: The transformers model.
            input_ids: Prompts `(row, token)`, padded on the left where they are of unequal lengths.
            logits_processor: What it made of the settings, samplers included, and of the caller's own.
            stopping_criteria: Likewise.
            generation_config: Merged with the model's own.
            seed: Of the tokens drawn; None takes one from torch's own luck, so that `torch.manual_seed` decides.
            **model_kwargs: Attention mask, positions, an empty cache.

        Returns:
            Prompts and new tokens `(row, token)`, padded on the right where rows ended early, or with
            `return_dict_in_generate` an output of transformers that holds them and the scores.

        Raises:
            ValueError: Something is asked for that lede doesn't do; before any work.
        """
        refuse_unsupported(generation_config, strict=False)
        check_processors(logits_processor)
        _check_arguments(input_ids, model_kwargs)
        lede_model = bridged_model(model, self.tokenizer)
        if input_ids.device != lede_model.device:
            raise ValueError(f"input_ids are on {input_ids.device}, the model on {lede_model.device}; move them there")
        mask = model_kwargs.get("attention_mask")
        padding = [0] * len(input_ids) if mask is None else padding_of(input_ids.tolist(), mask)
        empty = [row for row, n in enumerate(padding) if n == input_ids.shape[1]]
        if empty:
            raise ValueError(f"row {empty[0]} of input_ids is all padding; a prompt needs at least one token")
        _check_positions(model_kwargs.get("position_ids"), input_ids, padding)
        extra = [StopStringCriteria(self.tokenizer, list(self.stop_strings))] if self.stop_strings else []
        criteria, eos, longest = split_criteria([*stopping_criteria, *extra])
        request = _request(lede_model, input_ids, padding, generation_config, longest, eos, criteria, seed)
        request = _with_processors(request, logits_processor)
        many = len(input_ids) > 1
        pad = _pad_token(generation_config, eos) if many else None
        if many and pad is None and (eos or criteria):
            raise ValueError("rows that end early are padded, but there is no pad_token_id; set it")
        if self.policy is not None:
            check_fingerprint(self.policy, lede_model)
            self.policy.check_model(lede_model)
            sampled = generation_config.do_sample
            self.policy.check_temperature(float(generation_config.temperature or 1) if sampled else 0.0)
        self.outputs = tuple(decode_rows(lede_model, request, self.policy, self.streamer, many=many))
        return _as_transformers(self.outputs, input_ids, pad or 0, generation_config)


def custom_generate(
    policy: Policy | None = None,
    *,
    tokenizer: Any = None,
    streamer: Streamer | None = None,
    stop_strings: str | Sequence[str] | None = None,
) -> CustomGenerate:
    """What to give transformers' `generate` as `custom_generate`, so that it decodes under a policy.

    The text is what `generate` gives without it: greedy exactly, sampled by the same law. A keyword `seed` of
    `generate` seeds the tokens drawn; without it torch's global luck does, as in transformers.

    Args:
        policy: Who decides when to exit; None decodes plainly.
        tokenizer: The model's; needed for stop strings. `generate` would keep its own `tokenizer` to itself.
        streamer: Receives the prompt and then the tokens of each round. Given to `generate` it would never be reached.
        stop_strings: The text ends after the token that completes one of them.

    Raises:
        ValueError: The policy is none, or stop strings come without a tokenizer.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(f"policy must be a policy or None, got {type(policy).__name__}; lede.parse_policy reads names")
    stops = GenerateConfig(stop_strings=stop_strings).stops
    if stops and tokenizer is None:
        raise ValueError("stop_strings need the model's tokenizer; give tokenizer as well")
    return CustomGenerate(policy, tokenizer, streamer, stops)


def _check_arguments(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    odd = sorted(n for n, v in model_kwargs.items() if n not in _PASSED_OVER and v is not None and v is not False)
    if odd:
        raise ValueError(f"lede does not support {', '.join(odd)} in generate; leave it out")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"lede needs input_ids (row, token) of at least one token, got {tuple(input_ids.shape)}")
    for name in _CACHES:
        cache = model_kwargs.get(name)
        if cache is None:
            continue
        if type(cache).__name__ != "DynamicCache":
            raise ValueError(f"lede has a cache of its own and does not support a {type(cache).__name__}; leave it out")
        if cache.get_seq_length() or getattr(cache, "_is_user_defined", False):
            raise ValueError(f"lede has a cache of its own and can't go on from the {name} given; leave it out")


def _check_positions(positions: torch.Tensor | None, input_ids: torch.Tensor, padding: Sequence[int]) -> None:
    """Raise ValueError unless the positions given are those that the tokens have anyway, 0 at the first that counts."""
    if positions is None:
        return
    for row, n in zip(positions.expand(*input_ids.shape).tolist(), padding, strict=True):
        if row[n:] != list(range(len(row) - n)):
            raise ValueError("lede does not support position_ids of the caller's own in generate; leave them out")


def _request(
    model: EarlyExitModel,
    input_ids: torch.Tensor,
    padding: Sequence[int],
    config: GenerationConfig,
    longest: int | None,
    eos: frozenset[int],
    criteria: list[Any],
    seed: int | None,
) -> Request:
    rows = input_ids.tolist()
    length = longest if longest is not None else int(config.max_length)
    budget = max(1, length - input_ids.shape[1])
    needed = input_ids.shape[1] - min(padding) + budget
    if needed > model.max_positions:
        raise ValueError(
            f"prompt and budget need {needed} positions, the model has {model.max_positions}; shorten the prompt or "
            "lower max_new_tokens"
        )
    if seed is None and config.do_sample:
        seed = int(torch.randint(2**31 - 1, ()))
    wants = bool(config.return_dict_in_generate)
    return Request(
        prompts=tuple(tuple(row[n:]) for row, n in zip(rows, padding, strict=True)),
        budgets=(budget,) * len(rows),
        eos=eos,
        warp=Warp(1.0 if config.do_sample else 0.0),  # temperature and the rest are among the processors
        seed=seed or 0,
        criteria=tuple(criteria),
        padding=tuple(tuple(row[:n]) for row, n in zip(rows, padding, strict=True)),
        output_scores=wants and bool(config.output_scores),
        output_logits=wants and bool(config.output_logits),
    )


def _with_processors(request: Request, processors: LogitsProcessorList) -> Request:
    n_rows = len(request.prompts)
    if not processors:
        return request
    return replace(request, processors=tuple(processors_of_row(processors, row, n_rows) for row in range(n_rows)))


def _pad_token(config: GenerationConfig, eos: frozenset[int]) -> int | None:
    """The id that rows are filled up with: the config's own, else the first EOS id, as in transformers."""
    pad: Any = getattr(config, "_pad_token_tensor", None)
    if pad is not None:
        return int(pad)
    return min(eos) if eos else None


def _as_transformers(
    outputs: Sequence[GenerateOutput], input_ids: torch.Tensor, pad: int, config: GenerationConfig
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """The outputs as `generate` returns them."""
    new = [out.sequences[0, out.sequences.shape[1] - out.stats.tokens :] for out in outputs]
    filled = torch.nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=pad)
    sequences = torch.cat([input_ids, filled.to(input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,  # type: ignore[arg-type]  # typed for long ids
        scores=_by_step([out.scores for out in outputs]),  # type: ignore[arg-type]  # typed for floats
        logits=_by_step([out.logits for out in outputs]),  # type: ignore[arg-type]  # as above
    )


def _by_step(rows: Sequence[tuple[torch.Tensor, ...] | None]) -> tuple[torch.Tensor, ...] | None:
    """Entries `(row, vocabulary)` of every step; zeros where a row had ended."""
    kept = [row for row in rows if row is not None]
    if not kept:
        return None
    zeros = torch.zeros_like(kept[0][0])
    steps = range(max(len(row) for row in kept))
    return tuple(torch.cat([row[step] if step < len(row) else zeros for row in kept]) for step in steps)
