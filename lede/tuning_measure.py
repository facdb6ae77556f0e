"""Decoding validation prompts by many settings on the engine, one prefill a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lede.interleaving import Call, Contender, Decode, lede_contender, prepare, take_turns, warm_up
from lede.rivals import is_rival, parse_rival, rival_contender

if TYPE_CHECKING:
    from lede.models import EarlyExitModel
    from lede.policies import Policy


@dataclass(frozen=True)
class Ready:
    """A setting that can be measured."""

    text: str
    """As a command line gives it."""
    policy: Policy | None
    """The policy, with what it has learned so far; None for plain decoding and for external contenders."""


Measure = Callable[[Sequence[Ready], int, int], Sequence[Decode]]
"""Decodes a prompt (its place among the validation prompts) by all of these in an order drawn for the last
argument; what each did, in the order given."""


class EngineMeasure:
    """Measures settings in turns.

    Args:
        model: The model.
        validation: Token ids of each prompt.
        max_new_tokens: Budget of new tokens a prompt.
        temperature: 0 decodes greedily.
        seed: Of the tokens drawn; every prompt has its own stream.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        validation: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.model, self.validation = model, validation
        self.max_new_tokens, self.temperature, self.seed = max_new_tokens, temperature, seed
        self._warm = False
        self._call: tuple[int, Call] | None = None  # of the last prompt: the next group often has the same

    def __call__(self, ready: Sequence[Ready], prompt: int, turn: int) -> list[Decode]:
        """What each of these did on a prompt, in the order given.

        Raises:
            ValueError: A setting is none of this model's.
        """
        contenders = [self._contender(str(place), each) for place, each in enumerate(ready)]
        if not self._warm:
            warm_up(self.model, [self._contender("warm-up", ready[0])], self.validation[prompt])
            self._warm = True
        if self._call is None or self._call[0] != prompt:
            self._call = None  # one cache at a time
            try:
                self._call = prompt, prepare(self.model, self.validation[prompt], self.seed, prompt)
            except RuntimeError as error:  # such as too little memory for this prompt
                message = " ".join(f"prefill: {type(error).__name__}: {error}".split())
                return [Decode((), 0.0, 0.0, error=message) for _ in ready]
        done = {c.name: decode for _, c, decode in take_turns(self.model, contenders, self._call[1], turn)}
        return [done[contender.name] for contender in contenders]

    def _contender(self, name: str, ready: Ready) -> Contender:
        if is_rival(ready.text):
            rival = parse_rival(ready.text)
            return rival_contender(self.model, rival, self.max_new_tokens, self.temperature, name)
        return lede_contender(self.model, name, ready.policy, self.max_new_tokens, self.temperature)
