"""Settings of static lookups, played on recorded texts: what a tuning of `lookup` races by the clock.

What a lookup proposes is a function of the text, so a text that was written once tells the rounds of every setting:
only their seconds come from a cost profile. Hence every setting is tried, and the clock decides between the best ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, get_args

from lede.lookup import Continuation, LookupConfig
from lede.lookup_player import LookupPlayer, Played
from lede.lookup_table import LookupTable
from lede.policies.base import Lookup
from lede.trace_table import TraceTable

if TYPE_CHECKING:
    from lede.buffers.records import PromptTrace
    from lede.cost_model import CostModel
    from lede.models import EarlyExitModel

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
"""Tokens that may be copied."""
SUFFIXES = (2, 3, 4, 6, 8)
"""Longest suffixes that may be searched for."""
SHORTEST = (1, 2, 3, 4, 6)
"""Shortest suffixes that may be searched for: the longer, the fewer and the better the drafts."""
CONTINUATIONS: tuple[Continuation, ...] = get_args(Continuation)

RACED = 6
"""Settings that are raced by the clock."""
MARGIN = 0.02
"""Share by which pruning must be faster on the traces to be raced: a head read at every position is certain to cost."""
CONTEXTS, REPEATS = (128, 512), 3
"""Context lengths in tokens, and repetitions, of the quick cost profile; the model must have positions for one."""
BATCH_SIZE = 8
"""Prompts that share forward passes when texts are written."""


@dataclass(frozen=True)
class LookupFits:
    """The best settings."""

    texts: tuple[str, ...]
    """As a command line gives them, the best on the texts first."""
    evaluations: int
    """Settings that were played, times the prompts that each was played on."""
    collecting_seconds: float
    """Spent on texts and on the cost profile."""
    search_seconds: float
    """Spent on playing."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "texts": list(self.texts)}


def fit_lookups(
    model: EarlyExitModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    layers: Sequence[int] = (),
) -> LookupFits:
    """Write texts, measure costs, and play every setting on them.

    Args:
        model: The model.
        prompts: Token ids of each validation prompt.
        max_new_tokens: Budget of new tokens a prompt.
        temperature: Temperature of the texts; 0 is greedy.
        seed: Of the texts.
        layers: Layers that may prune.

    Raises:
        ImportError: What writes texts is not installed (gymnasium and zarr).
        ValueError: No prompt was answered by two tokens.
    """
    from lede.collectors.teacher import collect_teacher
    from lede.cost_measurement import fitting
    from lede.envs import Rules
    from lede.profiling import measured_profile
    from lede.verification import Warp

    begin = perf_counter()
    read = tuple(layers) or (1,)
    rules = Rules(read, max_new_tokens, warp=Warp(temperature))
    numbered = [(index, list(ids)) for index, ids in enumerate(prompts)]
    traces = list(collect_teacher(model, numbered, rules, seed, BATCH_SIZE))
    costs = measured_profile(model, fitting(CONTEXTS, model), read, REPEATS).costs
    collecting = perf_counter() - begin
    played = play_all(traces, costs, max_new_tokens, sorted(model.eos_token_ids), layers)
    return LookupFits(
        texts=tuple(each.setting.text for each in worth_racing(played)),
        evaluations=len(played) * len(numbered),
        collecting_seconds=collecting,
        search_seconds=perf_counter() - begin - collecting,
    )


def play_all(
    traces: Sequence[PromptTrace],
    costs: CostModel,
    max_new_tokens: int,
    eos: Iterable[int] = (),
    layers: Sequence[int] = (),
) -> list[Played]:
    """Play every setting, the fastest first; of equals, the earlier in the grid.

    Args:
        traces: Recorded texts, and what each layer says on them.
        costs: What operations cost.
        max_new_tokens: Budget that the texts were written under.
        eos: Ids that end a text.
        layers: Layers that may prune.

    Raises:
        ValueError: No text has two new tokens.
    """
    told = [trace for trace in traces if trace.n_decided]
    if not told:
        raise ValueError("no text has anything to look up; give prompts that are answered by at least 2 tokens")
    table = TraceTable.from_traces(told, max_new_tokens, vocab_size=2)  # bounds an entropy that nobody looks at
    found: list[Played] = []
    for longest, shortest, continuation in itertools.product(SUFFIXES, SHORTEST, CONTINUATIONS):
        if shortest > longest:
            continue
        lookups = LookupTable.from_table(table, LookupConfig(longest, shortest, continuation), max(LENGTHS), list(eos))
        player = LookupPlayer(lookups, costs)
        for prune_at in (None, *layers):
            found += [player.play(Lookup(length, prune_at)) for length in LENGTHS]
    return sorted(found, key=lambda each: -each.rate)


def worth_racing(played: Sequence[Played], n: int = RACED) -> list[Played]:
    """The settings that the clock should decide between.

    How to search is a matter of the text and settled by it; what lengths and pruning cost is the clock's. So of each
    length and pruning layer the best search is taken, and of these the fastest. Pruning must pay by more than `MARGIN`.

    Args:
        played: Settings, the fastest first.
        n: How many are wanted at most.
    """
    best: dict[Lookup, Played] = {}
    for each in played:
        best.setdefault(each.setting.plan, each)
    unpruned = max((each.rate for plan, each in best.items() if plan.prune_at is None), default=0.0)
    worth = [e for plan, e in best.items() if plan.prune_at is None or e.rate > (1 + MARGIN) * unpruned]
    return worth[:n]
