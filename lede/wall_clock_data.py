"""What a run with the wall-clock objective learns from: rounds played on traces and priced by a cost profile.

The reward is tokens - rate * seconds, gamma is 1, and `rate` is that of the policy that is being trained: with it, the
policy whose sum of rewards is largest has the largest ratio of tokens to seconds. It starts at the rate of the best
static setting and follows the greedy policy.

Source: Dinkelbach, On nonlinear fractional programming (1967), for the ratio of two sums.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lede.ceilings import solve
from lede.cost_tables import CostTables
from lede.draft_rounds import DraftRounds
from lede.features import FeatureConfig
from lede.learning_curve import GreedyScore
from lede.lookup_behaviour import record_choices
from lede.lookup_table import LookupTable, lookups_of
from lede.phrase_folds import remember, show
from lede.phrases import PhraseMemory
from lede.policies.base import BLIND, ExitAt, Lookup
from lede.policies.learned import LearnedPolicy
from lede.policies.lookup import LookupPolicy
from lede.policies.static import StaticConfig, StaticPolicy
from lede.reference_lookups import best_static_lookup, search_lookup
from lede.reference_thresholds import fit_forecast
from lede.round_behaviour import RoundTransitions, join, record
from lede.scoring import Scorer
from lede.seeding import Purpose, numpy_stream
from lede.simulation import simulate
from lede.trace_table import TraceTable
from lede.training_sources import features_for

if TYPE_CHECKING:
    from lede.buffers.records import PromptTrace
    from lede.buffers.settings import StoreSettings
    from lede.cost_model import CostModel
    from lede.training_config import TrainConfig
    from lede.transitions import Transitions

STATIC_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
"""Draft lengths of the static settings that are tried."""

LEAST_BUDGET = 3
"""New tokens that leave room for a draft: one from the prefill, one drafted, and the one that its verification adds."""


class WallClockData:
    """Rounds on the training prompts, renewed while the policy changes.

    Args:
        config: Settings.
        settings: Of the traces, with the candidates and features of the policy to be; a forecast is fitted if the
            features want one and have none.
        training: Traces to play on.
        validation: Traces of other prompts to score on.
        costs: What operations cost.
        held_out: Prompts of the buffer that are among the validation traces.
        digest: Of everything above.
        validation_budget: New tokens that the validation traces were allowed; None for as many as the others.
    """

    validation_kind = "traces"

    def __init__(
        self,
        config: TrainConfig,
        settings: StoreSettings,
        training: Sequence[PromptTrace],
        validation: Sequence[PromptTrace],
        costs: CostModel,
        held_out: tuple[int, ...] = (),
        digest: str = "",
        validation_budget: int | None = None,
    ) -> None:
        self.config, self.costs = config, costs
        self.held_out, self.digest = held_out, digest
        size = (settings.max_new_tokens, settings.vocab_size, config.branches)
        self.training = TraceTable.from_traces(training, *size)
        self.validation = TraceTable.from_traces(validation, validation_budget or size[0], *size[1:])
        for table, name in ((self.training, "training"), (self.validation, "validation")):
            _check_room(table, name)
        self.settings = settings = self._with_forecast(settings)
        self.candidates = settings.candidates if "exit" in config.sources else ()
        self.lookup, self.lookups = None, lookup_plans(config)
        self.memory = self._remembered() if self.lookups else None
        if self.lookups:
            lengths = sorted({plan.length for plan in self.lookups})
            self.lookup = search_lookup(
                self.training, costs, config.max_suffix, config.continuation, lengths, config.seed, self.memory
            )
        copies, others = self._looked_up(self.training), self._looked_up(self.validation)
        tables = CostTables(costs, self.candidates, self.training.max_context, config.max_draft)
        self.fixed_drafts = tuple(ExitAt(k, n) for k in self.candidates for n in config.fixed_lengths)
        plans: list[Lookup | ExitAt] = [*self.lookups, *self.fixed_drafts]
        self._rounds = DraftRounds(
            self.training, tables, settings.features, seed=config.seed, lookup=copies, plans=plans
        )
        self._clairvoyant = solve(self.training, costs, self.candidates, config.max_draft, config.seed, copies)
        self.static = self._best_static()
        self.rate = simulate(self.static, self.training, costs, seed=config.seed).rate
        self.static_speedup = simulate(self.static, self.validation, costs).speedup
        self._scorer = Scorer(self.validation, costs, self.candidates, config.max_draft, others)
        self._kept: list[tuple[int, Any]] = []  # number of a generation and the network that played it
        self._parts: list[RoundTransitions] = []
        self._generation(0, None)
        seen = self._parts[0].transitions.states
        self.mean = np.asarray(seen.mean(axis=0, dtype=np.float64))
        std = seen.std(axis=0, dtype=np.float64)
        self.std = np.where(std > 1e-6, std, 1.0)
        self._price()

    @property
    def n_actions(self) -> int:
        """Continue, exit, a blind draft at each candidate, each lookup and each fixed draft."""
        return BLIND + len(self.candidates) + len(self.lookups) + len(self.fixed_drafts)

    @property
    def scans(self) -> bool:
        """Whether there are candidates to scan."""
        return bool(self.candidates)

    @property
    def plans(self) -> dict[str, Any]:
        """Settings of the policy to be: what it chooses from."""
        return {
            "candidates": self.candidates,
            "lookup": self.lookup,
            "lookups": self.lookups,
            "fixed_drafts": self.fixed_drafts,
            "memory": self.memory,
        }

    @property
    def stage_flags(self) -> tuple[int, ...]:
        """Places of `in_scan` and `in_draft` in the observation."""
        return stage_flags(self.settings.features)

    def refresh(self, policy: LearnedPolicy) -> None:
        """Price time at the policy's own rate, and add a generation of rounds that it played."""
        self.rate = simulate(policy, self.training, self.costs, seed=self.config.seed).rate
        self._generation(self._kept[-1][0] + 1, policy)
        self._price()

    def score(self, policy: LearnedPolicy) -> GreedyScore:
        """The policy on the validation prompts."""
        return self._scorer(policy, self.rate)

    def state(self) -> dict[str, Any]:
        """What the transitions can be made again from."""
        return {"rate": self.rate, "generations": [(number, _weights(policy)) for number, policy in self._kept]}

    def load_state(self, state: dict[str, Any], policy_of: Callable[..., LearnedPolicy]) -> None:
        """Make the transitions of a checkpoint again; `policy_of` makes a policy of a network's layers."""
        self._kept, self._parts = [], []
        for number, weights in state["generations"]:
            pairs = [tensor.numpy() for tensor in weights]
            layers = list(zip(pairs[::2], pairs[1::2], strict=True))
            self._generation(number, policy_of(layers, folded=True) if layers else None)
        self.rate = state["rate"]
        self._price()

    def description(self) -> dict[str, Any]:
        """What was settled, as JSON values."""
        best = self.static.config
        static: dict[str, Any] = {"exit_layer": best.exit_layer} if isinstance(best, StaticConfig) else {"lookup": True}
        return {
            "objective": "wall-clock",
            "lookup": None if self.lookup is None else asdict(self.lookup),
            "memory": None if self.memory is None else _description_of(self.memory),
            "static": {**static, "draft_length": best.draft_length},
            "static_speedup": self.static_speedup,
            "branches": self.training.branches is not None,
            "validation_prompts": self.validation.n_prompts,
        }

    def _with_forecast(self, settings: StoreSettings) -> StoreSettings:
        """The settings with the forecast that their features need."""
        features = settings.features
        if not features.calibrated or features.forecast is not None:
            return settings
        max_draft, seed = self.config.max_draft, self.config.seed
        forecast = fit_forecast(self.training, self.costs, settings.candidates, max_draft, seed)
        return replace(settings, features=replace(features, forecast=forecast))

    def _generation(self, number: int, policy: LearnedPolicy | None) -> None:
        rng = numpy_stream(self.config.seed, Purpose.SYNTHESIS, number)
        unit, share, flips = self._unit, self.config.explore, self.config.flips
        one_decision = not self.candidates and unit == "round"
        if one_decision and policy is None:
            part = record_choices(self._rounds, rng, self._clairvoyant)
        elif one_decision and policy is not None:
            part = record_choices(self._rounds, rng, self._clairvoyant, policy.decide, share)
        elif policy is None:
            part = record(self._rounds, rng, episode=unit, clairvoyant=self._clairvoyant)
        else:
            part = record(self._rounds, rng, policy.decide, share, flips, unit, self._clairvoyant)
        self._kept = [*self._kept, (number, policy)][-self.config.generations :]
        self._parts = [*self._parts, part][-self.config.generations :]

    @property
    def _unit(self) -> str:
        return "round" if self.config.episode == "round" else "prompt"

    def _looked_up(self, table: TraceTable) -> LookupTable | None:
        if self.lookup is None:
            return None
        return lookups_of(table, self.lookup, max(plan.length for plan in self.lookups), self.memory)

    def _remembered(self) -> PhraseMemory | None:
        """The memory of other texts that lookups fall back to.

        Raises:
            ValueError: A file holds none, or one of another tokenizer.
        """
        how, settings = self.config.memory, self.settings
        tokenizer = settings.fingerprint.get("tokenizer") if settings.fingerprint else None
        if how in (None, "none"):
            return None
        if how == "train":
            memory = remember(self.training, tokenizer, self.config.seed)
            show(self.validation, self.training, memory)
            return memory
        memory = PhraseMemory.load(str(how))
        memory.check_tokenizer(tokenizer, settings.vocab_size, f"model '{settings.model}'")
        for table, name in ((self.training, "training"), (self.validation, "validation")):
            known = memory.known(zip(table.prompt_ids, table.token_ids, strict=True))
            if known:
                warnings.warn(
                    f"the memory {how} holds {known} of the {table.n_prompts} {name} texts, which find themselves "
                    "there: the policy will trust it too much; give one of other texts, or --memory train",
                    stacklevel=4,
                )
        self.digest = hashlib.sha256((self.digest + memory.digest).encode()).hexdigest()
        return memory

    def _best_static(self) -> StaticPolicy | LookupPolicy:
        """The fastest setting that never decides, of the sources that there are."""
        tried: list[StaticPolicy | LookupPolicy] = []
        seed = self.config.seed
        if self.candidates:
            tried.append(best_static(self.training, self.costs, self.config.max_draft, seed=seed))
        if self.lookup is not None:
            tried.append(best_static_lookup(self.training, self.costs, memory=self.memory))
        return max(tried, key=lambda policy: simulate(policy, self.training, self.costs, seed=seed).rate)

    def _price(self) -> None:
        self._joined = join(self._parts)
        self.transitions: Transitions = self._joined.priced(self.rate, self.config.shaping)


def lookup_plans(config: TrainConfig) -> tuple[Lookup, ...]:
    """Drafts from the text to choose from: every length unpruned, then pruned at each layer that was asked for."""
    if "lookup" not in config.sources:
        return ()
    return tuple(Lookup(length, layer) for layer in (None, *config.prune_at) for length in config.lookups)


def stage_flags(features: FeatureConfig) -> tuple[int, ...]:
    """Places of `in_scan` and `in_draft` in the observation, as far as it has them."""
    return tuple(features.names.index(name) for name in ("in_scan", "in_draft") if name in features.names)


def best_static(
    table: TraceTable,
    costs: CostModel,
    max_draft: int = 12,
    layers: Sequence[int] | None = None,
    lengths: Sequence[int] = STATIC_LENGTHS,
    seed: int = 0,
) -> StaticPolicy:
    """The static setting with the largest simulated rate; every layer up to L/2 unless `layers` are given.

    `seed` is that of the acceptance of sampled drafts; rates compare under the same one alone.
    """
    tried = [
        StaticPolicy(exit_layer=layer, draft_length=length, max_draft=max_draft)
        for layer in (layers or range(1, table.n_layers // 2 + 1))
        for length in lengths
        if length <= max_draft
    ]
    return max(tried, key=lambda policy: simulate(policy, table, costs, seed=seed).rate)


def policy_settings(config: TrainConfig, settings: StoreSettings, candidates: Sequence[int]) -> StoreSettings:
    """Settings of the traces with the policy's candidates and features."""
    features = FeatureConfig(
        names=config.features or features_for(config.sources, config.memory not in (None, "none")),
        top_k=settings.features.top_k,
        window=settings.features.window,
        draft_agreement=config.draft_agreement,
    )
    return replace(settings, candidates=tuple(candidates), features=features)


def _check_room(table: TraceTable, name: str) -> None:
    """Refuse texts whose budget leaves no room for any draft: nobody would be asked a thing."""
    if table.max_new_tokens < LEAST_BUDGET:
        raise ValueError(
            f"the {name} traces were collected with max_new_tokens {table.max_new_tokens}, which leaves no room for a "
            f"draft; the wall-clock objective takes at least {LEAST_BUDGET}"
        )


def _description_of(memory: PhraseMemory) -> dict[str, Any]:
    return {
        "digest": memory.digest,
        "texts": int(memory.texts.size),
        "n_grams": len(memory),
        "max_suffix": memory.max_suffix,
        "bytes": memory.n_bytes,
    }


def _weights(policy: LearnedPolicy | None) -> list[Any]:
    import torch

    if policy is None:
        return []
    return [torch.from_numpy(np.array(array)) for pair in policy.network.layers for array in pair]
