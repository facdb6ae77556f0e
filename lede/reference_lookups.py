"""Drafts from the text chosen by their expected tokens, searched on the simulator, and static ones beside them.

The best policy for the rate r of tokens a second copies n tokens where the tokens that they are expected to bring, less
r times the seconds that their verification takes beyond a plain pass, are most. What a round does to the features of
later ones is left out; hardly anything else is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from lede.copy_forecast import CopyForecast, copy_features, fit_copies
from lede.cost_model import CostModel
from lede.cost_tables import CostTables
from lede.draft_rounds import DraftRounds, Stage
from lede.features import FeatureConfig
from lede.lookup import Continuation, LookupConfig
from lede.lookup_costs import LookupCosts
from lede.lookup_player import LookupPlayer
from lede.lookup_table import LOOKUP_LENGTHS, lookups_of
from lede.policies.base import BLIND, Lookup
from lede.policies.lookup import LookupPolicy
from lede.policies.lookup_value import LookupValuePolicy
from lede.seeding import Purpose, numpy_stream
from lede.simulation import simulate
from lede.trace_table import TraceTable

if TYPE_CHECKING:
    from lede.phrases import PhraseMemory

SUFFIXES = (2, 3, 4)
"""Longest suffixes that are tried."""
SHORTEST = (1, 2)
"""Shortest suffixes of the static lookups that are tried."""
STATIC_COPIES = tuple(range(1, 17))
"""Lengths of the static lookups that are tried."""
_SCALES = (0.7, 0.85, 1.0, 1.2, 1.4)
_ROUNDS = 3


def best_static_lookup(
    table: TraceTable,
    costs: CostModel,
    config: LookupConfig | None = None,
    lengths: Sequence[int] = STATIC_COPIES,
    memory: PhraseMemory | None = None,
) -> LookupPolicy:
    """The static lookup with the largest simulated rate; of equals, the first in the grid.

    Args:
        table: Traces.
        costs: What operations cost.
        config: How the text is searched; None tries suffixes and continuations too. A short `min_suffix` of 2 is what
            keeps a static lookup from copying where copies fail; who decides round by round does better without it.
        lengths: Tokens copied.
        memory: Of other texts, which the policy carries.
    """
    configs = _configs(SUFFIXES, SHORTEST, get_args(Continuation)) if config is None else [config]
    found: list[tuple[float, LookupConfig, int]] = []
    for each in configs:
        player = LookupPlayer(lookups_of(table, each, max(lengths), memory), costs)
        found += [(player.play(Lookup(length)).rate, each, length) for length in lengths]
    _, best, length = max(found, key=lambda tried: tried[0])
    policy = LookupPolicy(
        draft_length=length,
        max_suffix=best.max_suffix,
        min_suffix=best.min_suffix,
        continuation=best.continuation,
    )
    policy.memory = memory
    return policy


def _configs(
    longest: Sequence[int], shortest: Sequence[int], continuations: Sequence[Continuation]
) -> list[LookupConfig]:
    grid = itertools.product(longest, shortest, continuations)
    return [LookupConfig(most, least, kind) for most, least, kind in grid if least <= most]


def search_lookup(
    table: TraceTable,
    costs: CostModel,
    max_suffix: int | None = None,
    continuation: Continuation | None = None,
    lengths: Sequence[int] = LOOKUP_LENGTHS,
    seed: int = 0,
    memory: PhraseMemory | None = None,
) -> LookupConfig:
    """How the text is best searched, by the rate of the reference.

    The shortest suffix is 1: where a copy is not worth it the policy says so itself, and a match of one token that goes
    on rightly is lost with a longer one.

    Args:
        table: Traces of training prompts.
        costs: What operations cost.
        max_suffix: The longest suffix; None tries several.
        continuation: What is copied; None tries both.
        lengths: Lengths of the drafts that are chosen from.
        seed: Of what the forecasts are fitted on.
        memory: Of other texts.
    """
    suffixes = SUFFIXES if max_suffix is None else (max_suffix,)
    configs = _configs(suffixes, (1,), get_args(Continuation) if continuation is None else (continuation,))
    if len(configs) == 1:
        return configs[0]

    def rate(config: LookupConfig) -> float:
        return simulate(reference_lookups(table, costs, config, lengths, seed=seed, memory=memory), table, costs).rate

    return max(configs, key=rate)


def reference_lookups(
    table: TraceTable,
    costs: CostModel,
    config: LookupConfig,
    lengths: Sequence[int] = LOOKUP_LENGTHS,
    features: FeatureConfig | None = None,
    seed: int = 0,
    memory: PhraseMemory | None = None,
    **settings: Any,
) -> LookupValuePolicy:
    """The best policy of its kind: a forecast fitted, prices at the rate that the policy itself comes to.

    Args:
        table: Traces of training prompts.
        costs: What operations cost.
        config: How the text is searched.
        lengths: Lengths of the drafts that are chosen from, ascending.
        features: What the forecast looks at.
        seed: Of the rounds that it is fitted on.
        memory: Of other texts, which the policy carries.
        **settings: More settings of the policy, and the fingerprint that binds it.
    """
    chosen = FeatureConfig(names=copy_features(memory is not None)) if features is None else features
    forecast = fit_forecast_of_copies(table, costs, config, lengths, chosen, seed, memory=memory)
    seconds = _more_seconds(table, costs, lengths)

    def priced(prices: npt.NDArray[np.float64]) -> LookupValuePolicy:
        plans = tuple(Lookup(length) for length in lengths)
        return LookupValuePolicy.from_forecast(
            forecast, lookup=config, lookups=plans, prices=tuple(prices.tolist()), memory=memory, **settings
        )

    def rate(policy: LookupValuePolicy) -> float:
        return simulate(policy, table, costs).rate

    found = simulate(None, table, costs).rate
    for _ in range(_ROUNDS):  # Dinkelbach's method: the best policy at its own rate has the largest
        found = max(found, rate(priced(found * seconds)))
    return max((priced(scale * found * seconds) for scale in _SCALES), key=rate)


def fit_forecast_of_copies(
    table: TraceTable,
    costs: CostModel,
    config: LookupConfig,
    lengths: Sequence[int],
    features: FeatureConfig,
    seed: int = 0,
    passes: int = 2,
    memory: PhraseMemory | None = None,
) -> CopyForecast:
    """A forecast fitted where lookups of random lengths lead."""
    lookup = lookups_of(table, config, max(lengths), memory)
    tables = CostTables(costs, (), table.max_context, 1)
    plans = [Lookup(length) for length in lengths]
    rounds = DraftRounds(table, tables, features, lookup=lookup, plans=plans)
    seen, rows = [], []
    for turn in range(passes):
        rng = numpy_stream(seed, Purpose.COPY_FORECAST, turn)
        rounds.start(np.arange(table.n_prompts))
        while (alive := rounds.stage != Stage.DONE).any():
            row, observed = rounds.row, rounds.observe()
            known = alive & (lookup.proposed[row] > 0)
            seen.append(observed[known])
            rows.append(row[known])
            rounds.step(BLIND + rng.integers(0, len(plans), row.size))
    row = np.concatenate(rows)
    return fit_copies(np.concatenate(seen), features, lookup.run[row], lookup.proposed[row])


def _more_seconds(table: TraceTable, costs: CostModel, lengths: Sequence[int]) -> npt.NDArray[np.float64]:
    """Seconds of verifying drafts beyond a plain pass, at the mean context, `(length,)`."""
    context = np.full(1, round(float((table.prompt_length + table.n_decided / 2).mean())))
    priced = LookupCosts(costs, table.max_context)
    whole = [float(priced.unpruned(np.full(1, length + 1), context)[0]) for length in lengths]
    return np.maximum(np.asarray(whole) - costs.plain_seconds(int(context[0])), 1e-12)
