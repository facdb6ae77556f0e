"""Drafting with a known optimum: the yardstick of what learns to save seconds.

Every token is in one of S states at each candidate, drawn anew for each token as in `lede.optimal_stopping`; the top-1
probability it shows is the probability that its draft is accepted. So `survival`, the product of those of a round's
drafts, is the probability that all of them are accepted, and with the position's own it is all that can be known. With
costs that do not depend on the context, rounds are alike, and the best ratio of tokens to seconds is the rate at which
the best round is worth nothing: max E[tokens - rate * seconds] = 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lede.cost_model import CostModel, Costs
from lede.features import FeatureConfig
from lede.optimal_stopping import StoppingProblem

if TYPE_CHECKING:
    from lede.buffers.records import PromptTrace

Array = npt.NDArray[np.float64]

DRAFTING_COSTS = Costs(
    span=0.0, layer=1.0, layer_block=0.1, layer_token=0.05, layer_context=0.0, layer_pair=0.0,
    head=0.5, head_block=0.1, head_token=0.02, embed=0.1, observe=0.1, features=0.1, features_entropy=0.1,
    features_top_k=0.2, policy=0.05, choose=0.05, accept=0.05, accept_token=0.01,
)  # fmt: skip
"""Seconds of an imagined machine, none of them growing with the context."""


@dataclass(frozen=True)
class DraftingProblem:
    """Rounds on texts whose tokens are independent of one another."""

    text: StoppingProblem = field(default_factory=lambda: StoppingProblem(candidates=(2, 4, 8)))
    """States of a token at the candidates, and how often their drafts are accepted."""
    costs: Costs = DRAFTING_COSTS
    """Seconds; nothing may depend on the context."""
    max_draft: int = 4
    """Most tokens drafted in a round."""
    features: FeatureConfig = FeatureConfig(("depth", "surprisal", "drafted", "survival", "in_scan", "in_draft"))
    """What is observed: all that can be known, with redundancy."""

    @property
    def cost_model(self) -> CostModel:
        """The costs of a model of the text's depth with full attention."""
        return CostModel(self.text.n_layers, (None,) * self.text.n_layers, self.costs)

    def traces(self, n_prompts: int, n_tokens: int, seed: int) -> list[PromptTrace]:
        """Texts of `n_tokens` new tokens whose top-1 probabilities tell the truth."""
        told = {round(entropy, 5): a for entropy, a in zip(self.text.entropies, self.text.acceptance, strict=True)}
        keys, chances = np.asarray(sorted(told)), np.asarray([told[key] for key in sorted(told)])
        found = []
        for trace in self.text.traces(n_prompts, n_tokens, seed):
            which = np.abs(trace.entropy[..., None] - keys).argmin(axis=-1)
            found.append(replace(trace, top1=np.log(chances[which]).astype(np.float32)))
        return found

    def rate(self) -> float:
        """Tokens a second of the best policy, by bisection; the last rounds of a text, cut short, are left out."""
        low, high = 0.0, (self.max_draft + 1) / self.cost_model.seconds(0, 1)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.worth(middle) > 0 else (low, middle)
        return high

    def worth(self, rate: float) -> float:
        """Expected tokens minus `rate` times seconds of the best round."""
        model, text, features = self.cost_model, self.text, self.features
        candidates, chances = text.candidates, np.asarray(text.acceptance)
        moves, state = np.asarray(text.moves), np.asarray(text.start)
        marginal = []  # of the state at each candidate
        for _ in candidates:
            marginal.append(state)
            state = state @ moves
        ask, blindly = model.decision_seconds(features), model.blind_seconds(features)  # who asks has the token as well

        @cache
        def drafting(k: int, n: int, alive: float) -> float:
            """N tokens are drafted and all accepted with probability `alive`: what is still to come."""
            position = self.costs.embed + model.seconds(0, candidates[k])
            stop = model.verify_seconds(candidates[k], n + 1, 0)
            if n == self.max_draft:
                return -rate * (position + stop)
            further = [alive * a + drafting(k, n + 1, round(alive * a, 12)) for a in chances.tolist()]
            best = np.maximum(further, -rate * stop)
            return float(-rate * (position + ask) + marginal[k] @ best)

        def drafted(k: int) -> Array:
            """Worth of drafting a token of each state at a candidate, `(state,)`, its head read aside."""
            return np.asarray([a + drafting(k, 1, round(a, 12)) for a in chances.tolist()])

        scan = np.full(chances.size, -rate * model.verify_seconds(candidates[-1], 1, 0))
        for k in reversed(range(len(candidates))):
            below = candidates[k - 1] if k else 0
            cost = model.seconds(below, candidates[k], resumed=below > 0) + ask + (0.0 if below else self.costs.embed)
            best = np.maximum(drafted(k), scan)
            # what the candidate is worth before its state is known, by the state of the candidate before
            scan = -rate * cost + (moves @ best if k else np.full(chances.size, np.asarray(text.start) @ best))
        blind = [
            marginal[k] @ drafted(k) - rate * (self.costs.embed + model.seconds(0, layer) + blindly)
            for k, layer in enumerate(candidates)
        ]
        plans = max(-rate * model.plain_seconds(0), float(scan[0]), *map(float, blind))
        return 1.0 - rate * model.pre_scan_seconds(features) + plans
