"""Drafting: the scan that picks the exit layer, and the burst that drafts from it.

Source: LEDE (arXiv 2606.03113), section 3.3 (dual control). Departs from the paper: the pre-scan stage is ours, and so
is what happens to the position that made the policy stop: it is already at the exit layer, so it joins verification and
yields the bonus token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from lede.cache import KVCache
from lede.features import ConfidenceTrace, primitives, surprisal
from lede.models import EarlyExitModel
from lede.policies.base import ExitAt, LayerState, Policy, PreScan
from lede.statistics import Meter
from lede.verification import Chooser

_NO_FEATURES = np.empty(0, dtype=np.float32)


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
    """-log probability of the likeliest token, in nats, where the features told it."""


class Drafter:
    """Runs the stages of a round up to verification.

    Args:
        model: The model, whose cache is extended.
        policy: Who decides.
        chooser: How a draft token is taken from logits.
        eos: Ids that end the text.
        meter: Where time and head reads are booked.
        trace: The confidence trace; None when the policy does not use it.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        policy: Policy,
        chooser: Chooser,
        eos: frozenset[int],
        meter: Meter,
        trace: ConfidenceTrace | None,
    ) -> None:
        self.model = model
        self.policy = policy
        self.chooser = chooser
        self.eos = eos
        self.meter = meter
        self.trace = trace
        self.features = policy.features
        self.candidates = policy.candidates_for(model.n_layers)

    def draft(self, ids: list[int], choice: PreScan | ExitAt, cap: int, cache: KVCache) -> Draft:
        """Draft at most `cap` tokens after `ids`, whose last token is not in the cache yet.

        Returns:
            The draft; without tokens, and with the state as far as it got, when no candidate exits.
        """
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
            for candidate in self.candidates:
                self.meter.enter("draft")
                hidden = self.model.run_layers(hidden, depth, candidate, block)
                depth = candidate
                self.meter.enter("inspect")
                read = self._ask(self.policy.scan, hidden, candidate, 0)
                if read is not None:
                    draft = Draft(candidate, [hidden])
                    self._add(draft, read, ids)
                    return self._burst(draft, ids, cap, cache)
        elif choice is not PreScan.SKIP:
            raise ValueError(
                f"pre_scan of the {self.policy.kind} policy must answer SKIP, SCAN or ExitAt, got {choice!r}"
            )
        return Draft(depth, [hidden])

    def _burst(self, draft: Draft, ids: list[int], cap: int, cache: KVCache) -> Draft:
        """Draft on at the exit layer until the policy stops, the cap is reached or the text ends."""
        layer = draft.exit_layer
        while draft.tokens[-1] not in self.eos:
            n_drafted = len(draft.tokens)
            block = self.model.block(cache, len(ids) - 1 + n_drafted, 1)
            hidden = self.model.embed(self._ids(draft.tokens[-1]), block)
            hidden = self.model.run_layers(hidden, 0, layer, block)
            draft.states.append(hidden)
            if n_drafted == cap:  # unasked, so that the bonus token exists
                break
            read = self._ask(self.policy.draft, hidden, layer, n_drafted)
            if read is None:
                break
            self._add(draft, read, ids)
        return draft

    def _ask(
        self, decide: Callable[[LayerState], bool], hidden: torch.Tensor, layer: int, n_drafted: int
    ) -> _HeadRead | None:
        """Ask the policy at a layer: the head read to draft from, or None when it does not exit.

        A head read only pays if the policy looks at it, or when it drafts.
        """
        read, observation = None, _NO_FEATURES
        if self.features is not None:
            read = self._read(hidden)
            self.meter.enter("inspect")
            values = primitives(read.logits, self.features.top_k)
            # one transfer from the device for all that a decision needs
            confidence, entropy, top1 = torch.stack([values.confidence, values.entropy, values.top1]).tolist()
            read.surprisal = -top1
            trace = self.trace.value() if self.trace is not None else 0.0
            observation = self.features.observe(
                confidence, entropy, trace, layer, self.model.n_layers, self.model.vocab_size
            )
        self.meter.enter("policy")
        wanted = decide(LayerState(layer, n_drafted, observation))
        self.meter.enter("draft")
        if not wanted:
            return None
        return read if read is not None else self._read(hidden)

    def _read(self, hidden: torch.Tensor) -> _HeadRead:
        self.meter.head_reads += 1
        return _HeadRead(self.model.head(hidden)[0, -1])

    def _add(self, draft: Draft, read: _HeadRead, ids: list[int]) -> None:
        """Draw a token from a head read, and leave its position here."""
        token, q = self.chooser.choose(read.logits, [*ids, *draft.tokens] if self.chooser.processors else ())
        draft.tokens.append(token)
        draft.distributions.append(q)
        if self.trace is not None:
            self.trace.push(surprisal(read.logits) if read.surprisal is None else read.surprisal)

    def _ids(self, token: int) -> torch.Tensor:
        return torch.tensor([[token]], device=self.model.device)
