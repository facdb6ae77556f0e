"""Drafting: the scan that picks the exit layer and the burst that drafts from it, or a burst through a stack with gaps.

Source: LEDE (arXiv 2606.03113), section 3.3 (dual control). Departs from the paper: the pre-scan stage is ours, and so
is what happens to the position that made the policy stop: it is already at the exit layer, so it joins verification and
yields the bonus token.

With gaps (SWIFT, arXiv 2410.06916; ConfLayers, arXiv 2604.14612) the stop depends on what the last drafted position
said, whose token stays in the draft. So the next position is asked about before it goes beyond the layers in front of
the first gap, whose states verification needs anyway.
"""

from __future__ import annotations

import torch

from lede.cache import KVCache
from lede.decider import Decider
from lede.draft import UNKNOWN, Draft, HeadRead
from lede.history import History
from lede.models import EarlyExitModel
from lede.observer import Observer
from lede.policies.base import ExitAt, Plan, Policy, PreScan, SkipSublayers
from lede.shadow import ShadowReader
from lede.statistics import Meter
from lede.verification import Chooser

__all__ = ["Draft", "Drafter"]


class Drafter(Decider):
    """Runs the stages of a round up to verification, for one text.

    Args:
        model: The model, whose cache is extended.
        policy: Who decides.
        chooser: How a draft token is taken from logits.
        eos: Ids that end the text.
        meter: Where time and head reads are booked.
        history: Of the text.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        policy: Policy,
        chooser: Chooser,
        eos: frozenset[int],
        meter: Meter,
        history: History,
    ) -> None:
        features = policy.features
        observer = None if features is None else Observer(features, model.n_layers, model.vocab_size)
        super().__init__(policy, chooser, meter, history, observer)
        self.model = model
        self.eos = eos
        self.candidates = policy.candidates_for(model.n_layers)
        self._second_reads = features is not None and features.draft_agreement
        self.reports = type(policy).verified is not Policy.verified  # else nobody looks at them
        self._device = model.device
        shadow_layers = policy.shadow_layers if self.reports else ()
        self.shadow = ShadowReader(model, shadow_layers) if shadow_layers else None
        self.run_layers = model.run_layers if self.shadow is None else self.shadow.run_layers

    def draft(self, ids: list[int], choice: Plan, cap: int, cache: KVCache) -> Draft:
        """Draft at most `cap` tokens after `ids`, whose last token is not in the cache yet.

        Returns:
            The draft; without tokens, and with the state as far as it got, when no candidate exits.
        """
        self.start()
        if isinstance(choice, SkipSublayers):
            return self._burst_with_gaps(choice, ids, cap, cache)
        block = self.model.block(cache, len(ids) - 1, 1)
        hidden = self.model.embed(self._ids(ids[-1]), block)
        depth = 0
        if isinstance(choice, ExitAt):
            self.model.check_exit_layer(choice.exit_layer)
            hidden = self.run_layers(hidden, 0, choice.exit_layer, block)
            draft = Draft(choice.exit_layer, [hidden])
            self.add(draft, self._read(hidden), ids)
            return self._burst(draft, ids, cap, cache)
        if choice is PreScan.SCAN:
            token_before = UNKNOWN
            for candidate in self.candidates:
                self.meter.enter("draft")
                hidden = self.run_layers(hidden, depth, candidate, block)
                depth = candidate
                self.meter.enter("inspect")
                read = None if self.observer is None else self._read(hidden)
                if self.exits(candidate, read, token_before):
                    draft = Draft(candidate, [hidden])
                    self.add(draft, read or self._read(hidden), ids)
                    return self._burst(draft, ids, cap, cache)
                token_before = UNKNOWN if read is None else self.look(read).token
        elif choice is not PreScan.SKIP:
            raise ValueError(
                f"pre_scan of the {self.policy.kind} policy must answer SKIP, SCAN, ExitAt or SkipSublayers, got "
                f"{choice!r}"
            )
        return Draft(depth, [hidden])

    def _burst(self, draft: Draft, ids: list[int], cap: int, cache: KVCache) -> Draft:
        """Draft on at the exit layer until the policy stops, the cap is reached or the text ends."""
        layer = draft.exit_layer
        below = max((c for c in self.candidates if c < layer), default=0) if self._second_reads else 0
        while draft.tokens[-1] not in self.eos:
            n_drafted = len(draft.tokens)
            block = self.model.block(cache, len(ids) - 1 + n_drafted, 1)
            hidden = self.model.embed(self._ids(draft.tokens[-1]), block)
            if n_drafted == cap:  # unasked, so that the bonus token exists
                draft.states.append(self.run_layers(hidden, 0, layer, block))
                break
            token_before = UNKNOWN
            if below:
                hidden = self.run_layers(hidden, 0, below, block)
                token_before = self._token(hidden)
            hidden = self.run_layers(hidden, below, layer, block)
            draft.states.append(hidden)
            read = None if self.observer is None else self._read(hidden)
            if not self.drafts_on(layer, n_drafted, read, token_before):
                break
            self.add(draft, read or self._read(hidden), ids)
        return draft

    def _burst_with_gaps(self, plan: SkipSublayers, ids: list[int], cap: int, cache: KVCache) -> Draft:
        """Draft through the whole stack but for some sublayers, until the policy stops, the cap or the text's end."""
        plan.check(self.model.n_layers)
        draft, token = Draft(plan.prefix, [], gaps=plan), ids[-1]
        read: HeadRead | None = None
        while True:
            n_drafted = len(draft.tokens)
            block = self.model.block(cache, len(ids) - 1 + n_drafted, 1)
            hidden = self.run_layers(self.model.embed(self._ids(token), block), 0, plan.prefix, block)
            draft.states.append(hidden)
            if n_drafted == cap or (n_drafted and not self.drafts_on(self.model.n_layers, n_drafted, read)):
                return draft
            read = self._read(self.model.run_skipping(hidden, plan, block))
            self.add(draft, read, ids)
            token = draft.tokens[-1]
            if token in self.eos:
                return draft

    def _read(self, hidden: torch.Tensor) -> HeadRead:
        self.meter.head_reads += 1
        return HeadRead(self.model.head(hidden)[0, -1])

    def _token(self, hidden: torch.Tensor) -> int:
        """The likeliest token below the exit layer: the second head read of a position in the draft."""
        assert self.observer is not None
        self.meter.enter("inspect")
        token = self.observer.token(self._read(hidden).logits)
        self.meter.enter("draft")
        return token

    def _ids(self, token: int) -> torch.Tensor:
        return torch.tensor([[token]], device=self._device)
