"""Settings of `generate`: lede's own, and which of transformers' GenerationConfig act, do nothing, or are refused."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import GenerationConfig

from lede.verification import Warp

SAMPLING_ONLY = ("top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that act on sampling alone."""
_UNDERSTOOD = frozenset(
    (
        *SAMPLING_ONLY,
        *("do_sample", "temperature", "max_new_tokens", "max_length", "max_time", "stop_strings", "eos_token_id"),
        *("min_new_tokens", "min_length", "output_scores", "output_logits", "return_dict_in_generate"),
        *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        *("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
        *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
        *("remove_invalid_values", "renormalize_logits", "watermarking_config"),
    )
)
_HARMLESS = frozenset(
    (
        *("pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version", "use_cache"),
        *("disable_compile", "length_penalty", "early_stopping"),  # the latter two act on beams alone
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),  # on assistants and lookup alone
    )
)
_PLAIN_CACHES = (None, "dynamic", "dynamic_full", "hybrid")
"""Values of cache_implementation that don't change what is stored; lede has a cache of its own."""
_MORE_NEUTRAL: dict[str, Any] = {"min_new_tokens": 0, "guidance_scale": 1, "low_memory": False, "penalty_alpha": 0}
_IGNORED_OF_THE_MODEL = (
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "min_length", "min_new_tokens"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("sequence_bias", "exponential_decay_length_penalty", "stop_strings", "max_time", "guidance_scale"),
    "watermarking_config",
)


@dataclass(frozen=True)
class GenerateConfig:
    """Settings of `generate` that are lede's own; `generate` takes those of transformers' GenerationConfig as well."""

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
    """Which stream of the seed draws; give each prompt of a set its own number, so that no two share their luck. Row i
    of a batch draws from stream + i."""
    eos_token_id: int | Sequence[int] | None = None
    """Ids that end the text; None for the model's own, an empty sequence for none."""
    stop_strings: str | Sequence[str] | None = None
    """The text ends after the token that completes one of them."""
    max_time: float | None = None
    """Seconds after which the text ends, at the end of a round."""
    output_scores: bool = False
    """Keep what each token was chosen by: the whole model's logits after processors and warping."""
    output_logits: bool = False
    """Keep the whole model's raw logits at each token."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "seed", "stream"):
            try:
                operator.index(getattr(self, name))
            except TypeError:
                raise ValueError(f"{name} must be a whole number, got {getattr(self, name)!r}") from None
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.seed < 0 or self.stream < 0:
            raise ValueError(f"seed and stream must be at least 0, got {self.seed} and {self.stream}")
        if self.max_time is not None and not (self.max_time > 0 and math.isfinite(self.max_time)):
            raise ValueError(f"max_time must be a positive number of seconds, got {self.max_time!r}")
        given: Any
        for given in self.stops:
            if not isinstance(given, str) or not given:
                raise ValueError(f"stop_strings must be texts of at least one character, got {given!r}")

    @property
    def warp(self) -> Warp:
        """How tokens are drawn."""
        return Warp(self.temperature, self.top_k, self.top_p)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, none or more."""
        if self.stop_strings is None:
            return ()
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings)


_OWN = tuple(field.name for field in fields(GenerateConfig))


def resolve(
    generation_config: GenerationConfig | None, settings: Mapping[str, Any]
) -> tuple[GenerateConfig, GenerationConfig]:
    """Settings of a call over those of a transformers GenerationConfig.

    Returns:
        lede's settings, and the GenerationConfig whose other fields act: processors and lengths. Its `max_length` is
        None unless that is what bounds the text.

    Raises:
        ValueError: A setting is unknown, out of range, not supported, or acts on sampling alone where nothing samples.
    """
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise ValueError(
            f"generation_config must be transformers' GenerationConfig, got {type(generation_config).__name__}"
        )
    config = GenerationConfig() if generation_config is None else copy.deepcopy(generation_config)
    unknown = sorted(name for name in settings if name not in _OWN and not _is_field(name))
    if unknown:
        raise ValueError(
            f"generate does not know {', '.join(unknown)}; its settings are {', '.join(_OWN)} and those of "
            "transformers' GenerationConfig"
        )
    for name, value in settings.items():
        if name not in ("seed", "stream"):
            setattr(config, name, value)
    refuse_unsupported(config)
    own = {name: value for name, value in settings.items() if name in _OWN and value is not None}
    taken = ("max_new_tokens", "eos_token_id", "stop_strings", "max_time", "output_scores", "output_logits")
    own |= {name: getattr(config, name) for name in taken if getattr(config, name, None) is not None}
    own |= _sampling(config, settings)
    resolved = GenerateConfig(**own)
    _ = resolved.warp  # complains about temperature, top_k and top_p before any work
    if resolved.warp.greedy:
        idle = [name for name in SAMPLING_ONLY if name in settings and name in acting(config)]
        if idle:
            raise ValueError(f"{', '.join(idle)} acts on sampling alone; give a temperature above 0 as well")
    if config.max_new_tokens is not None:
        config.max_length = None  # as in transformers, where max_new_tokens wins
    return resolved, config


def _sampling(config: GenerationConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Temperature, top-k and top-p; transformers' do_sample stands for a temperature of 1 and a top-k of 50."""
    asked = settings.get("temperature")
    if settings.get("do_sample") is False and asked:
        raise ValueError(f"do_sample=False decodes greedily, temperature={asked} samples; give one of the two")
    if not config.do_sample or asked == 0:
        if not asked:
            return {} if asked is None else {"temperature": asked}
        given = {"temperature": asked, "top_k": config.top_k, "top_p": config.top_p}
        return {name: value for name, value in given.items() if value is not None}
    return {
        "temperature": 1.0 if config.temperature is None else config.temperature,
        "top_k": settings.get("top_k", 50 if config.top_k is None else config.top_k),
        "top_p": config.top_p,
    }


def acting(config: GenerationConfig) -> dict[str, Any]:
    """What a transformers generation config sets, but for values that change nothing."""
    neutral = {**GenerationConfig._get_default_generation_params(), **_MORE_NEUTRAL, "max_length": None}
    given = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    return {n: v for n, v in given.items() if v is not None and v is not False and not _equal(v, neutral.get(n))}


def refuse_unsupported(config: GenerationConfig, strict: bool = True) -> None:
    """Raise ValueError, with names and values, when a config sets what lede does not do.

    Args:
        config: The config.
        strict: Whether that includes fields that transformers doesn't know either.
    """
    odd = {n: v for n, v in acting(config).items() if n not in _UNDERSTOOD and n not in _HARMLESS}
    if odd.get("cache_implementation") in _PLAIN_CACHES:
        odd.pop("cache_implementation", None)
    if not strict:
        odd = {name: value for name, value in odd.items() if _is_field(name)}
    if odd:
        named = ", ".join(f"{name}={value!r}" for name, value in sorted(odd.items()))
        raise ValueError(f"lede does not support {named}; leave it out")


def ignored_of_the_model(own: GenerationConfig, generation_config: GenerationConfig | None, settings: Any) -> list[str]:
    """What a model's own generation config sets and `lede.generate` leaves out, unless the call decides it."""
    decided = {name for name, value in vars(generation_config or GenerationConfig()).items() if value is not None}
    given = acting(own)
    return [f"{n}={given[n]}" for n in _IGNORED_OF_THE_MODEL if n in given and n not in decided and n not in settings]


def _is_field(name: str) -> bool:
    """Whether transformers' GenerationConfig has a field of this name."""
    return not name.startswith("_") and name in vars(GenerationConfig())


def _equal(value: Any, other: Any) -> bool:
    return isinstance(value, (int, float, str)) and isinstance(other, (int, float, str)) and value == other
