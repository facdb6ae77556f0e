"""Where a policy loses time against the clairvoyant, round by round.

With S the clairvoyant's fewest seconds to the end of the text (see `lede.ceilings`), a round that starts at decision t,
takes r seconds and leads to t' costs r + S(t') - S(t) seconds more than it had to. Over the rounds of a prompt these
differences add up to the policy's seconds less the clairvoyant's (the performance-difference identity). Each is split
by replacing what the policy did, one thing after the other, always with the clairvoyant from the next round on:

1. inspection: the same draft, or the same plain pass, without any inspection or decision;
2. drafted too far, stopped too early: a draft of the length that is best at the same layer. Where that layer is wrong
   at once, the best length is 1, so what is left is the fault of drafting there at all;
3. wrong layer, wrong source, should have skipped: what the clairvoyant does, another layer, a draft from the text
   instead of one from layers or the other way round, or a plain pass;
4. should have drafted: for a plain pass, what the clairvoyant does instead.

The index of lookups and proposals that were cut count as inspection.

Each step replaces a choice by one that is at least as good, so that no part is negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lede.ceilings import Clairvoyant
from lede.round_log import ENDINGS, SOURCES, RoundLog

if TYPE_CHECKING:
    from lede.simulation import Simulation

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PARTS = {
    "wrong_layer": "wrong layer",
    "wrong_source": "wrong source",
    "stopped_early": "stopped too early",
    "drafted_far": "drafted too far",
    "inspection": "inspection",
    "should_skip": "should have skipped",
    "should_draft": "should have drafted",
}
"""What time is lost on, with the words of tables."""


@dataclass(frozen=True, eq=False)
class Regret:
    """Seconds that a policy spends beyond the clairvoyant's."""

    seconds: Array  # (prompt,)
    """The policy's own."""
    fewest: Array  # (prompt,)
    """The clairvoyant's."""
    parts: dict[str, Array]
    """Lost seconds by part, `(prompt,)` each; with `fewest` they add up to `seconds`."""

    def shares(self) -> dict[str, float]:
        """Each part over all of the policy's seconds; what is missing to 1 is the clairvoyant's share."""
        total = self.seconds.sum()
        return {name: float(lost.sum() / total) for name, lost in self.parts.items()}

    @property
    def of_clairvoyant(self) -> float:
        """The policy's rate over the clairvoyant's."""
        return float(self.fewest.sum() / self.seconds.sum())


def split(simulation: Simulation, clairvoyant: Clairvoyant) -> Regret:
    """Split the time that a simulated policy loses.

    Args:
        simulation: Of the policy, on the clairvoyant's table and with the same seed and cost model.
        clairvoyant: Its candidates include every layer that the policy drafted at, it may draft as far, and where the
            policy copied from the text it knows the same lookups.

    Raises:
        ValueError: They do not.
    """
    log, table = simulation.log, clairvoyant.table
    parts = {name: np.zeros(len(log)) for name in PARTS}
    by_layers, plain, by_lookup = (np.flatnonzero(log.source == SOURCES.index(s)) for s in ("exit", "plain", "lookup"))
    after = clairvoyant.value_at(log.prompt, log.decision + log.n_committed)
    row = table.first_row[log.prompt] + log.decision - 1

    here = row[plain]
    parts["inspection"][plain] = log.seconds[plain] - clairvoyant.plain_seconds[here]
    parts["should_draft"][plain] = clairvoyant.plain_value[here] - clairvoyant.value[here]

    context = table.prompt_length[log.prompt] + log.decision - 1
    ends = (log.ending == ENDINGS.index("eos")).astype(np.int64)
    here, k = row[by_layers], _places(log, clairvoyant)[by_layers]
    spent = clairvoyant.blind[ends[by_layers], k, log.n_drafted[by_layers], context[by_layers]]
    best, length = clairvoyant.draft_value[here, k], clairvoyant.draft_length[here, k]
    other = clairvoyant.lookup_value[here] < clairvoyant.draft_value[here].min(axis=1, initial=np.inf)
    _drafted(parts, log, clairvoyant, by_layers, spent, best, length, after, here, other)

    here = row[by_lookup]
    spent = clairvoyant.lookup_seconds[log.n_drafted[by_lookup] + 1 - ends[by_lookup], context[by_lookup]]
    best, length = clairvoyant.lookup_value[here], clairvoyant.lookup_length[here]
    other = np.ones(here.size, dtype=np.bool_)
    _drafted(parts, log, clairvoyant, by_lookup, spent, best, length, after, here, other)

    n_prompts = table.n_prompts
    return Regret(
        seconds=simulation.seconds,
        fewest=clairvoyant.seconds,
        parts={
            name: np.bincount(log.prompt, weights=lost, minlength=n_prompts).astype(np.float64)
            for name, lost in parts.items()
        },
    )


def _drafted(
    parts: dict[str, Array],
    log: RoundLog,
    clairvoyant: Clairvoyant,
    rounds: Ints,
    spent: Array,
    best: Array,
    length: Ints,
    after: Array,
    row: Ints,
    other_source: npt.NDArray[np.bool_],
) -> None:
    """Split rounds that drafted from one source.

    Args:
        parts: Lost seconds by part, `(round,)` each; those of `rounds` are written.
        log: All rounds.
        clairvoyant: The ceiling.
        rounds: Which rounds.
        spent: Seconds of their drafts without inspections.
        best: Seconds to the end of the text after the best draft from the same layer or the text.
        length: Its tokens.
        after: Seconds to the end after each round of the log.
        row: Row of the table where each begins.
        other_source: Where the best draft of all comes from the other source.
    """
    parts["inspection"][rounds] = log.seconds[rounds] - spent
    of_length = spent + after[rounds] - best
    parts["drafted_far"][rounds] = np.where(log.n_drafted[rounds] > length, of_length, 0.0)
    parts["stopped_early"][rounds] = np.where(log.n_drafted[rounds] <= length, of_length, 0.0)
    value = clairvoyant.value[row]
    skips, lost = clairvoyant.plain_value[row] <= value, best - value
    parts["should_skip"][rounds] = np.where(skips, lost, 0.0)
    parts["wrong_source"][rounds] = np.where(~skips & other_source, lost, 0.0)
    parts["wrong_layer"][rounds] = np.where(~skips & ~other_source, lost, 0.0)


def _places(log: RoundLog, clairvoyant: Clairvoyant) -> npt.NDArray[np.int64]:
    """Place of each round's exit layer among the clairvoyant's candidates, `(round,)`; 0 for plain passes."""
    candidates = np.asarray(clairvoyant.candidates, dtype=np.int64)
    used = np.unique(log.layer[log.layer > 0])
    strange = np.setdiff1d(used, candidates)
    if strange.size:
        raise ValueError(f"the policy drafts at layers {strange.tolist()}, which the clairvoyant may not use: add them")
    if log.n_drafted[log.layer > 0].max(initial=0) > clairvoyant.max_draft:
        raise ValueError(
            f"the policy drafts {log.n_drafted.max()} tokens in a round, more than the {clairvoyant.max_draft} that "
            "the clairvoyant may"
        )
    return np.where(log.layer > 0, np.searchsorted(candidates, log.layer), 0)
