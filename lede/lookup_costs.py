"""What rounds that draft by lookup cost, laid out by context."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from lede.cost_model import CostModel
from lede.cost_tables import by_context
from lede.trace_table import Ints

Array = npt.NDArray[np.float64]


class LookupCosts:
    """Seconds of such rounds, the decision aside; contexts count the tokens in the cache before the round.

    Args:
        costs: The cost model.
        max_context: Most tokens in the cache before a round.
    """

    def __init__(self, costs: CostModel, max_context: int) -> None:
        self.costs = costs
        self._n_contexts = max_context + 1
        self._made: dict[tuple[str, int, int], Array] = {}
        self.plain = by_context(costs, self._n_contexts, costs.plain_seconds)
        """Of a plain pass, `(context,)`."""
        self.index = costs.costs.index
        """Of a committed token."""

    def unpruned(self, q: Ints, context: Ints) -> Array:
        """All layers over `q` tokens, the newest one of the text and what is verified behind it, `(lane,)`."""
        return self._begin + self._at("verify", 0, q, context)

    def pruned(self, layer: int, read: Ints, q: Ints, context: Ints) -> Array:
        """The same with a draft that is cut at a layer, `(lane,)`.

        Args:
            layer: The layer.
            read: Tokens that go through the layers up to it and the head.
            q: Tokens that go on.
            context: Tokens in the cache.
        """
        below = self._at("below", layer, read, context)
        return self._begin + self.costs.costs.choose + below + self._at("verify", layer, q, context)

    @property
    def _begin(self) -> float:
        return self.costs.costs.propose + self.costs.costs.embed

    def _at(self, part: str, layer: int, q: Ints, context: Ints) -> Array:
        found = np.zeros(q.size)
        for n in np.unique(q).tolist():
            key = (part, layer, n)
            if key not in self._made:
                cost: Callable[[int], float] = partial(
                    self.costs.verify_seconds if part == "verify" else self._below, layer, n
                )
                self._made[key] = by_context(self.costs, self._n_contexts, cost)
            here = q == n
            found[here] = self._made[key][context[here]]
        return found

    def _below(self, layer: int, q: int, context: int) -> float:
        return self.costs.seconds(0, layer, q, context) + self.costs.head_seconds(q)
