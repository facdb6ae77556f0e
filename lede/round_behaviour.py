"""Experience with rounds, synthesised on traces: who acts, and the transitions that come of it.

A coin flipped at every decision hardly ever drafts long or exits deep, so exploration plans whole rounds: how to begin,
where to exit and how many tokens to draft, each drawn uniformly; the rest follows a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lede.ceilings import Clairvoyant
from lede.draft_rounds import DraftRounds, Stage
from lede.policies.base import BLIND
from lede.rewards import CONTINUE, EXIT
from lede.transitions import Transitions

Greedy = Callable[[npt.NDArray[np.float32], npt.NDArray[np.bool_]], npt.NDArray[np.int64]]
"""Chooses actions `(lane,)` for observations `(lane, feature)` among the legal ones `(lane, action)`."""

_SKIPS, _BLIND, _LOOKUPS = 0.1, 0.3, 0.3
_SKIPS_ALONE = 0.2  # where there are lookups to choose from and nothing else
_FIXED = 0.5  # of the blind drafts, where there are fixed ones to choose from
_SHORT = 5


@dataclass(frozen=True, eq=False)
class RoundTransitions:
    """Decisions of rounds, with tokens and seconds apart so that the price of time can change."""

    transitions: Transitions
    """Where each decision leads; its rewards are those of `rate`."""
    tokens: npt.NDArray[np.float32]  # (row,)
    """Committed by the decision."""
    seconds: npt.NDArray[np.float64]  # (row,)
    """Spent by the decision."""
    progress: npt.NDArray[np.float64]  # (row,)
    """Tokens that will be committed thanks to the decision: accepted drafts where they are drafted, and what a
    verification adds. Each is weighed by the time that it takes the clairvoyant; over a prompt they add up alike."""

    def __len__(self) -> int:
        return self.tokens.size

    def priced(self, rate: float, shaped: bool = False) -> Transitions:
        """The transitions, each rewarded by tokens minus `rate` times seconds.

        Args:
            rate: Tokens that a second is worth.
            shaped: Count `progress` instead of tokens committed: potential-based shaping, the potential being the
                clairvoyant's time from where the text will stand if the draft ends here. Over a round, and over a
                prompt, the difference depends on where it begins and ends alone, so the best policy is the same. But a
                decision is paid at once for what comes of it: a verification earns no more than its own token, however
                many were drafted, and an accepted draft is worth something before it is verified. Hard passages of the
                text, which no policy can help, make the rewards no noisier either. The matches that this takes are in
                the rewards alone, as in hindsight; no observation has them.
        """
        gained = self.progress if shaped else self.tokens
        return replace(self.transitions, rewards=(gained - rate * self.seconds).astype(np.float32))


def record(
    rounds: DraftRounds,
    rng: np.random.Generator,
    greedy: Greedy | None = None,
    explore: float = 1.0,
    flips: float = 0.0,
    episode: str = "prompt",
    clairvoyant: Clairvoyant | None = None,
    copies: int = 1,
) -> RoundTransitions:
    """Decode every prompt of the rounds' table and write down each decision.

    Args:
        rounds: The process.
        rng: Draws what is explored.
        greedy: The policy of what is not explored; needed if `explore` is below 1.
        explore: Share of rounds that follow a random plan.
        flips: Share of the policy's decisions that are replaced by a random legal one.
        episode: `prompt`, or `round` to end the episode with every verification.
        clairvoyant: Of the same table; gives `progress`, which is 0 without.
        copies: Times that every prompt is decoded.
    """
    if greedy is None and explore < 1:
        raise ValueError(f"explore is {explore}, so a share of the rounds needs a policy; give greedy")
    rounds.start(np.tile(np.arange(rounds.table.n_prompts), copies))
    lanes = rounds.stage.size
    plan = _Plan(rounds, lanes)
    fresh, explores = np.ones(lanes, dtype=np.bool_), np.zeros(lanes, dtype=np.bool_)
    steps: list[tuple[npt.NDArray[np.generic], ...]] = []
    while (alive := rounds.stage != Stage.DONE).any():
        plan.draw(rng, fresh)
        explores = np.where(fresh, rng.random(lanes) < explore, explores)
        seen, actions = rounds.observe(), plan.actions()
        if greedy is not None:
            legal = rounds.legal()
            chosen = np.asarray(greedy(seen, legal))
            if flips:
                anything = (rng.random(legal.shape) * legal).argmax(axis=1)
                chosen = np.where(rng.random(lanes) < flips, anything, chosen)
            actions = np.where(explores, actions, chosen)
        before = rounds.decision + rounds.n_accepted
        did = rounds.step(actions)
        progress = np.zeros(lanes)
        if clairvoyant is not None:
            after = rounds.decision + rounds.n_accepted
            left, now = (clairvoyant.value_at(rounds.prompt, decision) for decision in (before, after))
            progress = (left - now) * clairvoyant.rate
        steps.append((alive, seen, actions, did.tokens, did.seconds, progress, did.round_end, did.done))
        fresh = did.round_end
    return _flatten([np.stack(column) for column in zip(*steps, strict=True)], episode)


class _Plan:
    """What explored rounds do."""

    def __init__(self, rounds: DraftRounds, lanes: int) -> None:
        self.rounds = rounds
        self._begin, self._target, self._length = (np.zeros(lanes, dtype=np.int64) for _ in range(3))

    def draw(self, rng: np.random.Generator, fresh: npt.NDArray[np.bool_]) -> None:
        """New plans for the lanes whose round begins."""
        n, k, cap = fresh.size, self.rounds.candidates.size, self.rounds.costs.max_draft
        kind = rng.random(n)
        blind = BLIND + rng.integers(0, max(k, 1), n)
        if fixed := [self.rounds.action_of(plan) for plan in self.rounds.fixed_drafts]:
            blind = np.where(rng.random(n) < _FIXED, rng.choice(fixed, n), blind)
        begin = np.where(kind < _SKIPS, CONTINUE, np.where(kind < _SKIPS + _BLIND, blind, EXIT))
        if not self.rounds.decides_pre_scan:
            begin[:] = EXIT
        elif self.rounds.lookups:
            begin = self._with_lookups(rng, begin)
        target = rng.integers(0, k + 1, n)  # k: no exit
        # half of the drafts are short, as good ones mostly are
        length = np.where(rng.random(n) < 0.5, rng.integers(1, min(_SHORT, cap) + 1, n), rng.integers(1, cap + 1, n))
        for mine, new in ((self._begin, begin), (self._target, target), (self._length, length)):
            mine[fresh] = new[fresh]

    def _with_lookups(self, rng: np.random.Generator, begin: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Some of the plans copy from the text instead, where it has something to copy."""
        rounds, n = self.rounds, begin.size
        assert rounds.lookup is not None  # it has lookups to choose from
        copy = np.asarray([rounds.action_of(plan) for plan in rounds.lookups])[rng.integers(0, len(rounds.lookups), n)]
        if not rounds.candidates.size:
            return np.where(rng.random(n) < _SKIPS_ALONE, CONTINUE, copy)
        return np.where((rng.random(n) < _LOOKUPS) & (rounds.lookup.proposed[rounds.row] > 0), copy, begin)

    def actions(self) -> npt.NDArray[np.int64]:
        """What the plans do where the lanes stand."""
        rounds = self.rounds
        in_scan = self._target == rounds.candidate
        in_draft = rounds.n_drafted < self._length
        before, scanning = rounds.stage == Stage.PRE_SCAN, rounds.stage == Stage.SCAN
        return np.where(before, self._begin, np.where(scanning, in_scan, in_draft)).astype(np.int64)


def _flatten(columns: list[npt.NDArray[Any]], episode: str) -> RoundTransitions:
    """Rows of the lanes that were alive, step by step; columns are `(step, lane, ...)`."""
    alive = np.asarray(columns[0], dtype=np.bool_)
    place = np.cumsum(alive.ravel()).reshape(alive.shape) - 1
    following = np.zeros_like(place)
    following[:-1] = place[1:]
    seen, actions, tokens, seconds, progress, round_end, done = (column[alive] for column in columns[1:])
    done = np.asarray(done, dtype=np.bool_)
    next_row = np.where(done, np.arange(done.size), following[alive])
    end = np.asarray(round_end, dtype=np.bool_) if episode == "round" else done
    unused = np.zeros(done.size, dtype=np.int16)
    transitions = Transitions(
        observations=np.asarray(seen, dtype=np.float32),
        actions=np.asarray(actions, dtype=np.int16),  # many layers times many fixed lengths pass 127
        rewards=np.zeros(done.size, dtype=np.float32),
        exit_layer=unused,
        match=unused.astype(np.int8),
        token_end=np.asarray(round_end, dtype=np.bool_),
        next_row=next_row,
        episode_end=end,
        terminated=end,
        episode="token",  # gamma is 1, and nothing is counted per token
    )
    return RoundTransitions(transitions, tokens.astype(np.float32), seconds, progress)


def join(parts: list[RoundTransitions]) -> RoundTransitions:
    """Several recordings as one."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    first = parts[0].transitions
    names = ("observations", "actions", "rewards", "exit_layer", "match", "token_end", "episode_end", "terminated")
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part.transitions, name) for part in parts]) for name in names
    }
    next_row = np.concatenate([part.transitions.next_row + start for part, start in zip(parts, starts, strict=True)])
    return RoundTransitions(
        replace(first, next_row=next_row, **columns),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.progress for part in parts]),
    )
