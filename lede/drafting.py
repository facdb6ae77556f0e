"""Drafting: the scan that picks the exit layer and the burst that drafts from it, or a burst through a stack with gaps.

Source: LEDE (arXiv 2606.03113), section 3.3 (dual control). Departs from the paper: the pre-scan stage is ours, and so
is what happens to the position that made the policy stop: it is already at the exit layer, so it joins verification and
yields the bonus token.

With gaps (SWIFT, arXiv 2410.06916; ConfLayers, arXiv 2604.14612) the stop depends on what the last drafted position
said, whose token stays in the draft. So the next position is asked about before it goes beyond the layers in front of
the first gap, whose states verification needs anyway.

Copied tokens (`lede.lookup`) are all known at once: they go through the layers together, and may be pruned on the way.
"""

from __future__ import annotations

import torch

from lede.cache import KVCache
from lede.decider import Decider
from lede.devices import numbers_on
from lede.draft import UNKNOWN, Draft, HeadRead
from lede.history import History
from lede.kernels import reading_of
from lede.lookup import agreeing
from lede.models import Block, EarlyExitModel
from lede.observer import Observer
from lede.policies.base import ExitAt, Lookup, Plan, Policy, PreScan, SkipSublayers
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
        observer = None
        if features is not None:
            observer = Observer(features, model.n_layers, model.vocab_size, reading_of(model))
        super().__init__(policy, chooser, meter, history, observer, eos)
        self.model = model
        self.candidates = policy.candidates_for(model.n_layers)
        self._second_reads = features is not None and features.draft_agreement
        self.reports = type(policy).verified is not Policy.verified  # else nobody looks at them
        self._device = model.device
        shadow_layers = policy.shadow_layers if self.reports else ()
        self.shadow = ShadowReader(model, shadow_layers) if shadow_layers else None
        self.run_layers = model.run_layers if self.shadow is None else self.shadow.run_layers

    def draft(self, ids: list[int], choice: Plan, room: int, cache: KVCache) -> Draft:
        """Draft after `ids`, whose last token is not in the cache yet.

        Args:
            ids: The text.
            choice: The plan.
            room: Most tokens that the budget allows for.
            cache: Is extended.

        Returns:
            The draft; without tokens, and with the state as far as it got, when no candidate exits, nothing is found
            to copy or nothing of it is left.
        """
        self.start()
        cap = min(self.policy.config.max_draft, room)
        if isinstance(choice, SkipSublayers):
            return self._burst_with_gaps(choice, ids, cap, cache)
        if isinstance(choice, Lookup):
            return self._copy(choice, ids, room, cache)
        block = self.model.block(cache, len(ids) - 1, 1)
        hidden = self.model.embed(self._ids(ids[-1]), block)
        depth = 0
        if isinstance(choice, ExitAt):
            self.model.check_exit_layer(choice.exit_layer)
            hidden = self.run_layers(hidden, 0, choice.exit_layer, block)
            draft = Draft(choice.exit_layer, [hidden], fixed=choice.length)
            self.add(draft, self._read(hidden), ids)
            return self._burst(draft, ids, cap, cache)
        if choice is PreScan.SCAN:
            token_before = UNKNOWN
            for candidate in self.candidates:
                self.meter.enter("draft")
                hidden = self.run_layers(hidden, depth, candidate, block)
                depth = candidate
                read = None if self.observer is None else self._read(hidden)
                if self.exits(candidate, read, token_before):
                    draft = Draft(candidate, [hidden])
                    self.add(draft, read or self._read(hidden), ids)
                    return self._burst(draft, ids, cap, cache)
                token_before = UNKNOWN if read is None else self.look(read).token
        elif choice is not PreScan.SKIP:
            raise ValueError(
                f"pre_scan of the {self.policy.kind} policy must answer SKIP, SCAN, ExitAt, SkipSublayers or Lookup, "
                f"got {choice!r}"
            )
        return Draft(depth, [hidden])

    def _burst(self, draft: Draft, ids: list[int], cap: int, cache: KVCache) -> Draft:
        """Draft on at the exit layer until the policy or the plan stops, the cap is reached or the text ends."""
        layer, asks = draft.exit_layer, draft.fixed is None
        end = cap if draft.fixed is None else min(cap, draft.fixed)
        looks = asks and self.observer is not None
        below = max((c for c in self.candidates if c < layer), default=0) if looks and self._second_reads else 0
        while draft.tokens[-1] not in self.eos:
            n_drafted = len(draft.tokens)
            draft.capped = n_drafted == cap
            block = self.model.block(cache, len(ids) - 1 + n_drafted, 1)
            hidden = self.model.embed(self._ids(draft.tokens[-1]), block)
            if n_drafted == end:  # unasked, so that the bonus token exists
                draft.states.append(self.run_layers(hidden, 0, layer, block))
                break
            token_before = UNKNOWN
            if below:
                hidden = self.run_layers(hidden, 0, below, block)
                token_before = self._token(hidden)
            hidden = self.run_layers(hidden, below, layer, block)
            draft.states.append(hidden)
            read = self._read(hidden) if looks else None
            if asks and not self.drafts_on(layer, n_drafted, read, token_before):
                break
            self.add(draft, read or self._read(hidden), ids)
        else:
            draft.capped = True
        return draft

    def _copy(self, plan: Lookup, ids: list[int], room: int, cache: KVCache) -> Draft:
        """Copy tokens from the text, and cut them where the plan's layer thinks otherwise."""
        plan.check(self.model.n_layers)
        tokens = self.copied(plan, room)
        run = [ids[-1], *(tokens[:-1] if tokens and tokens[-1] in self.eos else tokens)]
        block = self.model.block(cache, len(ids) - 1, len(run))
        hidden = self.model.embed(numbers_on(self._device, [run]), block)
        draft = Draft(0, [hidden], tokens, [None] * len(tokens), lookup=plan)
        draft.capped = bool(tokens) and (len(tokens) == room or tokens[-1] in self.eos)
        if tokens and plan.prune_at is not None:
            self._prune(draft, plan.prune_at, block)
        return draft

    def _prune(self, draft: Draft, layer: int, block: Block) -> None:
        """Keep of a copied draft what a layer would have drafted too."""
        hidden = self.run_layers(draft.states[0], 0, layer, block)
        self.meter.head_reads += hidden.shape[1]
        section = self.meter.enter("head")
        said = self.model.head(hidden)[0].argmax(-1).tolist()
        self.meter.enter(section)
        n_kept = agreeing(draft.tokens, said)
        if n_kept < len(draft.tokens):
            draft.capped = False
        draft.exit_layer, draft.states = layer, [hidden[:, : n_kept + 1]]
        draft.tokens, draft.distributions = draft.tokens[:n_kept], draft.distributions[:n_kept]

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
            draft.capped = n_drafted == cap
            if draft.capped or (n_drafted and not self.drafts_on(self.model.n_layers, n_drafted, read)):
                return draft
            read = self._read(self.model.run_skipping(hidden, plan, block))
            self.add(draft, read, ids)
            token = draft.tokens[-1]
            if token in self.eos:
                draft.capped = True
                return draft

    def _read(self, hidden: torch.Tensor) -> HeadRead:
        self.meter.head_reads += 1
        section = self.meter.enter("head")
        logits = self.model.head(hidden)[0, -1]
        self.meter.enter(section)
        return HeadRead(logits)

    def _token(self, hidden: torch.Tensor) -> int:
        """The likeliest token below the exit layer: the second head read of a position in the draft."""
        assert self.observer is not None
        self.meter.enter("inspect")
        token = self.observer.token(self._read(hidden).logits)
        self.meter.enter("draft")
        return token

    def _ids(self, token: int) -> torch.Tensor:
        return numbers_on(self._device, [[token]])
