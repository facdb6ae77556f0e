"""External contenders: decoding methods of transformers, run as they are on the same model object.

`transformers` is its plain `generate`; `assistant-early-exit` drafts with the first layers of the model
(`assistant_early_exit`); `prompt-lookup` drafts by n-gram matches in the text so far. Their calls write the first token
too, so seconds after it are those of the whole call less those of a call for one token, the median of three made just
before. What a call costs whatever its length is thus booked with the prompt. A call for one token drafts nothing: the
pass of the prompt through the layers that draft (`assistant_early_exit`) is timed beside it, and booked with the prompt
too. The difference keeps its sign: that of a text of a token or two may be below zero, and sums would be too high
without it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from lede.bench_runs import PROMPT_LOOKUP, TRANSFORMERS
from lede.interleaving import Call, Contender, Decode, synchronize
from lede.seeding import Purpose, torch_stream

if TYPE_CHECKING:
    from lede.models import EarlyExitModel

EARLY_EXIT = "assistant-early-exit"

RIVALS: dict[str, tuple[str, str] | None] = {
    TRANSFORMERS: None,
    EARLY_EXIT: ("layer", "assistant_early_exit"),
    PROMPT_LOOKUP: ("tokens", "prompt_lookup_num_tokens"),
}
"""External contenders: the setting that each takes, and the argument of `generate` that it becomes."""

LOOKUP_TOKENS = 10
"""Tokens that prompt lookup proposes when not told how many, which is transformers' own choice; benchmarks tune it."""

_FIRST_CALLS = 3
"""Calls for the first token; their median is what the first token takes."""


@dataclass(frozen=True)
class Rival:
    """An external contender, as a command line names it."""

    name: str
    """Key of `RIVALS`."""
    value: int | None = None
    """Its setting; None where it has none, or is yet to be chosen."""

    @property
    def text(self) -> str:
        """As the command line names it."""
        key = RIVALS[self.name]
        return self.name if key is None or self.value is None else f"{self.name}:{key[0]}={self.value}"

    @property
    def arguments(self) -> dict[str, int]:
        """What `generate` is asked for.

        Raises:
            ValueError: The exit layer is yet to be chosen.
        """
        key = RIVALS[self.name]
        if key is None:
            return {}
        if self.value is None:
            raise ValueError(f"{self.name} needs its {key[0]}, as in {self.name}:{key[0]}=4")
        return {key[1]: self.value}

    def check_model(self, model: EarlyExitModel) -> None:
        """Raise ValueError when the model has no such exit layer; transformers would accept any number."""
        if self.name == EARLY_EXIT and self.value is not None:
            model.check_exit_layer(self.value)


def is_rival(text: str) -> bool:
    """Whether a policy of a command line is an external contender."""
    return text.partition(":")[0] in RIVALS


def parse_rival(text: str) -> Rival:
    """The external contender of a text: `NAME` or `NAME:key=value`.

    Raises:
        ValueError: There is none of that name, or its setting is not one.
    """
    name, _, setting = text.partition(":")
    if name not in RIVALS:
        raise ValueError(f"'{text}' is no external contender; they are {', '.join(RIVALS)}")
    key = RIVALS[name]
    if not setting:
        return Rival(name, LOOKUP_TOKENS if name == PROMPT_LOOKUP else None)
    if key is None:
        raise ValueError(f"{name} has no settings, got '{setting}'")
    given, _, value = (part.strip() for part in setting.partition("="))
    if given != key[0] or not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{name} takes {key[0]}=N with N of at least 1, got '{setting}'")
    return Rival(name, int(value))


def rival_contender(
    model: EarlyExitModel, rival: Rival, max_new_tokens: int, temperature: float = 0.0, name: str | None = None
) -> Contender:
    """The contender that decodes by transformers' `generate`, greedily or at a temperature.

    It has the same end-of-sequence ids as lede's engine, batch size 1, and none of the penalties or other settings of
    the model's own generation config.

    Raises:
        ValueError: The exit layer is yet to be chosen, or is none of the model's.
    """
    rival.check_model(model)
    arguments: dict[str, Any] = {**rival.arguments, "do_sample": temperature > 0}
    if temperature:
        arguments |= {"temperature": temperature, "top_k": 0}

    def timed(call: Call, n_tokens: int) -> tuple[tuple[int, ...], float]:
        ids = torch.tensor([call.ids], device=model.device)
        with _own_settings(model), _seeded(model, call):
            synchronize(model)
            start = time.perf_counter()
            out = model.hf_model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_tokens, **arguments
            )
            new = tuple(out[0, len(call.ids) :].tolist())
            return new, time.perf_counter() - start

    def draft_prefill(call: Call) -> float:
        if rival.name != EARLY_EXIT or rival.value is None or max_new_tokens == 1:
            return 0.0
        return statistics.median(_prefill_seconds(model, call.ids, rival.value) for _ in range(_FIRST_CALLS))

    def decode(call: Call) -> Decode:
        first = statistics.median(timed(call, 1)[1] for _ in range(_FIRST_CALLS))
        new, whole = timed(call, max_new_tokens)
        first += draft_prefill(call)
        return Decode(new, first, whole - first)

    return Contender(name or rival.text, decode)


def plain_text(model: EarlyExitModel, ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """New tokens of transformers' own greedy `generate`, `(token,)`: what everybody's text is compared with.

    It ends where lede's engine does, and none of the model's own generation config acts.
    """
    tensor = torch.tensor([list(ids)], device=model.device)
    with _own_settings(model):
        out = model.hf_model.generate(
            tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=max_new_tokens, do_sample=False
        )
    return [int(token) for token in out[0, len(ids) :]]


@torch.no_grad()
def _prefill_seconds(model: EarlyExitModel, ids: tuple[int, ...], layer: int) -> float:
    """Seconds of a pass of the prompt through the first layers and the head, as `assistant_early_exit` makes it."""
    hf_model: Any = model.hf_model
    stack: Any = getattr(hf_model, model.family.decoder)
    tensor = torch.tensor([ids], device=model.device)
    with _own_settings(model):
        for part in (hf_model, stack):
            part.config.num_hidden_layers = layer
        synchronize(model)
        start = time.perf_counter()
        hf_model(tensor, attention_mask=torch.ones_like(tensor), use_cache=True, logits_to_keep=1)
        synchronize(model)
        return time.perf_counter() - start


@contextmanager
def _own_settings(model: EarlyExitModel) -> Iterator[None]:
    """Give the model a bare generation config for a call, quietly, and put back what the call may leave changed.

    `assistant_early_exit` lowers `config.num_hidden_layers` of the live model while it drafts, and leaves it so when
    the draft fails.
    """
    hf_model: Any = model.hf_model
    stack: Any = getattr(hf_model, model.family.decoder)
    configs = {id(part.config): part.config for part in (hf_model, stack)}.values()
    depths = [(config, config.num_hidden_layers) for config in configs]
    before = hf_model.generation_config
    # prompt lookup of transformers 5.0 needs an end of sequence: where there is none, an id that no token has
    eos = list(model.eos_token_ids) or [model.vocab_size]
    hf_model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos[0] % model.vocab_size)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of arguments that it passes to itself
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hf_model.generation_config = before
        for config, depth in depths:
            config.num_hidden_layers = depth


@contextmanager
def _seeded(model: EarlyExitModel, call: Call) -> Iterator[None]:
    """Draw from the prompt's own stream, and leave torch's global generators as they were."""
    device = model.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(torch_stream(call.seed, Purpose.TOKENS, call.stream).initial_seed())
        yield
