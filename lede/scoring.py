"""What a policy in training is worth in seconds: simulated on validation prompts, held against the clairvoyant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lede.ceilings import solve
from lede.cost_model import CostModel
from lede.draft_rounds import DraftRounds, Stage
from lede.learning_curve import GreedyScore
from lede.lookup_table import LookupTable
from lede.policies.learned import LearnedPolicy
from lede.regret import split
from lede.simulation import Simulation, play, rounds_of
from lede.trace_table import TraceTable

Array = npt.NDArray[np.float64]


class Scorer:
    """Scores policies that share candidates and cap on one table.

    Args:
        table: Traces of validation prompts.
        costs: What operations cost.
        candidates: Candidate layers.
        max_draft: Most tokens drafted in a round.
        lookup: What the text drafts; None where it does not.
    """

    def __init__(
        self,
        table: TraceTable,
        costs: CostModel,
        candidates: Sequence[int],
        max_draft: int,
        lookup: LookupTable | None = None,
    ) -> None:
        self.table, self.costs = table, costs
        self._best = solve(table, costs, candidates, max_draft, lookup=lookup)

    def __call__(self, policy: LearnedPolicy, rate: float | None = None) -> GreedyScore:
        """The policy's score.

        Args:
            policy: What is scored.
            rate: Price of a second in tokens that its values rest on; gives `q_error`.
        """
        values: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]] = []

        def decide(lanes: DraftRounds) -> npt.NDArray[np.int64]:
            seen, legal = lanes.observe(), lanes.legal()
            if rate is not None:
                here = np.flatnonzero(lanes.stage == Stage.PRE_SCAN)
                worth = policy.q_values(seen[here]).max(axis=1)
                values.append((lanes.prompt[here], lanes.decision[here], worth))
            return policy.decide(seen, legal)

        found = play(rounds_of(policy, self.table, self.costs), decide)
        worth = 0.0 if rate is None else 1 - rate / found.rate
        return GreedyScore(
            reward=worth,
            acceptance=found.acceptance,
            exit_layer=found.exit_layer,
            exit_rate=float((found.log.layer > 0).mean()),
            n_tokens=int(found.tokens.sum()),
            speedup=found.speedup,
            draft_length=found.draft_length,
            exits={str(layer): share for layer, share in found.layer_shares().items()},
            regret=split(found, self._best).shares(),
            sources={source: rounds for source, (rounds, _) in found.source_shares().items()},
            q_error=None if rate is None else _calibration(found, values, rate),
        )


def _calibration(
    found: Simulation,
    values: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]],
    rate: float,
) -> float:
    """Mean of value minus return over the rounds that were decided about; returns run to the end of the prompt."""
    log = found.log
    prompt, decision, worth = (np.concatenate(column) for column in zip(*values, strict=True))
    order = np.lexsort((decision, prompt))
    earned = log.n_committed - rate * log.seconds
    # sums from each round to the end of its prompt
    from_here = np.cumsum(earned[::-1])[::-1]
    last = np.searchsorted(log.prompt, log.prompt, side="right")
    beyond = np.append(from_here, 0.0)[last]
    place = np.searchsorted(_key(log.prompt, log.decision), _key(prompt[order], decision[order]))
    return float((worth[order] - (from_here - beyond)[place]).mean(dtype=np.float64))


def _key(prompt: npt.NDArray[np.int64], decision: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return prompt * 2**32 + decision
