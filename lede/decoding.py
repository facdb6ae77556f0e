"""The decoding loop: prefill, then rounds of draft and verification until the text ends.

Prefix plans: each layer sees each position once a round. Layers 1..exit_layer extend their cache while drafting, the
others while verifying, and the rewind makes all of them forget what was rejected. Plans with gaps: the layers before
the first gap likewise; what the others stored while drafting is forgotten before verification, which runs them in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lede.cache import KVCache
from lede.devices import numbers_on
from lede.draft import Draft, settle
from lede.drafting import Drafter
from lede.features import ConfidenceTrace, surprisal
from lede.history import History
from lede.lookup import LookupIndex
from lede.models import Block, EarlyExitModel
from lede.policies.base import Policy, RoundReport
from lede.statistics import Meter, Round
from lede.stopping import FinishReason, Stopping
from lede.text_probe import TextProbe
from lede.verification import Chooser


@dataclass(frozen=True)
class Prefill:
    """A prompt that went through all layers, to be decoded any number of times."""

    model: EarlyExitModel
    """The model that it went through."""
    ids: tuple[int, ...]
    """The prompt."""
    cache: KVCache
    """Its keys and values; decoding works on a clone."""
    logits: torch.Tensor
    """Raw logits at its last token, `(vocabulary,)`."""
    revision: int = 0
    """The model's at that time."""

    def check(self, model: EarlyExitModel, prompt: Sequence[int]) -> None:
        """Raise ValueError unless the prefill is of this prompt by this model."""
        if model is not self.model:
            raise ValueError(f"the prefill was made by {self.model}, not by this {model}; make one on it")
        model.refresh()
        if model.revision != self.revision:
            raise ValueError("the transformers model was changed since the prefill was made; make it again")
        if tuple(prompt) != self.ids:
            raise ValueError(
                f"the prefill is of another prompt ({len(self.ids)} tokens) than the one to decode ({len(prompt)} "
                "tokens); make one of this prompt"
            )


@torch.inference_mode()
def prefill(model: EarlyExitModel, ids: Sequence[int], capacity: int | None = None) -> Prefill:
    """Run a prompt through all layers.

    Args:
        model: The model.
        ids: The prompt.
        capacity: Tokens that the cache gets room for; as many as the prompt has when not given.
    """
    cache = model.new_cache(capacity or len(ids))
    block = model.block(cache, 0, len(ids))
    hidden = model.embed(numbers_on(model.device, [list(ids)]), block)
    logits = model.head(model.run_layers(hidden, 0, model.n_layers, block)[:, -1:])[0, -1]
    return Prefill(model, tuple(ids), cache, logits, model.revision)


RunLayers = Callable[[torch.Tensor, int, int, Block], torch.Tensor]
"""The model's `run_layers`, or one that watches it."""


class Decoder:
    """Decodes one sequence.

    Args:
        model: The model.
        policy: Who decides; None decodes plainly.
        chooser: How tokens are taken from logits.
        eos: Ids that end the text.
        meter: Where time, rounds and head reads are booked.
        stopping: What else ends the text.
    """

    drafter_class = Drafter

    def __init__(
        self,
        model: EarlyExitModel,
        policy: Policy | None,
        chooser: Chooser,
        eos: frozenset[int] = frozenset(),
        meter: Meter | None = None,
        stopping: Stopping | None = None,
    ) -> None:
        self.model = model
        self.policy = policy
        self.chooser = chooser
        self.eos = eos
        self.meter = meter or Meter()
        self.meter.n_layers = model.n_layers
        self.history = History()
        self.stopping = stopping
        self.stopped: FinishReason | None = None

    def prefill(self, prompt: Sequence[int]) -> Prefill:
        """Run a prompt through all layers, for `decode`."""
        return prefill(self.model, prompt)

    @torch.inference_mode()
    def decode(
        self, prompt: Sequence[int], max_new_tokens: int, prefilled: Prefill | None = None
    ) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of the prefill and then of every round, `max_new_tokens` at most in all.

        The sequence ends with an id of `eos`, where `stopping` says so, which then stands in `stopped`, or at the
        budget.

        Args:
            prompt: Token ids.
            max_new_tokens: Budget.
            prefilled: Of this prompt by this model, which then is not run again.

        Raises:
            ValueError: The prefill is of another prompt or model.
        """
        ids = list(prompt)
        budget = len(ids) + max_new_tokens
        self.meter.enter("prefill")
        if prefilled is None:
            start = prefill(self.model, ids, budget)
            self.cache, logits = start.cache, start.logits
        else:
            prefilled.check(self.model, ids)
            self.cache, logits = prefilled.cache.clone(budget), prefilled.logits
        _, first = self.chooser.verify(logits[None], (), (), ids)
        assert first is not None
        drafter = None
        if self.policy is not None:
            anchored = self.policy.uses_trace
            trace = ConfidenceTrace(surprisal(logits), self.policy.trace_window) if anchored else None
            lookup = self.policy.lookup
            index = None if lookup is None else LookupIndex(lookup, ids, self.policy.memory)
            self.history = History(trace, index)
            drafter = self.drafter_class(self.model, self.policy, self.chooser, self.eos, self.meter, self.history)
            self.meter.enter("policy")
            self.policy.begin(len(ids))
        probe = TextProbe(self.model, self.cache, ids, len(ids), self.meter)
        self.stopped = None
        if self.stopping is not None:
            self._kept(ids, (first,), len(prompt))
        ids.append(first)
        self.history.extend((first,))
        self.meter.enter("other")
        yield (first,)
        while self._goes_on(ids, budget):
            done, draft = self._round(ids, budget - len(ids), drafter)
            kept = done
            if self.stopping is not None:
                kept = done.cut(self._kept(ids, done.tokens, len(prompt)))
            self.meter.rounds.append(kept)
            ids.extend(kept.tokens)
            self.history.extend(kept.tokens)
            self.cache.rewind(len(ids) - 1)
            if drafter is not None and drafter.reports:
                self._report(done, draft, drafter)
            self.meter.enter("other")
            yield kept.tokens
            if drafter is not None and drafter.policy.searches and self._goes_on(ids, budget):
                self.meter.enter("search")
                drafter.policy.between_rounds(probe)
                self.meter.enter("other")

    def _goes_on(self, ids: list[int], budget: int) -> bool:
        """Whether another round follows."""
        return len(ids) < budget and ids[-1] not in self.eos and self.stopped is None

    def _kept(self, ids: list[int], block: tuple[int, ...], n_prompt: int) -> int:
        """How many tokens of a block after `ids` stay in the text."""
        assert self.stopping is not None
        self.meter.enter("other")
        n_kept, self.stopped = self.stopping.end(ids, block, n_prompt)
        if n_kept < len(block) and self.chooser.record is not None:
            self.chooser.record.cut(len(ids) - n_prompt + n_kept)
        return n_kept

    def _round(self, ids: list[int], remaining: int, drafter: Drafter | None) -> tuple[Round, Draft]:
        """One round after `ids`; commits at most `remaining` tokens."""
        if drafter is not None and drafter.shadow is not None:
            drafter.shadow.start()
        if drafter is not None and remaining > 1:
            self.meter.enter("policy")
            choice = drafter.choose_plan(remaining, len(ids))
            self.meter.enter("draft")
            draft = drafter.draft(ids, choice, remaining - 1, self.cache)
        else:
            self.meter.enter("verify")
            block = self.model.block(self.cache, len(ids) - 1, 1)
            draft = Draft(0, [self.model.embed(numbers_on(self.model.device, [[ids[-1]]]), block)])
        self.meter.enter("verify")
        run_layers = self.model.run_layers if drafter is None else drafter.run_layers
        return self._verify(ids, draft, run_layers), draft

    def _verify(self, ids: list[int], draft: Draft, run_layers: RunLayers) -> Round:
        """Run the remaining layers over the draft's states and accept; also a plain pass, where nothing was drafted."""
        if draft.gaps is not None:
            self.cache.rewind(len(ids) - 1, draft.exit_layer)
        hidden = draft.states[0] if len(draft.states) == 1 else torch.cat(draft.states, dim=1)
        block = self.model.block(self.cache, len(ids) - 1, hidden.shape[1])
        logits = self.model.head(run_layers(hidden, draft.exit_layer, self.model.n_layers, block))[0]
        return settle(draft, logits, self.chooser, ids, self.history)

    def _report(self, done: Round, draft: Draft, drafter: Drafter) -> None:
        """Tell the policy what a round came to."""
        shadow = None
        if drafter.shadow is not None:
            self.meter.enter("search")
            shadow = drafter.shadow.read(done.tokens)
            self.meter.head_reads += shadow.tokens.size
        self.meter.enter("policy")
        drafter.policy.verified(RoundReport(draft.plan, done.drafted, done.accepted, draft.capped, shadow))
