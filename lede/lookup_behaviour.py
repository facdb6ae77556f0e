"""Experience with rounds that are one decision each: what every choice would have brought, wherever play leads.

Where drafts come from the text alone, a round is a function of where it begins and of the choice, so that a recorded
text tells what each choice brings. Learning from all of them at every state compares choices on the same text, and the
luck of the text, which is most of the noise, cancels. What is left out is what a round does to the features of later
ones: an episode is a round here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lede.ceilings import Clairvoyant
from lede.draft_rounds import DraftRounds, Stage
from lede.lookup_costs import LookupCosts
from lede.lookup_rounds import lookup_rounds
from lede.policies.base import BLIND
from lede.rewards import CONTINUE
from lede.round_behaviour import Greedy, RoundTransitions
from lede.transitions import Transitions

_SKIPS = 0.2


def record_choices(
    rounds: DraftRounds,
    rng: np.random.Generator,
    clairvoyant: Clairvoyant,
    greedy: Greedy | None = None,
    explore: float = 1.0,
    copies: int = 1,
) -> RoundTransitions:
    """Decode the prompts of the rounds' table, and write down every choice at every state on the way.

    Args:
        rounds: The process, without candidates.
        rng: Draws what is explored.
        clairvoyant: Of the same table; gives `progress`.
        greedy: The policy of what is not explored; needed if `explore` is below 1.
        explore: Share of rounds that choose at random.
        copies: Times that every prompt is decoded.
    """
    if rounds.candidates.size or rounds.lookup is None:
        raise ValueError("only rounds that draft from the text alone are one decision each")
    if greedy is None and explore < 1:
        raise ValueError(f"explore is {explore}, so a share of the rounds needs a policy; give greedy")
    rounds.start(np.tile(np.arange(rounds.table.n_prompts), copies))
    lanes, plans = rounds.stage.size, len(rounds.lookups)
    parts: list[tuple[npt.NDArray[np.generic], ...]] = []
    while (alive := rounds.stage != Stage.DONE).any():
        seen, here = rounds.observe(), np.flatnonzero(alive)
        parts.append((seen[here], rounds.row[here], rounds.decision[here], rounds.prompt[here]))
        actions = np.where(rng.random(lanes) < _SKIPS, CONTINUE, BLIND + rng.integers(0, plans, lanes))
        if greedy is not None:
            chosen = np.asarray(greedy(seen, rounds.legal()))
            actions = np.where(rng.random(lanes) < explore, actions, chosen)
        rounds.step(actions)
    seen, row, decision, prompt = (np.concatenate(column) for column in zip(*parts, strict=True))
    return _choices(rounds, clairvoyant, seen, row, decision, prompt)


def _choices(
    rounds: DraftRounds,
    clairvoyant: Clairvoyant,
    seen: npt.NDArray[np.float32],
    row: npt.NDArray[np.int64],
    decision: npt.NDArray[np.int64],
    prompt: npt.NDArray[np.int64],
) -> RoundTransitions:
    """Rows of all choices, one after the other for each state."""
    assert rounds.lookup is not None
    costs = LookupCosts(rounds.costs.costs, rounds.table.max_context)
    asked = rounds.costs.pre_scan(rounds.features)
    context = rounds.table.prompt_length[prompt] + decision - 1
    numbers, tokens, seconds = [CONTINUE], [np.ones_like(row)], [costs.plain[context]]
    for place, plan in enumerate(rounds.lookups):
        found = lookup_rounds(rounds.lookup, costs, plan, row, decision)
        numbers.append(BLIND + place)
        tokens.append(found.tokens)
        seconds.append(found.seconds)
    committed, n = np.stack(tokens, axis=1), row.size * len(numbers)
    spent = np.stack(seconds, axis=1) + asked + costs.index * committed
    before = clairvoyant.value_at(prompt, decision)
    after = np.stack([clairvoyant.value_at(prompt, decision + column) for column in committed.T], axis=1)
    end, unused = np.ones(n, dtype=np.bool_), np.zeros(n, dtype=np.int16)
    transitions = Transitions(
        observations=np.repeat(seen, len(numbers), axis=0),
        actions=np.tile(np.asarray(numbers, dtype=np.int16), row.size),
        rewards=np.zeros(n, dtype=np.float32),
        exit_layer=unused,
        match=unused.astype(np.int8),
        token_end=end,
        next_row=np.arange(n),
        episode_end=end,
        terminated=end,
        episode="token",
    )
    progress = (before[:, None] - after) * clairvoyant.rate
    return RoundTransitions(transitions, committed.ravel().astype(np.float32), spent.ravel(), progress.ravel())
