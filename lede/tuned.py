"""Policy arguments ready to be measured: what they resolved to, what that took, and how much everybody may spend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lede.bench_runs import Cost
from lede.policies import Policy, parse_policy
from lede.policy_cost import cost_of_folder
from lede.rivals import is_rival
from lede.tuning_grids import FITTED, TUNED, space_of
from lede.tuning_race import first_rung, halving_evaluations


@dataclass(frozen=True)
class Point:
    """A setting that was tried."""

    settings: str
    """As a command line gives it."""
    speedup: float
    """Tokens a second over plain decoding's, after the prefill, sums over prompts."""
    tokens_per_second: float | None
    """Tokens after the first over seconds after the prefill, over all prompts; None where there are none."""
    n_prompts: int
    """Validation prompts that it was tried on; those put aside early saw few."""


@dataclass(frozen=True)
class Tuned:
    """A policy argument, ready to be measured."""

    policy: Policy | None
    """The policy, unused; None for plain decoding and for external contenders."""
    as_given: str
    """As the command line gave it."""
    settings: str
    """What it resolved to: NAME:key=value, or a folder."""
    cost: Cost
    """What it took to get there."""
    points: tuple[Point, ...] = ()
    """Settings that were tried, the best first; none where nothing was tuned."""

    def runners_up(self, k: int) -> list[Tuned]:
        """The next best `k` settings as contenders of their own, at no cost of their own."""
        others = [point.settings for point in self.points if point.settings != self.settings][:k]
        return [as_it_is(text) for text in others]


def as_it_is(text: str) -> Tuned:
    """An argument that is not tuned; that of a folder with the cost of the run that made it.

    Raises:
        ValueError: It is no policy.
    """
    if is_rival(text):
        return Tuned(None, text, text, Cost())
    policy = parse_policy(text)
    is_folder = policy is not None and text.partition(":")[0] != policy.kind
    return Tuned(policy, text, text, cost_of_folder(Path(text)) if is_folder else Cost())


def is_tuned(text: str) -> bool:
    """Whether an argument is a name that is tuned."""
    return text in TUNED


def planned_evaluations(text: str, n_layers: int, n_prompts: int, max_new_tokens: int) -> int:
    """Evaluations that the first race of an argument needs; 0 where nothing is tuned by decoding."""
    if not is_tuned(text) or text in FITTED:
        return 0
    n_settings = len(space_of(text, n_layers, max_new_tokens).coarse)
    return halving_evaluations(n_settings, n_prompts, first_rung(n_settings, n_prompts, 0))


def budget_of(texts: Sequence[str], n_layers: int, n_prompts: int, max_new_tokens: int) -> int:
    """Evaluations that everybody gets who is tuned: the most that a learned policy among the arguments had.

    Where there is none, or its folder does not tell, it is the most that one of the others needs.
    """
    folders = [Path(text) for text in texts if not is_tuned(text) and not is_rival(text) and Path(text).is_dir()]
    learned = max((cost_of_folder(folder).evaluations for folder in folders), default=0)
    return learned or max((planned_evaluations(text, n_layers, n_prompts, max_new_tokens) for text in texts), default=0)
