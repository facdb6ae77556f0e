"""The one measuring loop: every contender decodes every prompt, one after another, in an order drawn for each prompt.

A prompt is prefilled once; contenders on lede's engine start from clones of its cache, so the prefill costs each of
them the same. Whoever measures takes ratios prompt by prompt, so that a machine whose speed drifts does not decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from lede.generation import generate, prefill
from lede.models import EarlyExitModel
from lede.peak_memory import PeakMemory
from lede.policies import Policy
from lede.seeding import Purpose, numpy_stream
from lede.statistics import Round

if TYPE_CHECKING:
    from lede.decoding import Prefill


@dataclass(frozen=True)
class Call:
    """A prompt to be decoded."""

    ids: tuple[int, ...]
    """Token ids of the prompt."""
    prefilled: Prefill
    """The prompt after all layers."""
    prefill_seconds: float
    """Seconds that took."""
    seed: int = 0
    """Seed of the tokens drawn, where they are."""
    stream: int = 0
    """Stream of the seed; each prompt has its own."""


@dataclass(frozen=True)
class Decode:
    """What a contender made of a prompt."""

    token_ids: tuple[int, ...]
    """New tokens."""
    prefill_seconds: float
    """Seconds until the first new token."""
    decode_seconds: float
    """Seconds after it."""
    rounds: tuple[Round, ...] = ()
    """Rounds after the prefill; none for external contenders."""
    sections: dict[str, float] = field(default_factory=dict)
    """Seconds by `lede.statistics.SECTIONS`; none for external contenders."""
    head_reads: int = 0
    """Logits read below the last layer, one a position."""
    peak_memory: int | None = None
    """Most bytes in use, weights included; None where nothing tells."""
    error: str | None = None
    """Why it failed, figures being zero; None when it did not."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole call, prompt included."""
        return self.prefill_seconds + self.decode_seconds


def _nothing() -> None:
    """Nothing to forget."""


@dataclass(frozen=True)
class Contender:
    """Something that decodes a prompt."""

    name: str
    """What tables call it."""
    decode: Callable[[Call], Decode]
    """Decodes one prompt."""
    reset: Callable[[], None] = _nothing
    """Forgets what it learned while decoding."""


def lede_contender(
    model: EarlyExitModel, name: str, policy: Policy | None, max_new_tokens: int, temperature: float = 0.0
) -> Contender:
    """Decoding on lede's engine under a policy; None is plain decoding."""

    def decode(call: Call) -> Decode:
        synchronize(model)
        out = generate(
            model,
            input_ids=call.ids,
            prefilled=call.prefilled,
            policy=policy,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=call.seed,
            stream=call.stream,
        )
        spent = out.stats.seconds
        return Decode(
            token_ids=tuple(out.sequences[0, len(call.ids) :].tolist()),
            prefill_seconds=call.prefill_seconds,
            decode_seconds=spent.total - spent.prefill,
            rounds=out.rounds,
            sections={**asdict(spent), "prefill": call.prefill_seconds},
            head_reads=out.stats.head_reads,
        )

    return Contender(name, decode, _nothing if policy is None else policy.reset)


def prepare(model: EarlyExitModel, ids: Sequence[int], seed: int = 0, stream: int = 0) -> Call:
    """Prefill a prompt, and time it."""
    synchronize(model)
    start = time.perf_counter()
    prefilled = prefill(model, input_ids=ids)
    synchronize(model)
    return Call(tuple(ids), prefilled, time.perf_counter() - start, seed, stream)


def warm_up(model: EarlyExitModel, contenders: Sequence[Contender], ids: Sequence[int]) -> None:
    """Let everybody decode a prompt, uncounted, and forget it; who fails here will fail where it counts."""
    try:
        call = prepare(model, ids)
    except RuntimeError:  # such as too little memory; it is told where it counts
        return
    for _ in take_turns(model, contenders, call, 0):
        pass
    for contender in contenders:
        contender.reset()


def take_turns(
    model: EarlyExitModel, contenders: Sequence[Contender], call: Call, number: int
) -> Iterator[tuple[int, Contender, Decode]]:
    """Let everybody decode one prompt, in an order drawn from the seed of the call for every number.

    A fresh permutation a prompt: in an order that only rotates, each would always follow the same other one, and find
    the caches and the clock of the machine as that one left them.

    Yields:
        Turn, contender and what it did. An exception of a contender becomes its `Decode.error`.
    """
    memory = PeakMemory(model.device)
    order = numpy_stream(call.seed, Purpose.TURNS, number).permutation(len(contenders))
    for turn, contender in enumerate(contenders[place] for place in order):
        memory.start()
        try:
            done = contender.decode(call)
        except Exception as error:  # the contender's own: others go on
            yield turn, contender, Decode((), 0.0, 0.0, error=_message(error))
        else:
            yield turn, contender, replace(done, peak_memory=memory.read())


def synchronize(model: EarlyExitModel) -> None:
    """Wait for the device, where it works on its own."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _message(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
