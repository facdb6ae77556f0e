"""Drafting: the scan that picks the exit layer, and the burst that drafts from it.

Source: LEDE (arXiv 2606.03113), section 3.3 (dual control). Departs from the paper: the pre-scan stage is ours, and so
is what happens to the position that made the policy stop: it is already at the exit layer, so it joins verification and
yields the bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from lede.features import ConfidenceTrace, primitives
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

    def draft(self, ids: list[int], choice: PreScan | ExitAt, cap: int, cache: object) -> Draft:
        """Draft at most `cap` tokens after `ids`, whose last token is not in the cache yet.

        Returns:
            The draft; without tokens, and with the state as far as it got, when no candidate exits.
        """
        block = self.model.block(cache, len(ids) - 1, 1)  # type: ignore[arg-type]
        hidden = self.model.embed(self._ids(ids[-1]), block)
        depth = 0
        if isinstance(choice, ExitAt):
            self.model.check_exit_layer(choice.exit_layer)
            hidden = self.model.run_layers(hidden, 0, choice.exit_layer, block)
            draft = Draft(choice.exit_layer, [hidden])
            logits, surprisal, _ = self._read(hidden, choice.exit_layer, observe=False)
            self._add(draft, logits, surprisal, ids)
            return self._burst(draft, ids, cap, cache)
        if choice is PreScan.SCAN:
            for candidate in self.candidates:
                self.meter.enter("draft")
                hidden = self.model.run_layers(hidden, depth, candidate, block)
                depth = candidate
                self.meter.enter("inspect")
                if self.features is None:  # a head read only pays if someone looks at it, or when it drafts
                    if not self._ask_scan(candidate, _NO_FEATURES):
                        continue
                    logits, surprisal, _ = self._read(hidden, candidate, observe=False)
                else:
                    logits, surprisal, observation = self._read(hidden, candidate)
                    if not self._ask_scan(candidate, observation):
                        continue
                self.meter.enter("draft")
                draft = Draft(candidate, [hidden])
                self._add(draft, logits, surprisal, ids)
                return self._burst(draft, ids, cap, cache)
        return Draft(depth, [hidden])

    def _burst(self, draft: Draft, ids: list[int], cap: int, cache: object) -> Draft:
        """Draft on at the exit layer until the policy stops, the cap is reached or the text ends."""
        layer = draft.exit_layer
        while draft.tokens[-1] not in self.eos:
            self.meter.enter("draft")
            n_drafted = len(draft.tokens)
            block = self.model.block(cache, len(ids) - 1 + n_drafted, 1)  # type: ignore[arg-type]
            hidden = self.model.embed(self._ids(draft.tokens[-1]), block)
            hidden = self.model.run_layers(hidden, 0, layer, block)
            draft.states.append(hidden)
            if n_drafted == cap:  # unasked, so that the bonus token exists
                break
            if self.features is None:
                if not self._ask_draft(layer, n_drafted, _NO_FEATURES):
                    break
                logits, surprisal, _ = self._read(hidden, layer, observe=False)
            else:
                logits, surprisal, observation = self._read(hidden, layer)
                if not self._ask_draft(layer, n_drafted, observation):
                    break
            self._add(draft, logits, surprisal, ids)
        return draft

    def _add(self, draft: Draft, logits: torch.Tensor, surprisal: float, ids: list[int]) -> None:
        self.meter.enter("draft")
        token, q = self.chooser.choose(logits, [*ids, *draft.tokens] if self.chooser.processors else ())
        draft.tokens.append(token)
        draft.distributions.append(q)
        if self.trace is not None:
            self.trace.push(surprisal)

    def _read(
        self, hidden: torch.Tensor, layer: int, observe: bool = True
    ) -> tuple[torch.Tensor, float, np.typing.NDArray[np.float32]]:
        """A head read: logits `(vocabulary,)`, -log top-1 probability, and the observation if wanted."""
        self.meter.head_reads += 1
        logits = self.model.head(hidden)[0, -1]
        if self.features is None or not (observe or self.trace is not None):
            return logits, 0.0, _NO_FEATURES
        self.meter.enter("inspect")
        read = primitives(logits, self.features.top_k)
        # one transfer from the device for all that a decision needs
        confidence, entropy, top1 = torch.stack([read.confidence, read.entropy, read.top1]).tolist()
        trace = self.trace.value() if self.trace is not None else 0.0
        observation = self.features.observe(
            confidence, entropy, trace, layer, self.model.n_layers, self.model.vocab_size
        )
        return logits, -top1, observation

    def _ask_scan(self, layer: int, observation: np.typing.NDArray[np.float32]) -> bool:
        self.meter.enter("policy")
        return bool(self.policy.scan(LayerState(layer, 0, observation)))

    def _ask_draft(self, layer: int, n_drafted: int, observation: np.typing.NDArray[np.float32]) -> bool:
        self.meter.enter("policy")
        return bool(self.policy.draft(LayerState(layer, n_drafted, observation)))

    def _ids(self, token: int) -> torch.Tensor:
        return torch.tensor([[token]], device=self.model.device)
