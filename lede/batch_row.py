"""One text of a batch while it is decoded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lede.confidence_trace import ConfidenceTrace
from lede.decider import Decider
from lede.draft import Draft, settle
from lede.features import surprisal
from lede.history import History
from lede.lookup import LookupIndex
from lede.observer import Observer
from lede.policies.base import Policy
from lede.statistics import Meter, Round
from lede.stopping import FinishReason, Stopping
from lede.verification import Chooser


class BatchRow:
    """Everything that a text has of its own: tokens, budget, luck, history, draft, rounds.

    Args:
        number: Which text of the batch.
        prompt: Token ids.
        max_new_tokens: Budget, at least 1.
        chooser: How tokens are taken from logits; no other row's.
        eos: Ids that end the text.
        stopping: What else ends it.

    Attributes:
        ids: Prompt and new tokens.
        place: Its row of the cache.
        rounds: Rounds after the prefill.
        head_reads: As `DecodingStats` counts them.
        stopped: What `stopping` said last.
        draft: Of the current round.
        cap: Most tokens that may be drafted one after the other in it.
        copied: Tokens that are copied from the text in it.
    """

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        max_new_tokens: int,
        chooser: Chooser,
        eos: frozenset[int] = frozenset(),
        stopping: Stopping | None = None,
    ) -> None:
        self.number = number
        self.n_prompt = len(prompt)
        self.budget = self.n_prompt + max_new_tokens
        self.chooser = chooser
        self.ids = list(prompt)
        self.place = number
        self.rounds: list[Round] = []
        self.head_reads = 0
        self.stopped: FinishReason | None = None
        self.draft = Draft(0, [])
        self.cap = 0
        self.copied: list[int] = []
        self._eos = eos
        self._stopping = stopping
        self._history = History()
        self._decider: Decider | None = None

    @property
    def new(self) -> list[int]:
        """New tokens."""
        return self.ids[self.n_prompt :]

    @property
    def position(self) -> int:
        """Position of the newest token, which is not in the cache yet."""
        return len(self.ids) - 1

    @property
    def newest(self) -> list[int]:
        """Tokens that a round begins with: the newest one and what is copied, but for a copy that ends the text."""
        ended = bool(self.copied) and self.copied[-1] in self._eos
        return [self.ids[-1], *(self.copied[:-1] if ended else self.copied)]

    @property
    def done(self) -> bool:
        """Whether the text has ended."""
        return len(self.ids) >= self.budget or self.ids[-1] in self._eos or self.stopped is not None

    @property
    def decider(self) -> Decider:
        """Who is asked about this text; there is one unless decoding is plain."""
        assert self._decider is not None
        return self._decider

    @property
    def draft_ends_text(self) -> bool:
        """Whether the last drafted token is one that ends the text."""
        return self.draft.tokens[-1] in self._eos

    def begin(self, logits: torch.Tensor, policy: Policy | None, observer: Observer | None, meter: Meter) -> None:
        """Take the first token.

        Args:
            logits: Raw, at the last token of the prompt, `(vocabulary,)`.
            policy: Who decides; None decodes plainly.
            observer: Makes the policy's observations; None for a policy that looks at nothing.
            meter: Where time is booked.
        """
        _, first = self.chooser.verify(logits[None], (), (), self.ids)
        assert first is not None
        if policy is not None:
            policy = policy.for_text()
            anchored, lookup = policy.uses_trace, policy.lookup
            self._history = History(
                ConfidenceTrace(surprisal(logits), policy.trace_window) if anchored else None,
                None if lookup is None else LookupIndex(lookup, self.ids, policy.memory),
            )
            self._decider = Decider(policy, self.chooser, meter, self._history, observer, self._eos)
        self._extend((first,)[: self._kept((first,))])

    def commit(self, logits: torch.Tensor) -> tuple[int, ...]:
        """Accept what stays of the draft and extend the text by it; returns the tokens that it got.

        Args:
            logits: The whole model's at the draft's states, `(state, vocabulary)`.
        """
        done = settle(self.draft, logits, self.chooser, self.ids, self._history)
        done = done.cut(self._kept(done.tokens))
        self.rounds.append(done)
        self._extend(done.tokens)
        return done.tokens

    def _extend(self, tokens: tuple[int, ...]) -> None:
        self.ids.extend(tokens)
        self._history.extend(tokens)

    def _kept(self, block: tuple[int, ...]) -> int:
        """How many tokens of a block that was just committed stay in the text."""
        if self._stopping is None:
            return len(block)
        n_kept, self.stopped = self._stopping.end(self.ids, block, self.n_prompt)
        if n_kept < len(block) and self.chooser.record is not None:
            self.chooser.record.cut(len(self.ids) - self.n_prompt + n_kept)
        return n_kept
