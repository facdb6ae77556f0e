"""What a run with the wall-clock objective learns from: rounds played on traces and priced by a cost profile.

The reward is tokens - rate * seconds, gamma is 1, and `rate` is that of the policy that is being trained: with it, the
policy whose sum of rewards is largest has the largest ratio of tokens to seconds. It starts at the rate of the best
static setting and follows the greedy policy.

Source: Dinkelbach, On nonlinear fractional programming (1967), for the ratio of two sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lede.ceilings import solve
from lede.cost_tables import CostTables
from lede.draft_rounds import DraftRounds
from lede.features import CALIBRATED_FEATURES, FeatureConfig
from lede.learning_curve import GreedyScore
from lede.policies.base import BLIND
from lede.policies.learned import LearnedPolicy
from lede.policies.static import StaticPolicy
from lede.reference_thresholds import fit_forecast
from lede.round_behaviour import RoundTransitions, join, record
from lede.scoring import Scorer
from lede.seeding import Purpose, numpy_stream
from lede.simulation import simulate
from lede.trace_table import TraceTable

if TYPE_CHECKING:
    from lede.buffers.records import PromptTrace
    from lede.buffers.settings import StoreSettings
    from lede.cost_model import CostModel
    from lede.training import TrainConfig
    from lede.transitions import Transitions

STATIC_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
"""Draft lengths of the static settings that are tried."""


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
    ) -> None:
        self.config, self.costs = config, costs
        self.held_out, self.digest = held_out, digest
        size = (settings.max_new_tokens, settings.vocab_size, config.branches)
        self.training = TraceTable.from_traces(training, *size)
        self.validation = TraceTable.from_traces(validation, *size)
        self.settings = settings = self._with_forecast(settings)
        tables = CostTables(costs, settings.candidates, self.training.max_context, config.max_draft)
        self._rounds = DraftRounds(self.training, tables, settings.features, seed=config.seed)
        self._clairvoyant = solve(self.training, costs, settings.candidates, config.max_draft, config.seed)
        self.static = best_static(self.training, costs, config.max_draft)
        self.rate = simulate(self.static, self.training, costs).rate
        self.static_speedup = simulate(self.static, self.validation, costs).speedup
        self._scorer = Scorer(self.validation, costs, settings.candidates, config.max_draft)
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
        """Continue, exit, and a blind draft at each candidate."""
        return BLIND + len(self.settings.candidates)

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
        return {
            "objective": "wall-clock",
            "static": {"exit_layer": self.static.config.exit_layer, "draft_length": self.static.config.draft_length},
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
        if policy is None:
            part = record(self._rounds, rng, episode=self._unit, clairvoyant=self._clairvoyant)
        else:
            share, flips = self.config.explore, self.config.flips
            part = record(self._rounds, rng, policy.decide, share, flips, self._unit, self._clairvoyant)
        self._kept = [*self._kept, (number, policy)][-self.config.generations :]
        self._parts = [*self._parts, part][-self.config.generations :]

    @property
    def _unit(self) -> str:
        return "round" if self.config.episode == "round" else "prompt"

    def _price(self) -> None:
        self._joined = join(self._parts)
        self.transitions: Transitions = self._joined.priced(self.rate, self.config.shaping)


def stage_flags(features: FeatureConfig) -> tuple[int, ...]:
    """Places of `in_scan` and `in_draft` in the observation, as far as it has them."""
    return tuple(features.names.index(name) for name in ("in_scan", "in_draft") if name in features.names)


def best_static(
    table: TraceTable, costs: CostModel, max_draft: int = 12, layers: Sequence[int] | None = None
) -> StaticPolicy:
    """The static setting with the largest simulated rate; every layer up to L/2 unless `layers` are given."""
    tried = [
        StaticPolicy(exit_layer=layer, draft_length=length, max_draft=max_draft)
        for layer in (layers or range(1, table.n_layers // 2 + 1))
        for length in STATIC_LENGTHS
        if length <= max_draft
    ]
    return max(tried, key=lambda policy: simulate(policy, table, costs).rate)


def policy_settings(config: TrainConfig, settings: StoreSettings, candidates: Sequence[int]) -> StoreSettings:
    """Settings of the traces with the policy's candidates and features."""
    features = FeatureConfig(
        names=config.features or CALIBRATED_FEATURES,
        top_k=settings.features.top_k,
        window=settings.features.window,
        draft_agreement=config.draft_agreement,
    )
    return replace(settings, candidates=tuple(candidates), features=features)


def _weights(policy: LearnedPolicy | None) -> list[Any]:
    import torch

    if policy is None:
        return []
    return [torch.from_numpy(np.array(array)) for pair in policy.network.layers for array in pair]
