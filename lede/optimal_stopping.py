"""Optimal stopping with a known solution: the yardstick of the learner.

A token at candidate k is in one of S states; a state shows as an entropy, has a known probability of acceptance and
turns into the next candidate's state by a known matrix. With token episodes and gamma = 1 the best policy follows by
backward induction, V(k, s) = max(E[R | k, s], c + E[V(k + 1, s') | k, s]) with V = `final_reward` past the last
candidate, so a learner can be held against the optimum without sampling error.

Source: the reward and the actions of LEDE (arXiv 2606.03113, section 3.1); the rest is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lede.features import FeatureConfig
from lede.rewards import RewardConfig
from lede.seeding import Purpose, numpy_stream

if TYPE_CHECKING:
    from lede.buffers.records import PromptTrace

Array = npt.NDArray[np.float64]

# clear, likely, unsure, doubtful, hopeless: going deeper clears most tokens up, so waiting pays for several candidates
_ACCEPTANCE = (0.97, 0.75, 0.70, 0.35, 0.10)
_MOVES = (
    (1.00, 0.00, 0.00, 0.00, 0.00),
    (0.40, 0.50, 0.10, 0.00, 0.00),
    (0.20, 0.30, 0.30, 0.20, 0.00),
    (0.05, 0.25, 0.35, 0.30, 0.05),
    (0.00, 0.00, 0.05, 0.15, 0.80),
)
_START = (0.05, 0.15, 0.30, 0.40, 0.10)


@dataclass(frozen=True)
class StoppingProblem:
    """A Markov chain over candidates; the defaults make a problem in which both haste and patience are punished."""

    n_layers: int = 16
    """Layers of the imagined model."""
    candidates: tuple[int, ...] = (2, 4, 6, 8, 10, 12)
    """Candidate layers, ascending."""
    acceptance: tuple[float, ...] = _ACCEPTANCE
    """Probability that an exit is accepted, by state."""
    moves: tuple[tuple[float, ...], ...] = _MOVES
    """Row s: where state s goes from one candidate to the next."""
    start: tuple[float, ...] = _START
    """Distribution of the state at the first candidate."""
    entropies: tuple[float, ...] = (0.2, 0.9, 1.7, 2.6, 3.6)
    """Entropy by which a state shows, in nats."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """What the decisions earn."""
    vocab_size: int = 64
    """Vocabulary of the imagined model."""

    @property
    def exit_values(self) -> Array:
        """Expected reward of an exit, `(candidate, state)`."""
        layers = np.asarray(self.candidates)[:, None]
        return self.reward.exit(layers, self.n_layers, np.asarray(self.acceptance)).astype(np.float64)

    def observations(self, features: FeatureConfig) -> npt.NDArray[np.float32]:
        """What the policy sees, `(candidate, state, feature)`."""
        layers = np.asarray(self.candidates)[:, None]
        entropy = np.asarray(self.entropies)[None, :]
        values: dict[str, npt.ArrayLike] = {
            "confidence": _CONFIDENCE,
            "entropy": entropy,
            "trace": _SURPRISAL,
            "depth": layers / self.n_layers,
            "surprisal": _SURPRISAL,
            "margin": _SURPRISAL,
        }
        return features.observe(values, self.n_layers, self.vocab_size)

    def continue_values(self, values: Array) -> Array:
        """Expected return of a continue, `(candidate, state)`, when V is `values` (same shape)."""
        past_end = np.full((1, len(self.start)), self.reward.final_reward)
        return self.reward.continue_cost + np.vstack([values[1:] @ np.asarray(self.moves).T, past_end])

    def solve(self) -> tuple[npt.NDArray[np.bool_], float]:
        """Where it is best to exit, `(candidate, state)`, and the optimal value of a token."""
        return self._backward(n_steps=1)

    def plain_n_step_limit(self, n_steps: int) -> tuple[npt.NDArray[np.bool_], float]:
        """The policy that n-step Q-learning without correction tends to on uniform data, and its true value.

        Uniform data draws the exit candidate, or none, uniformly per token; the return then follows the behaviour for
        `n_steps` decisions before it bootstraps, so going on is priced as if the behaviour took over.
        """
        exits, _ = self._backward(n_steps)
        return exits, self.value(exits)

    def value(self, exits: npt.NDArray[np.bool_]) -> float:
        """True value of a token under a policy given as `exits` `(candidate, state)`."""
        values = np.zeros_like(self.exit_values)
        for k in reversed(range(len(self.candidates))):
            values[k] = np.where(exits[k], self.exit_values[k], self.continue_values(values)[k])
        return float(np.asarray(self.start) @ values[0])

    def _backward(self, n_steps: int) -> tuple[npt.NDArray[np.bool_], float]:
        exit_values, n = self.exit_values, len(self.candidates)
        best = np.zeros_like(exit_values)
        exits = np.zeros(best.shape, dtype=bool)
        for k in reversed(range(n)):
            going_on = self.continue_values(self._behave(best, n_steps - 1))[k]
            exits[k] = exit_values[k] > going_on
            best[k] = np.maximum(exit_values[k], going_on)
        return exits, float(np.asarray(self.start) @ best[0])

    def _behave(self, best: Array, n_steps: int) -> Array:
        """Expected return of `n_steps` uniform decisions, then the best ones, `(candidate, state)`."""
        n = len(self.candidates)
        exit_share = 1 / (n + 1 - np.arange(n))[:, None]  # exits left, and none, are equally likely
        values = best
        for _ in range(n_steps):
            values = exit_share * self.exit_values + (1 - exit_share) * self.continue_values(values)
        return values

    def traces(self, n_prompts: int, n_tokens: int, seed: int) -> list[PromptTrace]:
        """Traces of texts of `n_tokens` new tokens that EOS ends; layers between candidates repeat the one below."""
        from lede.buffers.records import PromptTrace

        which = np.searchsorted(self.candidates, np.arange(1, self.n_layers + 1), side="right") - 1  # (layer,)
        found = []
        for index in range(n_prompts):
            rng = numpy_stream(seed, Purpose.MATCHES, index)
            state = self._walk(rng, n_tokens - 1)[:, np.maximum(which, 0)]  # (token, layer)
            match = rng.random(state.shape) < np.asarray(self.acceptance)[state]
            match[:, -1] = True
            flat = np.full(state.shape, _CONFIDENCE)
            found.append(
                PromptTrace(
                    prompt_index=index,
                    prompt_ids=rng.integers(0, self.vocab_size, 4),
                    token_ids=rng.integers(0, self.vocab_size, n_tokens),
                    ended_by_eos=True,
                    anchor=_SURPRISAL,
                    confidence=flat.astype(np.float32),
                    entropy=np.asarray(self.entropies)[state].astype(np.float32),
                    top1=np.full(state.shape, -_SURPRISAL, dtype=np.float32),
                    top2=np.full(state.shape, -2 * _SURPRISAL, dtype=np.float32),
                    token=np.zeros(state.shape, dtype=np.int32),
                    match=match.astype(np.float32),
                    closing_confidence=np.zeros(self.n_layers, dtype=np.float32),
                    closing_entropy=np.zeros(self.n_layers, dtype=np.float32),
                )
            )
        return found

    def _walk(self, rng: np.random.Generator, n_tokens: int) -> npt.NDArray[np.int64]:
        """States of `n_tokens` tokens, `(token, candidate)`."""
        cumulative = np.cumsum(np.asarray(self.moves), axis=1)
        draws = rng.random((n_tokens, len(self.candidates)))
        last = len(self.start) - 1
        states = np.empty(draws.shape, dtype=np.int64)
        states[:, 0] = np.minimum(np.searchsorted(np.cumsum(self.start), draws[:, 0], side="right"), last)
        for k in range(1, len(self.candidates)):
            rows = cumulative[states[:, k - 1]]
            states[:, k] = np.minimum((rows <= draws[:, k, None]).sum(axis=1), last)
        return states


_CONFIDENCE = 5.0
"""The confidence that every state shows, in nats: it says nothing, only entropy and depth do."""
_SURPRISAL = 0.5
"""-log top-1 probability that every layer shows, in nats."""
