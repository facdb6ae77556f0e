"""Thresholds fitted for several sets of candidates, for a race between them on the clock.

The fit itself leaves out candidates that are not worth a look; by how much is told by a model of the costs, so what it
finds among all shallow layers, among the default candidates and at single layers is held against the clock. All are
played on one set of traces of the validation prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lede.features import default_candidates
from lede.threshold_fit import CONTEXTS, REPEATS, FittedThresholds, fit_thresholds

if TYPE_CHECKING:
    from lede.buffers.records import PromptTrace
    from lede.cost_model import CostModel
    from lede.cost_profile import CostProfile
    from lede.models import EarlyExitModel

FITS = 4
"""Fits that are raced."""
BATCH_SIZE = 8
"""Prompts that share forward passes when traces are collected."""


@dataclass(frozen=True)
class CandidateFits:
    """The best fits."""

    texts: tuple[str, ...]
    """Threshold policies as a command line gives them, the best on the traces first."""
    evaluations: int
    """Thresholds that were played, times the prompts that each was played on."""
    collecting_seconds: float
    """Spent on traces and on the cost profile."""
    search_seconds: float
    """Spent on playing."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "texts": list(self.texts)}


def fit_candidates(
    model: EarlyExitModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> CandidateFits:
    """Collect traces, measure costs, and fit.

    Args:
        model: The model.
        prompts: Token ids of each validation prompt.
        max_new_tokens: Budget of new tokens a prompt.
        temperature: Temperature of the texts; 0 is greedy.
        seed: Of the texts, of what is followed after wrong drafts, and of the acceptance of sampled drafts.

    Raises:
        ImportError: What collects traces is not installed (gymnasium and zarr).
        ValueError: No prompt was answered by two tokens.
    """
    from lede.collectors.branches import BranchRules
    from lede.collectors.teacher import collect_teacher
    from lede.cost_measurement import fitting
    from lede.envs import Rules
    from lede.profiling import measured_profile
    from lede.verification import Warp

    begin = perf_counter()
    default = default_candidates(model.n_layers)
    layers = tuple(sorted({*range(1, model.n_layers // 2 + 1), *default}))
    rules = Rules(layers, max_new_tokens, warp=Warp(temperature))
    numbered = [(index, list(ids)) for index, ids in enumerate(prompts)]
    traces = list(collect_teacher(model, numbered, rules, seed, BATCH_SIZE, branching=BranchRules()))
    costs = measured_profile(model, fitting(CONTEXTS, model), layers, REPEATS)
    collecting = perf_counter() - begin
    fits = fit_sets(traces, layers, default, costs, max_new_tokens, seed)
    return CandidateFits(
        texts=tuple(dict.fromkeys(threshold_text(fit) for fit in fits))[:FITS],
        evaluations=sum(fit.evaluations for fit in fits) * len(numbered),
        collecting_seconds=collecting,
        search_seconds=sum(fit.search_seconds for fit in fits),
    )


def fit_sets(
    traces: Sequence[PromptTrace],
    layers: Sequence[int],
    default: Sequence[int],
    costs: CostModel | CostProfile | None = None,
    max_new_tokens: int | None = None,
    seed: int = 0,
) -> list[FittedThresholds]:
    """Fits among all layers, among the default candidates, and at each single layer.

    Args:
        traces: Traces of the validation prompts.
        layers: Layers to choose from, ascending.
        default: The default candidates.
        costs: What operations cost; None to count layers.
        max_new_tokens: Budget that the texts were written under.
        seed: Of the acceptance of sampled drafts.

    Returns:
        The fits, the best first; what two sets come to alike is there twice.
    """
    sets = dict.fromkeys([tuple(layers), tuple(default), *((layer,) for layer in layers)])
    found = [fit_thresholds(traces, each, costs, max_new_tokens=max_new_tokens, seed=seed) for each in sets]
    return sorted(found, key=lambda each: -each.score)


def threshold_text(fitted: FittedThresholds) -> str:
    """The fitted policy as a command line gives it."""
    config = fitted.policy.config
    thresholds = config.thresholds if isinstance(config.thresholds, tuple) else (config.thresholds,)
    return (
        f"threshold:candidates={','.join(map(str, config.candidates or ()))};"
        f"thresholds={','.join(map(str, thresholds))};draft_threshold={config.draft_threshold};"
        f"max_draft={config.max_draft}"
    )
