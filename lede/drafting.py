"""Drafting: the scan that picks the exit layer and the burst that drafts from it, or a burst through a stack with gaps.

Source: LEDE (arXiv 2606.03113), section 3.3 (dual control). Departs from the paper: the pre-scan stage is ours, and so
is what happens to the position that made the policy stop: it is already at the exit layer, so it joins verification and
yields the bonus token.

With gaps (SWIFT, arXiv 2410.06916; ConfLayers, arXiv 2604.14612) the stop depends on what the last drafted position
said, whose token stays in the draft. So the next position is asked about before it goes beyond the layers in front of
the first gap, whose states verification needs anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lede.cache import KVCache
from lede.features import surprisal
from lede.head_reading import Reading
from lede.history import History
from lede.models import EarlyExitModel
from lede.observer import Doubt, Observer
from lede.policies.base import (
    NOTHING_OBSERVED,
    ExitAt,
    LayerState,
    Plan,
    Policy,
    PreScan,
    PreScanState,
    SkipSublayers,
)
from lede.shadow import ShadowReader
from lede.statistics import Meter
from lede.verification import Chooser

UNKNOWN = -1
"""In place of a token that nobody read."""


@dataclass
class Draft:
    """The draft of one round, or the position of a plain pass when `tokens` is empty."""

    exit_layer: int
    """Layers that the states went through, and verification need not run again."""
    states: list[torch.Tensor]
    """Hidden states after `exit_layer` layers, `(1, 1, width)` each: the newest token's, then the drafted tokens'."""
    tokens: list[int] = field(default_factory=list)
    """Drafted tokens."""
    distributions: list[torch.Tensor | None] = field(default_factory=list)
    """What each was drawn from; None when greedy."""
    gaps: SkipSublayers | None = None
    """What the draft left out, which then went on behind the states; None where it left at the exit layer."""
    capped: bool = False
    """Whether it was as long as it could be: up to the cap, or up to a token that ends the text."""

    @property
    def plan(self) -> ExitAt | SkipSublayers | None:
        """Where the tokens came from; None without any."""
        return self.gaps or (ExitAt(self.exit_layer) if self.tokens else None)


@dataclass
class _HeadRead:
    """What one head read gave."""

    logits: torch.Tensor
    """Raw, `(vocabulary,)`."""
    surprisal: float | None = None
    """-log probability of the likeliest token, in nats, where the policy looked at it."""
    margin: float = 0.0
    """Log-probability of the likeliest token over the second's, where the features told it."""


class Drafter:
    """Runs the stages of a round up to verification.

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
        self.model = model
        self.policy = policy
        self.chooser = chooser
        self.eos = eos
        self.meter = meter
        self.history = history
        self.candidates = policy.candidates_for(model.n_layers)
        features = policy.features
        self.observer = None if features is None else Observer(features, model.n_layers, model.vocab_size)
        self._second_reads = features is not None and features.draft_agreement
        self.reports = type(policy).verified is not Policy.verified  # else nobody looks at them
        self._surprisal_wanted = history.trace is not None or (
            self.observer is not None and (self.observer.wants_survival or self.observer.wants_certainty)
        )
        self._doubt = Doubt()
        self._device = model.device
        shadow_layers = policy.shadow_layers if self.reports else ()
        self.shadow = ShadowReader(model, shadow_layers) if shadow_layers else None
        self.run_layers = model.run_layers if self.shadow is None else self.shadow.run_layers

    def choose_plan(self, remaining: int, n_tokens: int) -> Plan:
        """Ask the policy for the plan of a round.

        Args:
            remaining: Tokens left in the budget.
            n_tokens: Tokens so far, prompt included.
        """
        history, observation = self.history, NOTHING_OBSERVED
        if self.observer is not None and self.policy.decides_pre_scan:
            observation = self.observer.before_scan(history)
        state = PreScanState(
            history.trace_value(), history.recent_acceptance, history.since_draft, remaining, n_tokens, observation
        )
        return self.policy.pre_scan(state)

    def draft(self, ids: list[int], choice: Plan, cap: int, cache: KVCache) -> Draft:
        """Draft at most `cap` tokens after `ids`, whose last token is not in the cache yet.

        Returns:
            The draft; without tokens, and with the state as far as it got, when no candidate exits.
        """
        self._doubt = Doubt()
        if isinstance(choice, SkipSublayers):
            return self._burst_with_gaps(choice, ids, cap, cache)
        block = self.model.block(cache, len(ids) - 1, 1)
        hidden = self.model.embed(self._ids(ids[-1]), block)
        depth = 0
        if isinstance(choice, ExitAt):
            self.model.check_exit_layer(choice.exit_layer)
            hidden = self.run_layers(hidden, 0, choice.exit_layer, block)
            draft = Draft(choice.exit_layer, [hidden])
            self._add(draft, self._read(hidden), ids)
            return self._burst(draft, ids, cap, cache)
        if choice is PreScan.SCAN:
            token_before = UNKNOWN
            for candidate in self.candidates:
                self.meter.enter("draft")
                hidden = self.run_layers(hidden, depth, candidate, block)
                depth = candidate
                self.meter.enter("inspect")
                read, observation = None, NOTHING_OBSERVED
                if self.observer is not None:
                    read = self._read(hidden)
                    reading = self.observer.read(read.logits)
                    read.surprisal, read.margin = reading.surprisal, reading.margin
                    observation = self.observer.in_scan(self.history, candidate, reading, token_before)
                    token_before = reading.token
                if self._wanted(self.policy.scan, LayerState(candidate, 0, observation)):
                    draft = Draft(candidate, [hidden])
                    self._add(draft, read or self._read(hidden), ids)
                    return self._burst(draft, ids, cap, cache)
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
            read, observation = None, NOTHING_OBSERVED
            if self.observer is not None:
                read = self._read(hidden)
                self.meter.enter("inspect")
                reading = self.observer.read(read.logits)
                read.surprisal, read.margin = reading.surprisal, reading.margin
                observation = self.observer.in_draft(self.history, layer, reading, token_before, n_drafted, self._doubt)
            if not self._wanted(self.policy.draft, LayerState(layer, n_drafted, observation)):
                break
            self._add(draft, read or self._read(hidden), ids)
        return draft

    def _burst_with_gaps(self, plan: SkipSublayers, ids: list[int], cap: int, cache: KVCache) -> Draft:
        """Draft through the whole stack but for some sublayers, until the policy stops, the cap or the text's end."""
        plan.check(self.model.n_layers)
        draft, token = Draft(plan.prefix, [], gaps=plan), ids[-1]
        reading = Reading()
        while True:
            n_drafted = len(draft.tokens)
            block = self.model.block(cache, len(ids) - 1 + n_drafted, 1)
            hidden = self.run_layers(self.model.embed(self._ids(token), block), 0, plan.prefix, block)
            draft.states.append(hidden)
            if n_drafted == cap or (n_drafted and not self._goes_on(n_drafted, reading)):
                return draft
            read = self._read(self.model.run_skipping(hidden, plan, block))
            if self.observer is not None:
                self.meter.enter("inspect")
                reading = self.observer.read(read.logits)
                read.surprisal, read.margin = reading.surprisal, reading.margin
                self.meter.enter("draft")
            self._add(draft, read, ids)
            token = draft.tokens[-1]
            if token in self.eos:
                return draft

    def _goes_on(self, n_drafted: int, reading: Reading) -> bool:
        """Whether the policy drafts on with gaps, asked on what the last drafted position said."""
        observation, layer = NOTHING_OBSERVED, self.model.n_layers
        if self.observer is not None:
            self.meter.enter("inspect")
            observation = self.observer.in_draft(self.history, layer, reading, UNKNOWN, n_drafted, self._doubt)
        return self._wanted(self.policy.draft, LayerState(layer, n_drafted, observation))

    def _wanted(self, decide: Callable[[LayerState], bool], state: LayerState) -> bool:
        """The policy's answer."""
        self.meter.enter("policy")
        wanted = decide(state)
        self.meter.enter("draft")
        return wanted

    def _read(self, hidden: torch.Tensor) -> _HeadRead:
        self.meter.head_reads += 1
        return _HeadRead(self.model.head(hidden)[0, -1])

    def _token(self, hidden: torch.Tensor) -> int:
        """The likeliest token below the exit layer: the second head read of a position in the draft."""
        assert self.observer is not None
        self.meter.enter("inspect")
        token = self.observer.token(self._read(hidden).logits)
        self.meter.enter("draft")
        return token

    def _add(self, draft: Draft, read: _HeadRead, ids: list[int]) -> None:
        """Draw a token from a head read, and leave its position here."""
        token, q = self.chooser.choose(read.logits, [*ids, *draft.tokens] if self.chooser.processors else ())
        draft.tokens.append(token)
        draft.distributions.append(q)
        if self._surprisal_wanted:
            if read.surprisal is None:
                if self.observer is not None:
                    self.meter.enter("inspect")
                    reading = self.observer.read(read.logits)
                    read.surprisal, read.margin = reading.surprisal, reading.margin
                    self.meter.enter("draft")
                else:
                    read.surprisal = surprisal(read.logits)
            self._doubt.add(read.surprisal, read.margin)
            if self.history.trace is not None:
                self.history.trace.push(read.surprisal)

    def _ids(self, token: int) -> torch.Tensor:
        return torch.tensor([[token]], device=self._device)
