"""The decoding loop: prefill, then rounds of draft and verification until the text ends.

Prefix plans only: each layer sees each position once a round. Layers 1..exit_layer extend their cache while drafting,
the others while verifying, and the rewind makes all of them forget what was rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lede.drafting import Draft, Drafter
from lede.features import ConfidenceTrace, surprisal
from lede.history import History
from lede.models import EarlyExitModel
from lede.policies.base import Policy
from lede.statistics import Meter, Round
from lede.verification import Chooser


class Decoder:
    """Decodes one sequence.

    Args:
        model: The model.
        policy: Who decides; None decodes plainly.
        chooser: How tokens are taken from logits.
        eos: Ids that end the text.
        meter: Where time, rounds and head reads are booked.
    """

    drafter_class = Drafter

    def __init__(
        self,
        model: EarlyExitModel,
        policy: Policy | None,
        chooser: Chooser,
        eos: frozenset[int] = frozenset(),
        meter: Meter | None = None,
    ) -> None:
        self.model = model
        self.policy = policy
        self.chooser = chooser
        self.eos = eos
        self.meter = meter or Meter()
        self.history = History()

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of the prefill and then of every round, `max_new_tokens` at most in all.

        The sequence ends with an id of `eos`, or at the budget.
        """
        ids = list(prompt)
        budget = len(ids) + max_new_tokens
        self.cache = self.model.new_cache(budget)
        self.meter.enter("prefill")
        block = self.model.block(self.cache, 0, len(ids))
        hidden = self.model.embed(torch.tensor([ids], device=self.model.device), block)
        logits = self.model.head(self.model.run_layers(hidden, 0, self.model.n_layers, block)[:, -1:])[0, -1]
        first, _ = self.chooser.choose(logits, ids)
        drafter = None
        if self.policy is not None:
            anchored = self.policy.uses_trace
            self.history = History(ConfidenceTrace(surprisal(logits), self.policy.trace_window) if anchored else None)
            drafter = self.drafter_class(self.model, self.policy, self.chooser, self.eos, self.meter, self.history)
        ids.append(first)
        self.meter.enter("other")
        yield (first,)
        while len(ids) < budget and ids[-1] not in self.eos:
            done = self._round(ids, budget - len(ids), drafter)
            self.meter.rounds.append(done)
            ids.extend(done.tokens)
            self.cache.rewind(len(ids) - 1)
            self.meter.enter("other")
            yield done.tokens

    def _round(self, ids: list[int], remaining: int, drafter: Drafter | None) -> Round:
        """One round after `ids`; commits at most `remaining` tokens."""
        cap = 0 if drafter is None else min(drafter.policy.config.max_draft, remaining - 1)
        if drafter is not None and cap > 0:
            self.meter.enter("policy")
            choice = drafter.choose_plan(remaining, len(ids))
            self.meter.enter("draft")
            draft = drafter.draft(ids, choice, cap, self.cache)
        else:
            self.meter.enter("verify")
            block = self.model.block(self.cache, len(ids) - 1, 1)
            draft = Draft(0, [self.model.embed(torch.tensor([[ids[-1]]], device=self.model.device), block)])
        self.meter.enter("verify")
        return self._verify(ids, draft)

    def _verify(self, ids: list[int], draft: Draft) -> Round:
        """Run the remaining layers over the draft's states and accept; also a plain pass, where nothing was drafted."""
        hidden = draft.states[0] if len(draft.states) == 1 else torch.cat(draft.states, dim=1)
        block = self.model.block(self.cache, len(ids) - 1, hidden.shape[1])
        logits = self.model.head(self.model.run_layers(hidden, draft.exit_layer, self.model.n_layers, block))[0]
        accepted, following = self.chooser.verify(logits, draft.tokens, draft.distributions, ids)
        tokens = [*draft.tokens[:accepted], *([] if following is None else [following])]
        drafted, trace = len(draft.tokens), self.history.trace
        if trace is not None:
            if accepted < drafted:
                trace.drop(drafted - accepted - 1)  # the first rejected position was left at its exit layer: it stays
            elif following is not None:
                trace.push(surprisal(logits[accepted]))
        self.history.verified(drafted, accepted)
        return Round(tuple(tokens), drafted, accepted, draft.exit_layer if drafted else None)
