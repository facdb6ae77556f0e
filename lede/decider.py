"""Decisions about one text: what the policy is told in each stage, and the tokens that are drawn if it wants to draft.

Nothing here runs a layer, so it serves one text (`lede.drafting`) and many in lockstep (`lede.batch_decoding`) alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lede.draft import UNKNOWN, Draft, HeadRead
from lede.features import surprisal
from lede.head_reading import Reading
from lede.history import History
from lede.observer import Doubt, Observer
from lede.policies.base import NOTHING_OBSERVED, LayerState, Lookup, Plan, Policy, PreScanState
from lede.statistics import Meter
from lede.verification import Chooser


class Decider:
    """Asks the policy about one text and draws its drafted tokens.

    A question and the draw that follows it are two calls, so that many texts can be asked before any of them draws.

    Args:
        policy: Who decides.
        chooser: How a draft token is taken from logits.
        meter: Where time is booked.
        history: Of the text.
        observer: Makes the policy's observations; None for a policy that looks at nothing.
        eos: Ids that end the text.
    """

    def __init__(
        self,
        policy: Policy,
        chooser: Chooser,
        meter: Meter,
        history: History,
        observer: Observer | None,
        eos: frozenset[int] = frozenset(),
    ) -> None:
        self.policy = policy
        self.chooser = chooser
        self.meter = meter
        self.history = history
        self.observer = observer
        self.eos = eos
        self._surprisal_wanted = history.trace is not None or (
            observer is not None and (observer.wants_survival or observer.wants_certainty)
        )
        self._doubt = Doubt()

    def start(self) -> None:
        """A new round: nothing speaks against its draft yet."""
        self._doubt = Doubt()

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
            history.trace_value(),
            history.layers.ratio,
            history.layers.since,
            remaining,
            n_tokens,
            observation,
            history.match,
        )
        return self.policy.pre_scan(state)

    def copied(self, plan: Lookup, room: int) -> list[int]:
        """Tokens that a plan copies from the text, up to the first that ends it; none where nothing is found.

        Args:
            plan: The plan.
            room: Most tokens that the budget allows for.

        Raises:
            ValueError: The policy has no `lookup`, and so no index was kept.
        """
        index = self.history.index
        if index is None:
            raise ValueError(
                f"the {self.policy.kind} policy answers {plan!r}, but its `lookup` is None, so that the text is not "
                "indexed; give it a LookupConfig"
            )
        tokens = index.propose(min(plan.length, room))
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.eos), len(tokens))
        return tokens[:end]

    def exits(self, candidate: int, read: HeadRead | None, token_before: int = UNKNOWN) -> bool:
        """Whether the policy exits at a candidate of the scan.

        Args:
            candidate: The layer.
            read: The head read there; None where nobody looks.
            token_before: The likeliest token of the candidate inspected before it.
        """
        observation = NOTHING_OBSERVED
        if self.observer is not None and read is not None:
            self.meter.enter("inspect")
            observation = self.observer.in_scan(self.history, candidate, self.look(read), token_before)
        return self._asked(self.policy.scan, LayerState(candidate, 0, observation))

    def drafts_on(self, layer: int, n_drafted: int, read: HeadRead | None, token_before: int = UNKNOWN) -> bool:
        """Whether the policy drafts one more token.

        Args:
            layer: Where it drafts from.
            n_drafted: Tokens drafted before in this round.
            read: The head read that it goes by; None where nobody looks.
            token_before: The position's likeliest token below the exit layer.
        """
        observation = NOTHING_OBSERVED
        if self.observer is not None:
            self.meter.enter("inspect")
            reading = Reading() if read is None else self.look(read)
            observation = self.observer.in_draft(self.history, layer, reading, token_before, n_drafted, self._doubt)
        return self._asked(self.policy.draft, LayerState(layer, n_drafted, observation))

    def look(self, read: HeadRead) -> Reading:
        """What the features, or else the trace, need of a head read; computed once."""
        if read.reading is None:
            if self.observer is not None:
                read.reading = self.observer.read(read.logits)
            else:
                read.reading = Reading(surprisal=surprisal(read.logits))
        return read.reading

    def add(self, draft: Draft, read: HeadRead, ids: Sequence[int]) -> None:
        """Draw a token from a head read, and leave its position here.

        Args:
            draft: Gets the token.
            read: At the position before it.
            ids: The text before the draft.
        """
        likeliest = UNKNOWN if read.reading is None else read.reading.token
        if likeliest != UNKNOWN and self.chooser.takes_likeliest:  # no device is asked twice
            draft.tokens.append(likeliest)
            draft.distributions.append(None)
        else:
            token, q = self.chooser.choose(read.logits, [*ids, *draft.tokens] if self.chooser.processors else ())
            draft.tokens.append(token)
            draft.distributions.append(q)
        if self._surprisal_wanted and draft.fixed is None:
            if read.reading is None and self.observer is not None:
                self.meter.enter("inspect")
            reading = self.look(read)
            self.meter.enter("draft")
            self._doubt.add(reading.surprisal, reading.margin)
            if self.history.trace is not None:
                self.history.trace.push(reading.surprisal)

    def _asked(self, decide: Callable[[LayerState], bool], state: LayerState) -> bool:
        """The policy's answer."""
        self.meter.enter("policy")
        wanted = decide(state)
        self.meter.enter("draft")
        return wanted
