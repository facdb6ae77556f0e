"""A cost model laid out in tables by context, so that many rounds can be priced at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from lede.cost_model import CostModel
from lede.features import FeatureConfig

Array = npt.NDArray[np.float64]


def by_context(costs: CostModel, n_contexts: int, cost: Callable[[int], float]) -> Array:
    """A cost of the model at contexts 0, 1, ..., `(context,)`: linear but where a sliding window fills."""
    contexts = np.arange(n_contexts)
    windows = {w - 1 for w in costs.windows if w is not None and w - 1 < contexts[-1]}
    knots = sorted({0, int(contexts[-1]), *windows})
    return np.interp(contexts, knots, [cost(knot) for knot in knots])


class CostTables:
    """Seconds of the parts of a round; contexts count the tokens in the cache before the block.

    The parts of a round add up to `CostModel.round_seconds`.

    Attributes:
        plain: A plain pass, `(context,)`.
        scan: Layers from the candidate before to candidate k, the first with its embedding, `(candidate, context)`.
        draft: Embedding and layers up to candidate k for the first position of a round, `(candidate, context)`.
        again: The same for a position that follows another one there, `(candidate, context)`.
        verify: q states from candidate k to the verdict, `(candidate, q, context)`; q from 1, column 0 is unused.

    Args:
        costs: The cost model.
        candidates: Candidate layers.
        max_context: Most tokens in the cache.
        max_draft: Most drafted tokens in a round.
    """

    def __init__(self, costs: CostModel, candidates: Sequence[int], max_context: int, max_draft: int = 12) -> None:
        self.costs = costs
        self.candidates = tuple(candidates)
        self.max_draft = max_draft
        contexts = np.arange(max_context + max_draft + 1)
        along = partial(by_context, costs, contexts.size)

        def span(first: int, last: int, context: int) -> float:
            """Layers first+1..last of one token, with its embedding if they are the first."""
            return costs.seconds(first, last, 1, context, resumed=first > 0) + (0.0 if first else costs.costs.embed)

        before = (0, *self.candidates)
        self.plain = along(costs.plain_seconds)
        shape = (len(self.candidates), contexts.size)  # no candidate at all is fine where drafts come from the text
        self.scan, self.draft, self.again = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for k, (below, layer) in enumerate(zip(before, self.candidates, strict=False)):
            self.scan[k] = along(partial(span, below, layer))
            self.draft[k] = along(partial(span, 0, layer))
            self.again[k] = along(partial(costs.again_seconds, layer)) + costs.costs.embed
        self.verify = np.zeros((len(self.candidates), max_draft + 2, contexts.size))
        for k, layer in enumerate(self.candidates):
            for q in range(1, max_draft + 2):
                self.verify[k, q] = along(partial(costs.verify_seconds, layer, q))
        self.head = costs.head_seconds()

    def decision(self, features: FeatureConfig | None, drafting: bool = False) -> float:
        """Seconds of asking a policy at a layer: head reads, features, policy; 0 if it observes nothing."""
        return 0.0 if features is None else self.costs.decision_seconds(features, drafting)

    def choice(self, features: FeatureConfig | None) -> float:
        """Seconds of a token from logits at hand; 0 if a policy has read them."""
        return self.costs.choice_seconds(features)

    def pre_scan(self, features: FeatureConfig | None) -> float:
        """Seconds of asking a policy before the scan; 0 if it does not decide there."""
        return 0.0 if features is None else self.costs.pre_scan_seconds(features)
