"""Drafting: the scan that picks the exit layer, and the burst that drafts from it.

Source: LEDE (arXiv 2606.03113), section 3.3 (dual control). Departs from the paper: the pre-scan stage is ours, and so
is what happens to the position that made the policy stop: it is already at the exit layer, so it joins verification and
yields the bonus token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lede.cache import KVCache
from lede.features import surprisal
from lede.history import History
from lede.models import EarlyExitModel
from lede.observer import Doubt, Observer
from lede.policies.base import NOTHING_OBSERVED, ExitAt, LayerState, Policy, PreScan, PreScanState
from lede.statistics import Meter
from lede.verification import Chooser

UNKNOWN = -1
"""In place of a token that nobody read."""


@dataclass
class Draft:
    """The draft of one round, or the position of a plain pass when `tokens` is empty."""

    exit_layer: int
    """Layers that the states went through."""
    states: list[torch.Tensor]
    """Hidden states after `exit_layer` layers, `(1, 1, width)` each: the newest token's, then the drafted tokens'."""
    tokens: list[int] = field(default_factory=list)
    """Drafted tokens."""
    distributions: list[torch.Tensor | None] = field(default_factory=list)
    """What each was drawn from; None when greedy."""


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
        self._surprisal_wanted = history.trace is not None or (
            self.observer is not None and (self.observer.wants_survival or self.observer.wants_certainty)
        )
        self._doubt = Doubt()
        self._device = model.device

    def choose_plan(self, remaining: int, n_tokens: int) -> PreScan | ExitAt:
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

    def draft(self, ids: list[int], choice: PreScan | ExitAt, cap: int, cache: KVCache) -> Draft:
        """Draft at most `cap` tokens after `ids`, whose last token is not in the cache yet.

        Returns:
            The draft; without tokens, and with the state as far as it got, when no candidate exits.
        """
        self._doubt = Doubt()
        block = self.model.block(cache, len(ids) - 1, 1)
        hidden = self.model.embed(self._ids(ids[-1]), block)
        depth = 0
        if isinstance(choice, ExitAt):
            self.model.check_exit_layer(choice.exit_layer)
            hidden = self.model.run_layers(hidden, 0, choice.exit_layer, block)
            draft = Draft(choice.exit_layer, [hidden])
            self._add(draft, self._read(hidden), ids)
            return self._burst(draft, ids, cap, cache)
        if choice is PreScan.SCAN:
            token_before = UNKNOWN
            for candidate in self.candidates:
                self.meter.enter("draft")
                hidden = self.model.run_layers(hidden, depth, candidate, block)
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
                f"pre_scan of the {self.policy.kind} policy must answer SKIP, SCAN or ExitAt, got {choice!r}"
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
                draft.states.append(self.model.run_layers(hidden, 0, layer, block))
                break
            token_before = UNKNOWN
            if below:
                hidden = self.model.run_layers(hidden, 0, below, block)
                token_before = self._token(hidden)
            hidden = self.model.run_layers(hidden, below, layer, block)
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
