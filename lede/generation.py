"""`generate`: text from a model under a policy, exactly the plain model's."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessorList

from lede import decoding
from lede.checkpoint import check_fingerprint
from lede.decoding import Decoder, Prefill
from lede.models import EarlyExitModel
from lede.policies.base import Policy
from lede.prompts import check_unicode
from lede.seeding import Purpose, torch_stream
from lede.statistics import DecodingStats, Meter, Round
from lede.verification import Chooser, TorchSource, Warp

_UNDERSTOOD = {"do_sample", "temperature", "top_k", "top_p", "max_new_tokens", "eos_token_id"}
_HARMLESS = {
    "pad_token_id",
    "bos_token_id",
    "transformers_version",
    "use_cache",
    "_from_model_config",
    "cache_implementation",
}
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "typical_p": 1.0,
}
"""Values that change nothing, which checkpoints often spell out; False is one for every switch."""
_PENALTIES = (
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "min_length",
    "min_new_tokens",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "sequence_bias",
    "exponential_decay_length_penalty",
)


class Streamer(Protocol):
    """What transformers calls a streamer."""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt's ids first, then the ids of each round, `(token,)`."""

    def end(self) -> None:
        """The text is complete."""


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns."""

    text: str | None
    """The new tokens decoded, special tokens left out; None without a tokenizer."""
    sequences: torch.Tensor
    """Prompt and new tokens, `(1, prompt + new)`, as transformers returns them."""
    stats: DecodingStats
    """Counts and times."""
    rounds: tuple[Round, ...]
    """Every round after the prefill."""
    finish_reason: Literal["eos", "length"]
    """Whether an end-of-sequence id was drawn or the budget ended it."""


@dataclass(frozen=True)
class GenerateConfig:
    """Settings of `generate`."""

    max_new_tokens: int = 128
    """Budget, in tokens."""
    temperature: float = 0.0
    """0 decodes greedily; above 0 samples."""
    top_k: int | None = None
    """Sample among the k likeliest tokens."""
    top_p: float | None = None
    """Sample among the likeliest tokens that reach this probability."""
    seed: int = 0
    """Seed of the tokens drawn."""
    stream: int = 0
    """Which stream of the seed draws; give each prompt of a set its own number, so that no two share their luck."""
    eos_token_id: int | Sequence[int] | None = None
    """Ids that end the text; None for the model's own, an empty sequence for none."""

    def __post_init__(self) -> None:
        try:
            operator.index(self.max_new_tokens)
        except TypeError:
            raise ValueError(f"max_new_tokens must be a whole number, got {self.max_new_tokens!r}") from None
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.seed < 0 or self.stream < 0:
            raise ValueError(f"seed and stream must be at least 0, got {self.seed} and {self.stream}")

    @property
    def warp(self) -> Warp:
        """How tokens are drawn."""
        return Warp(self.temperature, self.top_k, self.top_p)


def generate(
    model: EarlyExitModel,
    prompt: str | None = None,
    *,
    input_ids: torch.Tensor | Sequence[int] | None = None,
    policy: Policy | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    streamer: Streamer | None = None,
    prefilled: Prefill | None = None,
    **settings: Any,
) -> GenerateOutput:
    """Decode one prompt; whatever the policy does, the text is the plain model's.

    Greedy unless `temperature` is above 0 or a `generation_config` that samples is given. Of the model's own generation
    config only the EOS ids are used.

    Args:
        model: From `lede.load_model`.
        prompt: Text, encoded by the model's tokenizer as the tokenizer is configured (BOS included where it adds one).
        input_ids: Token ids `(1, prompt)` or `(prompt,)` instead of text.
        policy: Who decides when to exit; None decodes plainly on the same engine. What it keeps between calls (the
            luck of a random policy) it keeps until its `reset()`.
        generation_config: transformers settings; max_new_tokens, eos_token_id, do_sample, temperature, top_k and top_p
            are understood, any other that would change the text is refused by name.
        logits_processor: transformers logits processors, applied to draft and whole model alike.
        streamer: Receives the prompt and then the tokens of each round, e.g. transformers' TextStreamer.
        prefilled: From `prefill` on this model and prompt, which then doesn't run again; it stays as it is.
        **settings: Fields of `GenerateConfig`: max_new_tokens, temperature, top_k, top_p, seed, stream,
            eos_token_id.

    Raises:
        ValueError: An argument is unusable, the policy belongs to another model, the prefill is of another model or
            prompt, or prompt and budget don't fit into the model's positions.
    """
    _check_model(model)
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(f"policy must be a policy or None, got {type(policy).__name__}; lede.parse_policy reads names")
    config = _merge(generation_config, settings)
    ids = _prompt_ids(model, prompt, input_ids)
    if len(ids) + config.max_new_tokens > model.max_positions:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and the budget is {config.max_new_tokens}, together more than the "
            f"model's {model.max_positions} positions; shorten the prompt or lower max_new_tokens"
        )
    _warn_ignored(model)
    if policy is not None:
        check_fingerprint(policy, model)
        policy.check_model(model)
        policy.check_temperature(config.temperature)
    eos = _eos(model, config)
    source = TorchSource(torch_stream(config.seed, Purpose.TOKENS, config.stream, device=model.device))
    meter = Meter()
    decoder = Decoder(model, policy, Chooser(config.warp, source, logits_processor), eos, meter)
    if prefilled is not None:
        if not isinstance(prefilled, Prefill):
            raise ValueError(f"prefilled must come from lede.generation.prefill, got {type(prefilled).__name__}")
        prefilled.check(model, ids)
    if streamer is not None:
        streamer.put(torch.tensor(ids))
    new: list[int] = []
    for tokens in decoder.decode(ids, config.max_new_tokens, prefilled):
        new.extend(tokens)
        if streamer is not None:
            streamer.put(torch.tensor(tokens))
    stats = meter.stats()  # what follows is not decoding
    if streamer is not None:
        streamer.end()
    text = None if model.tokenizer is None else str(model.tokenizer.decode(new, skip_special_tokens=True))
    return GenerateOutput(
        text=text,
        sequences=torch.tensor([ids + new], device=model.device),
        stats=stats,
        rounds=tuple(meter.rounds),
        finish_reason="eos" if new[-1] in eos else "length",
    )


def prefill(model: EarlyExitModel, input_ids: torch.Tensor | Sequence[int]) -> Prefill:
    """Run a prompt through all layers once, for any number of `generate(..., prefilled=...)` of the same prompt.

    Args:
        model: From `lede.load_model`.
        input_ids: Token ids `(1, prompt)` or `(prompt,)`.

    Raises:
        ValueError: The model is none of `lede.load_model`, or they are no prompt of it.
    """
    _check_model(model)
    ids = _prompt_ids(model, None, input_ids)
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


def _merge(generation_config: GenerationConfig | None, settings: dict[str, Any]) -> GenerateConfig:
    """Settings of the call over those of a transformers GenerationConfig."""
    unknown = sorted(set(settings) - set(GenerateConfig.__dataclass_fields__))
    if unknown:
        known = ", ".join(GenerateConfig.__dataclass_fields__)
        raise ValueError(f"generate does not know {', '.join(unknown)}; its settings are {known}")
    merged: dict[str, Any] = {}
    if generation_config is not None:
        odd = sorted(set(_acting(generation_config)) - _UNDERSTOOD - _HARMLESS)
        if "max_length" in odd and (generation_config.max_new_tokens or "max_new_tokens" in settings):
            odd.remove("max_length")  # transformers too prefers max_new_tokens
        if odd:
            raise ValueError(f"generation_config sets {', '.join(odd)}, which lede does not support; leave it out")
        if generation_config.do_sample:
            merged["temperature"] = 1.0 if generation_config.temperature is None else generation_config.temperature
            merged["top_k"] = 50 if generation_config.top_k is None else generation_config.top_k
            merged["top_p"] = generation_config.top_p
        if generation_config.max_new_tokens is not None:
            merged["max_new_tokens"] = generation_config.max_new_tokens
        if generation_config.eos_token_id is not None:
            merged["eos_token_id"] = generation_config.eos_token_id
    merged.update(settings)
    config = GenerateConfig(**merged)
    _ = config.warp  # complains about temperature, top_k and top_p before any work
    return config


def _acting(config: GenerationConfig) -> dict[str, Any]:
    """What a transformers generation config sets, but for values that change nothing."""
    given = config.to_diff_dict().items()
    return {name: v for name, v in given if v is not None and v is not False and v != _NEUTRAL.get(name)}


def _prompt_ids(model: EarlyExitModel, prompt: str | None, input_ids: torch.Tensor | Sequence[int] | None) -> list[int]:
    if (prompt is None) == (input_ids is None):
        raise ValueError("give either a prompt or input_ids")
    if prompt is not None:
        if model.tokenizer is None:
            raise ValueError("this model has no tokenizer; give input_ids instead of a prompt")
        if not isinstance(prompt, str):
            raise ValueError(f"the prompt must be text, got {type(prompt).__name__}; call generate once a prompt")
        check_unicode(prompt)
        ids = list(model.tokenizer(prompt)["input_ids"])
    else:
        try:
            tensor = torch.as_tensor(input_ids)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"input_ids must be token ids, (1, prompt) or (prompt,), got {type(input_ids).__name__} that is none"
            ) from None
        if tensor.dim() == 2 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.dim() != 1:
            raise ValueError(f"input_ids must be one sequence, (1, prompt) or (prompt,), got {tuple(tensor.shape)}")
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            if tensor.numel():
                raise ValueError(f"input_ids must be whole numbers, got {tensor.dtype}")
            tensor = tensor.long()
        ids = tensor.tolist()
    if not ids:
        raise ValueError("the prompt is empty; it needs at least one token")
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        raise ValueError(f"input_ids reach from {min(ids)} to {max(ids)}, the vocabulary has {model.vocab_size} ids")
    return ids


def _eos(model: EarlyExitModel, config: GenerateConfig) -> frozenset[int]:
    if config.eos_token_id is None:
        return frozenset(model.eos_token_ids)
    given: Any = config.eos_token_id
    return frozenset(int(i) for i in ([given] if isinstance(given, Integral) else given))


def _warn_ignored(model: EarlyExitModel) -> None:
    own = getattr(model.hf_model, "generation_config", None)
    if own is None:
        return
    given = _acting(own)
    ignored = [f"{name}={given[name]}" for name in _PENALTIES if name in given]
    if ignored:
        warnings.warn(
            f"the model's generation config sets {', '.join(ignored)}, which lede ignores; pass a generation_config to "
            "decide yourself",
            stacklevel=3,
        )
