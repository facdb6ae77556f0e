"""Who is faster than whom, by how much, and whether this machine can tell.

Contenders are compared prompt by prompt, on the prompts that both answered with more than one token. The headline is
the ratio of their rates, each a ratio of sums over prompts, with a bootstrap interval by prompt; the median of the
prompts' own ratios stands beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lede.bench_figures import PromptFigures
from lede.intervals import Bootstrap, Interval

FEWEST_PROMPTS = 6
"""Prompts below which nothing is resolved: with 5 that all go the same way, chance alone does that in 2 / 2^5 = 6 % of
cases, more often than the 5 % that an interval of 95 % leaves, and resamples of so few prompts vary too little."""


@dataclass(frozen=True)
class Speedup(Interval):
    """Tokens a second of one contender over another's."""

    median: float
    """Median over prompts of the ratio on each."""
    n_prompts: int
    """Prompts that both answered with more than one token."""
    resolved: bool
    """Whether the interval is clear of 1 and of what plain decoding against itself shows; see `is_clear`."""


def rate(figures: Sequence[PromptFigures], with_prefill: bool = False) -> Interval | None:
    """Tokens a second: those after the first over the seconds after the prefill, or all over all; None of nothing."""
    found = [_tokens_and_seconds(each, with_prefill) for each in figures if each.counts]
    tokens, seconds = [each[0] for each in found], [each[1] for each in found]
    return bootstrap(len(found)).ratio(tokens, seconds) if found else None


def speedup(
    figures: Sequence[PromptFigures],
    over: Sequence[PromptFigures],
    control: Interval | None = None,
    with_prefill: bool = False,
) -> Speedup | None:
    """How much faster one contender is than another; None where they share no prompt.

    Args:
        figures: The one, a prompt each.
        over: The other.
        control: Plain decoding over plain decoding; without it nothing is resolved.
        with_prefill: Whether to count the whole call.
    """
    pairs = []
    others = {each.prompt_index: each for each in over}
    for each in figures:
        other = others.get(each.prompt_index)
        if other is not None and each.counts and other.counts:
            pairs.append((*_tokens_and_seconds(each, with_prefill), *_tokens_and_seconds(other, with_prefill)))
    if not (sum(pair[1] for pair in pairs) > 0 and sum(pair[3] for pair in pairs) > 0):
        return None
    interval = bootstrap(len(pairs)).speedup(*zip(*pairs, strict=True))
    ratios = [
        tokens / seconds / (over_tokens / over_seconds)
        for tokens, seconds, over_tokens, over_seconds in pairs
        if min(seconds, over_seconds) > 0  # a difference of two calls may be below; sums hold it, a ratio can't
    ]
    return Speedup(
        interval.value,
        interval.lower,
        interval.upper,
        statistics.median(ratios) if ratios else interval.value,
        len(pairs),
        is_clear(interval, control, len(pairs)),
    )


def is_clear(interval: Interval, control: Interval | None, n_prompts: int) -> bool:
    """Whether a ratio is told apart from 1 on this machine.

    Its interval must neither hold 1 nor touch the control's, which says what comes out when nothing differs. Fewer
    than `FEWEST_PROMPTS` tell too little, and without a control nobody knows the machine.
    """
    if control is None or n_prompts < FEWEST_PROMPTS:
        return False
    return interval.lower > max(1.0, control.upper) or interval.upper < min(1.0, control.lower)


def break_even_tokens(cost_seconds: float, faster: Speedup | None, plain_rate: Interval | None) -> float | None:
    """Tokens after which what a contender cost beforehand is earned back; None when it is not faster than plain.

    Cost over the seconds that it saves a token: seconds a token of plain decoding less its own.
    """
    if faster is None or plain_rate is None or faster.value <= 1:
        return None
    saved = (1 - 1 / faster.value) / plain_rate.value
    return cost_seconds / saved


@lru_cache(maxsize=16)
def bootstrap(n_prompts: int) -> Bootstrap:
    """The resamples of so many prompts: the same ones for every contender."""
    return Bootstrap(n_prompts)


def _tokens_and_seconds(figures: PromptFigures, with_prefill: bool) -> tuple[float, float]:
    if with_prefill:
        return figures.tokens, figures.seconds_with_prefill
    return figures.decoded, figures.seconds
