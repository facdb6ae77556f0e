"""Experience with rounds: what is recorded, and what it is worth."""

from __future__ import annotations

import numpy as np
import pytest

from lede.ceilings import solve
from lede.cost_tables import CostTables
from lede.draft_rounds import DraftRounds
from lede.optimal_drafting import DraftingProblem
from lede.policies.base import BLIND, ExitAt
from lede.rewards import CONTINUE, EXIT
from lede.round_behaviour import RoundTransitions, join, record
from lede.trace_table import TraceTable

PROBLEM = DraftingProblem()
N_TOKENS = 33


def played(episode: str = "prompt", seed: int = 0, **settings: object) -> tuple[DraftRounds, RoundTransitions]:
    table = TraceTable.from_traces(PROBLEM.traces(40, N_TOKENS, seed=1), N_TOKENS, PROBLEM.text.vocab_size)
    costs = CostTables(PROBLEM.cost_model, PROBLEM.text.candidates, table.max_context, PROBLEM.max_draft)
    rounds = DraftRounds(table, costs, PROBLEM.features)
    best = solve(table, PROBLEM.cost_model, PROBLEM.text.candidates, PROBLEM.max_draft)
    rng = np.random.default_rng(seed)
    return rounds, record(rounds, rng, episode=episode, clairvoyant=best, **settings)  # type: ignore[arg-type]


def test_every_second_and_token_is_recorded() -> None:
    rounds, found = played()
    assert found.seconds.sum() == pytest.approx(rounds.seconds.sum())
    assert found.tokens.sum() == rounds.tokens.sum() == 40 * (N_TOKENS - 1)
    assert found.progress.sum() == pytest.approx(found.tokens.sum())
    priced, shaped = found.priced(0.05), found.priced(0.05, shaped=True)
    wanted = found.tokens.sum() - 0.05 * found.seconds.sum()
    for transitions in (priced, shaped):
        assert transitions.rewards.sum(dtype=np.float64) == pytest.approx(wanted, rel=1e-4)
    assert not np.allclose(priced.rewards, shaped.rewards)


def test_hindsight_pays_a_draft_where_it_is_drafted() -> None:
    """A verification is worth its own token however much was drafted, and rounds are worth what they were."""
    _, found = played("round")
    steps, drafted = found.transitions, PROBLEM.features.names.index("drafted")
    stops = (steps.actions == CONTINUE) & (steps.observations[:, -1] == 1)
    assert np.corrcoef(found.tokens[stops], steps.observations[stops, drafted])[0, 1] > 0.2
    assert abs(np.corrcoef(found.progress[stops], steps.observations[stops, drafted])[0, 1]) < 0.1
    assert found.progress[stops].std() < 0.7 * found.tokens[stops].std()
    drafts = (steps.actions == EXIT) & (steps.observations[:, -2:] == 1).any(axis=1) & ~steps.episode_end
    assert (found.tokens[drafts] == 0).all()
    assert (found.progress[drafts] >= -1e-9).all()
    assert 0.2 < (found.progress[drafts] > 0.1).mean() < 0.95  # a wrong draft earns nothing


def test_each_row_leads_to_the_next_of_its_prompt() -> None:
    _, found = played()
    steps = found.transitions
    assert steps.episode_end.sum() == 40
    assert (steps.terminated == steps.episode_end).all()
    followed = np.sort(steps.next_row[~steps.episode_end])
    assert (np.diff(followed) > 0).all()  # nobody has two predecessors
    drafted = PROBLEM.features.names.index("drafted")
    # drafting on counts one more, in the very next row
    goes_on = (steps.actions == EXIT) & (steps.observations[:, -1] == 1) & ~steps.token_end
    after = steps.observations[steps.next_row[goes_on], drafted]
    assert (after == steps.observations[goes_on, drafted] + 1).all()
    assert goes_on.sum() > 100


def test_round_episodes_end_with_every_verification() -> None:
    _, by_prompt = played()
    _, by_round = played("round")
    assert (by_round.transitions.episode_end == by_prompt.transitions.token_end).all()
    assert (by_round.tokens[~by_round.transitions.episode_end] == 0).all()


def test_exploration_tries_everything_and_stays_legal() -> None:
    _, found = played()
    steps = found.transitions
    scanning, drafting = steps.observations[:, -2] == 1, steps.observations[:, -1] == 1
    before = ~scanning & ~drafting
    plans = np.bincount(steps.actions[before], minlength=BLIND + 3)
    assert (plans > 20).all()
    assert set(steps.actions[~before].tolist()) == {CONTINUE, EXIT}
    depths = steps.observations[scanning, 0]
    for depth in np.unique(depths):
        here = steps.actions[scanning][depths == depth]
        assert 0.1 < here.mean() < 0.9
    assert steps.observations[drafting, PROBLEM.features.names.index("drafted")].max() == PROBLEM.max_draft - 1


def test_there_may_be_more_plans_than_a_byte_counts() -> None:
    rounds, _ = played()
    fixed = [ExitAt(int(layer), n) for layer in rounds.candidates for n in range(1, 61)]
    many = DraftRounds(rounds.table, rounds.costs, PROBLEM.features, plans=fixed)
    actions = record(many, np.random.default_rng(0)).transitions.actions
    assert many.n_actions == BLIND + 3 + 180
    assert actions.min() == 0
    assert actions.max() > 127


def test_what_is_not_explored_follows_the_policy() -> None:
    def skip(seen: np.ndarray, legal: np.ndarray) -> np.ndarray:
        return np.zeros(len(seen), dtype=np.int64)

    _, all_skipped = played(greedy=skip, explore=0.0)
    # the last token has no room for a draft: it comes with the one before, and nobody is asked
    assert len(all_skipped) == 40 * (N_TOKENS - 2)
    assert np.bincount(all_skipped.tokens.astype(int)).tolist() == [0, 40 * (N_TOKENS - 3), 40]
    _, mixed = played(greedy=skip, explore=0.0, flips=0.2)
    assert 0.05 < (mixed.transitions.actions != CONTINUE).mean() < 0.4
    with pytest.raises(ValueError, match=r"explore is 0\.5, so a share of the rounds needs a policy"):
        played(explore=0.5)


def test_joined_recordings_keep_their_links() -> None:
    _, one = played(seed=0)
    _, other = played(seed=3)
    both = join([one, other])
    assert len(both) == len(one) + len(other)
    tail = both.transitions.next_row[len(one) :] - len(one)
    assert (tail == other.transitions.next_row).all()
    assert (both.transitions.next_row[: len(one)] == one.transitions.next_row).all()
    assert both.priced(0.1).rewards[len(one) :] == pytest.approx(other.priced(0.1).rewards)


def test_the_optimum_beats_what_can_be_played() -> None:
    """The rate of the solution is above that of exploration and its worth vanishes there."""
    rate = PROBLEM.rate()
    assert PROBLEM.worth(rate) == pytest.approx(0, abs=1e-6)
    assert PROBLEM.worth(0.9 * rate) > 0 > PROBLEM.worth(1.1 * rate)
    rounds, _ = played()
    assert rounds.tokens.sum() / rounds.seconds.sum() < 0.95 * rate
    assert rate > 1.2 / PROBLEM.cost_model.plain_seconds(0)
