"""Logits processors and stopping criteria of a GenerationConfig, made by transformers itself.

This is the one place that leans on private parts of transformers: `_get_logits_processor` and `_get_stopping_criteria`
of its generation mixin, and the attributes of a few processors that know their rows by number.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process

from lede.generation_settings import SAMPLING_ONLY
from lede.verification import Warp

_NOT_FUNCTIONS = (
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "AlternatingCodebooksLogitsProcessor",
    "WhisperNoSpeechDetection",
    "DiaEOSDelayPatternLogitsProcessor",
)
"""Processors that run the model themselves or remember earlier steps: a rejected draft would have told them lies."""


def prepared(
    config: GenerationConfig, n_prompt: int, budget: int, eos: Sequence[int], device: Any, warp: Warp | None = None
) -> GenerationConfig:
    """A copy of a config as transformers' `generate` prepares it before it makes processors.

    Args:
        config: Settings; None means transformers' default, as there.
        n_prompt: Tokens of the prompt.
        budget: Most new tokens.
        eos: Ids that end the text.
        device: Where the ids go.
        warp: Temperature, top-k and top-p; None leaves out all that acts on sampling.

    Raises:
        ValueError: Settings contradict one another.
    """
    ready = copy.copy(config)
    ready.do_sample = warp is not None
    if warp is None:
        for name in ("temperature", *SAMPLING_ONLY):
            setattr(ready, name, None)
    else:
        ready.temperature, ready.top_k = float(warp.temperature), int(warp.top_k or 0)
        ready.top_p = 1.0 if warp.top_p is None else warp.top_p
    for name, default in GenerationConfig._get_default_generation_params().items():
        if getattr(ready, name, None) is None:
            setattr(ready, name, default)
    ready.return_dict_in_generate = True  # else it says that scores are ignored
    ready.validate()
    ready.max_length = n_prompt + budget
    if ready.min_new_tokens:
        ready.min_length = ready.min_new_tokens + n_prompt
    ready._eos_token_tensor = torch.tensor(sorted(eos), device=device) if eos else None
    if ready.exponential_decay_length_penalty is not None and not eos:
        raise ValueError("exponential_decay_length_penalty makes EOS likelier, but there is none; set eos_token_id")
    return ready


def make_processors(
    hf_model: Any, config: GenerationConfig, ids: Sequence[int], own: LogitsProcessorList | None, device: Any
) -> LogitsProcessorList:
    """Processors of a prepared config for one prompt, with the caller's own in their place among them.

    Raises:
        ValueError: A value is out of range, or a processor can't be used with drafts.
    """
    processors: LogitsProcessorList = hf_model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(ids),
        encoder_input_ids=torch.tensor([list(ids)], device=device),
        logits_processor=own if own is not None else LogitsProcessorList(),
        device=device,
        model_kwargs={},
    )
    check_processors(processors)
    return processors


def make_criteria(
    hf_model: Any, config: GenerationConfig, own: StoppingCriteriaList | None, tokenizer: Any
) -> StoppingCriteriaList:
    """Stopping criteria of a prepared config, with the caller's own; time is counted from here.

    Raises:
        ValueError: There are stop strings but no tokenizer, or no token of it can complete one of them.
    """
    if config.stop_strings and tokenizer is None:
        raise ValueError("stop_strings need the model's tokenizer; load the model with one")
    criteria: StoppingCriteriaList = hf_model._get_stopping_criteria(
        generation_config=config,
        stopping_criteria=own if own is not None else StoppingCriteriaList(),
        tokenizer=tokenizer,
    )
    return criteria


def check_processors(processors: Sequence[Any]) -> None:
    """Raise ValueError, with the name, when a processor is no function of the ids and the logits."""
    for processor in processors:
        name = type(processor).__name__
        if name in _NOT_FUNCTIONS:
            raise ValueError(
                f"the logits processor {name} keeps state or runs the model; lede applies processors to drafts too, so "
                "they must be functions of the ids and the logits; leave it out"
            )


def processors_of_row(processors: LogitsProcessorList, row: int, n_rows: int) -> LogitsProcessorList:
    """Processors made for a padded batch as one row of it needs them, which is then processed alone."""
    if n_rows == 1:
        return processors
    return LogitsProcessorList(_of_row(processor, row, n_rows) for processor in processors)


def _of_row(processor: Any, row: int, n_rows: int) -> Any:
    one = copy.copy(processor)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(processor, logits_process.RepetitionPenaltyLogitsProcessor) and isinstance(ignored, torch.Tensor):
        one.prompt_ignore_length = ignored[row : row + 1]
    elif isinstance(processor, logits_process.EncoderRepetitionPenaltyLogitsProcessor):
        one.encoder_input_ids = processor.encoder_input_ids[row : row + 1]
    elif isinstance(processor, logits_process.EncoderNoRepeatNGramLogitsProcessor):
        one.batch_size, one.generated_ngrams = 1, processor.generated_ngrams[row : row + 1]
    elif isinstance(processor, logits_process.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        one._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    else:
        return processor
    return one
