"""Confidence thresholds for each candidate, searched on traces: what the rival policy of thresholds is fitted with.

Source: LITE (arXiv 2310.18581) tunes a confidence threshold for each layer.
Departs from the paper: how it tunes them is not known to us. Here each is searched in turn while the others stand, and
the simulated rate of tokens decides. The threshold to draft on, which the paper has no use for since its exits are
final, is searched with them, and a candidate at which nothing would exit is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from lede.cost_model import CostModel, Costs
from lede.cost_profile import CostProfile
from lede.features import parse_candidates
from lede.policies.threshold import ThresholdPolicy
from lede.simulation import simulate
from lede.threshold_search import ThresholdSearch
from lede.trace_table import TraceTable

if TYPE_CHECKING:
    from lede.buffers.records import PromptTrace
    from lede.buffers.settings import StoreSettings
    from lede.buffers.store import TraceStore
    from lede.models import EarlyExitModel

CONTEXTS = (128, 512)
"""Context lengths that the quick profile measures, in tokens; the model must have positions for one of them."""
REPEATS = 3
"""Times that the quick profile measures each operation."""


@dataclass(frozen=True)
class FittedThresholds:
    """A fitted policy, and what the fit took."""

    policy: ThresholdPolicy
    """The policy."""
    evaluations: int
    """Settings that were played on the traces."""
    score: float
    """What the policy came to on the traces."""
    unit: Literal["tokens/s", "tokens/layer"]
    """What the score counts: tokens a second where costs were given, else tokens for each layer that runs."""
    speedup: float
    """Score over that of plain decoding."""
    search_seconds: float
    """Spent on the search."""
    collecting_seconds: float = 0.0
    """Spent on traces and on the cost profile, where they were made for the fit."""


def layer_costs(n_layers: int, head_cost: float = 0.0) -> CostModel:
    """Costs that count layers instead of seconds: a block runs through a layer for 1, however many tokens it has.

    Args:
        n_layers: Layers of the model.
        head_cost: What a head read counts as, in layers.
    """
    costs = Costs(
        span=0, layer=1, layer_block=0, layer_token=0, layer_context=0, layer_pair=0, head=head_cost, head_block=0,
        head_token=0, embed=0, observe=0, features=0, features_entropy=0, features_top_k=0, policy=0, choose=0,
        accept=0, accept_token=0,
    )  # fmt: skip
    return CostModel(n_layers, (None,) * n_layers, costs)


def fit_thresholds(
    traces: Sequence[PromptTrace] | TraceStore,
    candidates: Sequence[int] | str | None = None,
    costs: CostModel | CostProfile | None = None,
    *,
    max_new_tokens: int | None = None,
    max_draft: int = 12,
    quantiles: int = 12,
    sweeps: int = 4,
    seed: int = 0,
    temperature: float | None = None,
) -> FittedThresholds:
    """Search the thresholds that decode the traces' texts fastest.

    The search begins twice: from the best quantile or value that all candidates share, and from the best single
    candidate. Then each threshold is moved in turn, and the threshold to draft on as well, until a turn of all improves
    nothing; in the end the steps around the best ones are halved a few times.

    Where no candidate pays, the first one alone stays with a threshold of 1, which no probability passes: the policy
    looks there, never drafts, and its speedup is below 1 by what looking costs.

    Args:
        traces: Validation traces, with branches or without.
        candidates: Layers that are inspected, as in `lede.features.parse_candidates`; those of the store unless given.
        costs: What operations cost; None to count layers.
        max_new_tokens: Budget that the texts were written under; the store's, or the longest text's, unless given.
        max_draft: Most tokens drafted in a round.
        quantiles: Quantiles of a candidate's probabilities that are tried, beside some round values.
        sweeps: Most turns of all thresholds from each beginning.
        seed: Of the acceptance of sampled drafts.
        temperature: Temperature of the texts, for the record; the store's unless given.

    Raises:
        ValueError: There is nothing to fit on, or traces, candidates and costs do not fit together.
    """
    if quantiles < 1 or sweeps < 1:
        raise ValueError(f"quantiles and sweeps must be at least 1, got {quantiles} and {sweeps}")
    table, settings = _table(traces, max_new_tokens)
    if settings is not None:
        candidates = settings.candidates if candidates is None else candidates
        temperature = settings.temperature if temperature is None else temperature
    layers = parse_candidates(candidates, table.n_layers)
    start = perf_counter()
    profile = costs if isinstance(costs, CostProfile) else None
    model = profile.costs if profile is not None else costs if isinstance(costs, CostModel) else None
    priced = layer_costs(table.n_layers) if model is None else model
    plain = simulate(None, table, priced).rate
    search = ThresholdSearch(table, priced, layers, max_draft, seed)
    score = search.run(quantiles, sweeps)
    inspected, thresholds = search.inspected(search.best)
    policy = ThresholdPolicy(
        candidates=inspected,
        thresholds=thresholds,
        draft_threshold=search.best[-1],
        max_draft=max_draft,
        trained_temperature=temperature,
    )
    policy.profile = profile
    if settings is not None:
        policy.fingerprint = settings.fingerprint or None
    return FittedThresholds(
        policy=policy,
        evaluations=len(search.played),
        score=score,
        unit="tokens/layer" if model is None else "tokens/s",
        speedup=score / plain,
        search_seconds=perf_counter() - start,
    )


def fit_thresholds_on(
    model: EarlyExitModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    candidates: Sequence[int] | str | None = None,
    costs: CostModel | CostProfile | None = None,
    batch_size: int = 8,
    **settings: Any,
) -> FittedThresholds:
    """Fit on prompts: the model writes its texts, every layer is read on them, and the thresholds are searched.

    Args:
        model: The model; the policy is bound to it.
        prompts: Token ids of each validation prompt.
        max_new_tokens: Budget of new tokens a prompt.
        temperature: Temperature of the texts; 0 is greedy.
        seed: Of the texts, of what is followed after wrong drafts, and of the acceptance of sampled drafts.
        top_k: Tokens kept when sampling.
        top_p: Probability mass kept when sampling.
        candidates: Layers that are inspected, as in `lede.features.parse_candidates`; the model's default unless given.
        costs: What operations cost; a quick profile is measured unless given.
        batch_size: Prompts that share forward passes.
        **settings: `max_draft`, `quantiles` and `sweeps` of `fit_thresholds`.

    Raises:
        ImportError: What collects traces is not installed (gymnasium and zarr).
        ValueError: There is no prompt, or a setting is unusable.
    """
    from lede.collectors.branches import BranchRules
    from lede.collectors.teacher import collect_teacher
    from lede.cost_measurement import fitting
    from lede.envs import Rules
    from lede.profiling import measured_profile
    from lede.verification import Warp

    start = perf_counter()
    layers = parse_candidates(candidates, model.n_layers)
    rules = Rules(layers, max_new_tokens, warp=Warp(temperature, top_k, top_p))
    numbered = [(index, list(ids)) for index, ids in enumerate(prompts)]
    traces = list(collect_teacher(model, numbered, rules, seed, batch_size, branching=BranchRules()))
    if costs is None:
        costs = measured_profile(model, fitting(CONTEXTS, model), layers, REPEATS)
    collecting = perf_counter() - start
    fitted = fit_thresholds(
        traces, layers, costs, max_new_tokens=max_new_tokens, seed=seed, temperature=temperature, **settings
    )
    policy = fitted.policy.bind(model)
    return FittedThresholds(
        policy, fitted.evaluations, fitted.score, fitted.unit, fitted.speedup, fitted.search_seconds, collecting
    )


def _table(
    traces: Sequence[PromptTrace] | TraceStore, max_new_tokens: int | None
) -> tuple[TraceTable, StoreSettings | None]:
    """The traces as a table, and the settings that they were collected with if they are a store's."""
    # a store is told from a sequence without importing what reads stores
    settings, every = (None, traces) if isinstance(traces, Sequence) else (traces.settings, traces.prompts)
    records = [trace for trace in every if trace.n_decided]
    if not records:
        raise ValueError("no trace decides anything; give traces of prompts that got at least 2 new tokens")
    if max_new_tokens is None:
        longest = max(trace.n_decided for trace in records) + 1
        max_new_tokens = longest if settings is None else settings.max_new_tokens
    # the vocabulary's size bounds an entropy that nobody looks at here
    vocab_size = 2 if settings is None else settings.vocab_size
    return TraceTable.from_traces(records, max_new_tokens, vocab_size), settings
