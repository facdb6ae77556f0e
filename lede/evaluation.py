"""`lede evaluate`: how fast policies would decode, how far that is from what could be known, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lede.atomic import prepare_file, write_atomically
from lede.contenders import Contender, check_contenders, parse_contenders

if TYPE_CHECKING:
    from lede.buffers.settings import StoreSettings
    from lede.buffers.store import TraceStore
    from lede.ceilings import Clairvoyant
    from lede.cost_profile import CostProfile
    from lede.evaluation_results import Evaluation
    from lede.lookup import LookupConfig
    from lede.off_policy import OffPolicyEstimate
    from lede.policies.base import Policy
    from lede.simulation import Simulation
    from lede.trace_table import TraceTable

MAX_DRAFT = 12
"""Tokens that the clairvoyant may draft in a round, more if a policy may."""


MAX_COPIED = 32
"""Tokens that the clairvoyant may copy from the text in a round."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of an evaluation."""

    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    """A policy: a folder, NAME, or NAME:key=value;key=value; give it again for more."""
    traces: Path
    """Store of traces (`lede collect --collector teacher`)."""
    profile: Path | None = None
    """Cost profile (`lede profile`); the first policy's own unless given."""
    reference: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A policy that stands for the best that the features allow; give it again for more, the fastest counts."""
    candidates: str | None = None
    """Layers that the clairvoyant may use besides the policies', such as 2,4,8 or all; the traces' unless given."""
    fqe: bool = False
    """Also hold d3rlpy's fitted Q evaluation against the truth, for learned policies that always scan."""
    log: Path | None = None
    """Store of transitions that fitted Q evaluation learns from; uniform decisions on the traces unless given."""
    resamples: int = 2000
    """Resamples of the bootstrap by prompt, for the 95 % intervals."""
    seed: int = 0
    """Seed of resampling, of fitted Q evaluation, and of the acceptance of sampled drafts."""
    out: Path | None = None
    """File for everything as JSON; replaced whole."""

    def __post_init__(self) -> None:
        if not self.policy:
            raise ValueError("give at least one policy, as --policy")
        if self.resamples < 1 or self.seed < 0:
            raise ValueError(f"resamples must be positive and seed not negative, got {self.resamples} and {self.seed}")
        if self.log is not None and not self.fqe:
            raise ValueError("a log is what fitted Q evaluation learns from; give --fqe as well")


def evaluate(
    config: EvaluateConfig, traces: TraceStore | None = None, profile: CostProfile | None = None
) -> Evaluation:
    """Simulate the policies on the traces, print tables, and write JSON if asked to.

    Args:
        config: Settings.
        traces: The store itself, to spare opening `config.traces`.
        profile: The profile itself, to spare reading `config.profile`.

    Raises:
        ImportError: Fitted Q evaluation is wanted and d3rlpy is not installed.
        ValueError: A store, the profile or a policy can't be used, or they belong to different models.
    """
    contenders = parse_contenders(config.policy, config.reference)
    traces = _open_traces(config.traces) if traces is None else traces
    profile = _profile(config, contenders) if profile is None else profile
    check_contenders(traces.settings, profile, contenders)
    if config.out is not None:
        prepare_file(config.out)
    fitted, notes = _off_policy(config, traces, contenders) if config.fqe else ({}, [])
    found = _evaluate(config, traces, profile, contenders, fitted, notes)

    from rich.console import Console

    from lede.evaluation_report import report

    console = Console()
    console.print(report(found))
    if config.out is not None:
        write_atomically(config.out, (json.dumps(found.to_json(), indent=1) + "\n").encode())
        console.print(f"written to {config.out}", soft_wrap=True)
    return found


def _evaluate(
    config: EvaluateConfig,
    traces: TraceStore,
    profile: CostProfile,
    contenders: Sequence[Contender],
    fitted: dict[str, OffPolicyEstimate],
    notes: Sequence[str],
) -> Evaluation:
    from lede.ceilings import solve
    from lede.evaluation_results import Evaluation, result_of
    from lede.intervals import Bootstrap
    from lede.lookup_table import lookups_of
    from lede.simulation import simulate
    from lede.trace_table import TraceTable

    settings = traces.settings
    records = [trace for trace in traces.prompts if trace.n_decided]
    table = TraceTable.from_traces(records, settings.max_new_tokens, settings.vocab_size)
    notes = [*notes, *_remembered(table, contenders)]
    played = [simulate(each.policy, table, profile.costs, seed=config.seed) for each in contenders]
    bare: list[Simulation | None] = [None] * len(contenders)
    if table.branches is not None:
        flat = TraceTable.from_traces(records, settings.max_new_tokens, settings.vocab_size, use_branches=False)
        bare = [simulate(each.policy, flat, profile.costs, seed=config.seed) for each in contenders]
    layers = _candidates(config, settings, contenders, played)
    longest = max([MAX_DRAFT, *(each.policy.config.max_draft for each in contenders if each.policy is not None)])
    ceilings: dict[tuple[LookupConfig | None, str | None], Clairvoyant] = {}
    searches = {_search_of(each.policy): each.policy for each in contenders if each.policy is not None}
    for how, searcher in searches.items() or [((None, None), None)]:
        copied = None
        if searcher is not None and searcher.lookup is not None:
            copied = lookups_of(table, searcher.lookup, MAX_COPIED, searcher.memory)
        ceilings[how] = solve(table, profile.costs, layers, longest, config.seed, copied)
    clairvoyant = max(ceilings.values(), key=lambda each: each.rate)
    # who searches the text in a way of his own is held against who knows what that finds
    own = [
        ceilings[_search_of(who.policy)] if who.policy is not None and who.policy.lookup else clairvoyant
        for who in contenders
    ]
    bootstrap = Bootstrap(table.n_prompts, config.resamples, config.seed)
    references = [each for each, who in zip(played, contenders, strict=True) if who.reference]
    best = max(references, key=lambda each: each.rate, default=None)
    return Evaluation(
        model=settings.model,
        profile=f"{profile.dtype} on {profile.device} ({profile.device_name}), {profile.threads} thread(s)",
        n_prompts=table.n_prompts,
        n_tokens=int(table.n_decided.sum()),
        n_branches=0 if table.branches is None else len(table.branches),
        plain_rate=float(table.n_decided.sum() / clairvoyant.plain_seconds.sum()),
        candidates=clairvoyant.candidates,
        clairvoyant=clairvoyant.summary(),
        policies=tuple(
            result_of(who.name, who.text, who.reference, each, without, top, bootstrap, best, fitted.get(who.name))
            for who, each, without, top in zip(contenders, played, bare, own, strict=True)
        ),
        notes=tuple(notes),
    )


def _search_of(policy: Policy) -> tuple[LookupConfig | None, str | None]:
    """What tells the drafts that a policy's text and memory hold from those of others."""
    remembers = policy.lookup is not None and policy.memory is not None
    return policy.lookup, policy.memory.digest if remembers and policy.memory is not None else None


def _remembered(table: TraceTable, contenders: Sequence[Contender]) -> list[str]:
    """A line for each policy that remembers texts that it is measured on."""
    found = []
    for each in contenders:
        if each.policy is None or each.policy.lookup is None or each.policy.memory is None:
            continue
        known = each.policy.memory.known(zip(table.prompt_ids, table.token_ids, strict=True))
        if known:
            found.append(
                f"{each.name} remembers {known} of the {table.n_prompts} texts: its figures flatter it; give traces of "
                "other prompts"
            )
    return found


def _open_traces(path: Path) -> TraceStore:
    from lede.buffers.store import TraceStore, open_store

    store = open_store(path)
    if not isinstance(store, TraceStore):
        raise ValueError(f"{path} holds transitions; an evaluation needs traces (`lede collect --collector teacher`)")
    return store


def _profile(config: EvaluateConfig, contenders: Sequence[Contender]) -> CostProfile:
    from lede.cost_profile import CostProfile

    if config.profile is not None:
        return CostProfile.load(config.profile)
    for each in contenders:
        if each.policy is not None and each.policy.profile is not None:
            return each.policy.profile
    raise ValueError("give a cost profile as --profile (made by `lede profile`); the policies bring none")


def _candidates(
    config: EvaluateConfig, settings: StoreSettings, contenders: Sequence[Contender], played: Sequence[Simulation]
) -> tuple[int, ...]:
    """Layers of the clairvoyant: what was given or the traces', and whatever a policy may draft at."""
    from lede.features import parse_candidates

    given = settings.candidates if config.candidates is None else config.candidates
    layers = set(parse_candidates(given, settings.n_layers))
    for each, simulation in zip(contenders, played, strict=True):
        layers.update(int(layer) for layer in set(simulation.log.layer.tolist()) if layer)
        if each.policy is not None and each.policy.features is not None:
            layers.update(each.policy.candidates_for(settings.n_layers))
    return tuple(sorted(layers))


def _off_policy(
    config: EvaluateConfig, traces: TraceStore, contenders: Sequence[Contender]
) -> tuple[dict[str, OffPolicyEstimate], list[str]]:
    """Fitted Q evaluation by name, and a line for each policy that it does not fit."""
    from lede.buffers.store import TransitionStore, open_store
    from lede.off_policy import FqeConfig, check_policy, evaluate_off_policy
    from lede.policies import LearnedPolicy
    from lede.quiet_d3rlpy import import_d3rlpy

    import_d3rlpy()  # complain before the work
    log: Any = None if config.log is None else open_store(config.log)
    if log is not None and not isinstance(log, TransitionStore):
        raise ValueError(f"{config.log} holds traces; leave the log out to play uniform decisions on them")
    fitted, notes = {}, []
    for each in contenders:
        if not isinstance(each.policy, LearnedPolicy):
            continue
        try:
            check_policy(each.policy)
        except ValueError as error:
            notes.append(f"no fitted Q evaluation of {each.name}: {error}")
            continue
        fitted[each.name] = evaluate_off_policy(each.policy, traces, log, FqeConfig(seed=config.seed))
    if not fitted:
        raise ValueError("; ".join(notes) or "fitted Q evaluation is of learned policies, and none was given")
    return fitted, notes
