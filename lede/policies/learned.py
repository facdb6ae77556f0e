"""The learned policy: a small Q-network, frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lede.features import FeatureConfig, parse_candidates
from lede.lookup import LookupConfig
from lede.policies.base import BLIND, ExitAt, LayerState, Lookup, Policy, PolicyConfig, PreScan, PreScanState
from lede.policies.plan_numbers import numbered_plans
from lede.q_network import Array, Layers, QNetwork, fold_normalisation
from lede.rewards import CONTINUE, EXIT

if TYPE_CHECKING:
    from lede.models import EarlyExitModel
    from lede.phrases import PhraseMemory

__all__ = ["LearnedConfig", "LearnedPolicy", "QNetwork", "fold_normalisation"]

_FLAGS = ("in_scan", "in_draft")


@dataclass(frozen=True)
class LearnedConfig(PolicyConfig):
    """Settings of a learned policy."""

    features: FeatureConfig = field(default_factory=FeatureConfig)
    """The observation that the network was trained on."""
    lookup: LookupConfig | None = None
    """How the text is searched for drafts; None keeps no index."""
    lookups: tuple[Lookup, ...] = ()
    """Drafts from the text that the pre-scan chooses from."""
    fixed_drafts: tuple[ExitAt, ...] = ()
    """Drafts of a fixed length at a candidate, which are not asked about, that the pre-scan chooses from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.lookups) != (self.lookup is not None):
            raise ValueError(
                f"lookups need to know how the text is searched, and the other way round; got lookup {self.lookup} and "
                f"{len(self.lookups)} lookups"
            )
        if len(set(self.lookups)) != len(self.lookups):
            raise ValueError(f"lookups must be distinct, got {list(self.lookups)}")
        drafts, candidates = self.fixed_drafts, self.candidates
        if len(set(drafts)) != len(drafts) or any(plan.length is None for plan in drafts):
            raise ValueError(f"fixed drafts must be distinct and have a length, got {list(drafts)}")
        if drafts and candidates is not None and not {plan.exit_layer for plan in drafts} <= set(candidates):
            raise ValueError(f"fixed drafts must be at candidates, {list(candidates)}, got {list(drafts)}")


class LearnedPolicy(Policy):
    """Exits where Q(EXIT) > Q(CONTINUE), and drafts on at the exit layer while that still holds; ties continue.

    A network with two outputs always scans. One with 2 + K + J + F outputs, for K candidates, J lookups and F fixed
    drafts, also decides the pre-scan, by the largest of all its values: CONTINUE skips the draft, EXIT scans, 2 + k
    drafts blind at candidate k, 2 + K + j drafts by `lookups[j]`, 2 + K + J + f is `fixed_drafts[f]`, and the lowest of
    equals is taken. It must see which stage it is asked in, unless it has no candidates (`candidates=()`): then it
    chooses among lookups and the skip alone, never scans, and no head is ever read to decide.

    Made by `from_network` or loaded from a folder; without a network it refuses to run.

    Source: LEDE (arXiv 2606.03113), sections 3.1 to 3.3. Departs from the paper: `depth` is in the observation (see
    `lede.features`), and the pre-scan is ours.
    """

    kind: ClassVar[str] = "learned"
    config_class: ClassVar[type[PolicyConfig]] = LearnedConfig
    config: LearnedConfig

    _network: QNetwork | None = None
    _plans: tuple[PreScan | ExitAt | Lookup, ...] = ()

    @classmethod
    def from_network(
        cls,
        layers: Layers,
        config: LearnedConfig | None = None,
        *,
        mean: npt.ArrayLike | None = None,
        std: npt.ArrayLike | None = None,
        fingerprint: dict[str, Any] | None = None,
        memory: PhraseMemory | None = None,
        **settings: Any,
    ) -> Self:
        """A policy from the weights of a trained Q-network.

        Args:
            layers: Weight `(out, in)` and bias `(out,)` of each layer, as torch's `Linear` holds them, ReLU between.
            config: Settings; `settings` are laid over them.
            mean: Subtracted from each feature before the first layer, `(feature,)`; folded into it.
            std: Each feature is divided by it after that, `(feature,)`; folded in as well.
            fingerprint: Of the base model; binds the policy, and makes its candidates explicit.
            memory: Of other texts, that the network was trained with.
            **settings: Fields of `LearnedConfig`.

        Raises:
            ValueError: The network does not fit the features, or its shapes do not fit together.
        """
        if fingerprint is not None:
            n_layers = int(fingerprint["architecture"]["n_layers"])
            given = settings.get("candidates", config.candidates if config is not None else None)
            settings["candidates"] = () if given == () else parse_candidates(given, n_layers)
        policy = cls(config, **settings)
        policy._take(QNetwork(fold_normalisation(layers, mean, std)))
        policy.fingerprint = fingerprint
        policy.memory = memory
        return policy

    @property
    def features(self) -> FeatureConfig:
        """The observation that the network was trained on."""
        return self.config.features

    @property
    def network(self) -> QNetwork:
        """The Q-network.

        Raises:
            ValueError: The policy was made without one.
        """
        if self._network is None:
            raise ValueError("this learned policy has no network; load it from its folder or use from_network")
        return self._network

    @property
    def decides_pre_scan(self) -> bool:
        """Whether the network has values for the plans of the pre-scan."""
        return self._network is not None and self._network.n_outputs > BLIND

    @property
    def lookup(self) -> LookupConfig | None:
        """How the text is searched for drafts."""
        return self.config.lookup

    def candidates_for(self, n_layers: int) -> tuple[int, ...]:
        """Candidate layers on a model of `n_layers` layers; none where the policy drafts by lookup alone.

        Raises:
            ValueError: A candidate is outside 1..L-1.
        """
        return () if self.config.candidates == () else super().candidates_for(n_layers)

    def check_model(self, model: EarlyExitModel) -> None:
        """Raise ValueError when a layer that drafts or prunes is outside 1..L-1, or the policy has no network."""
        super().check_model(model)
        for plan in self.config.lookups:
            plan.check(model.n_layers)
        _ = self.network

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt | Lookup:
        """The plan with the largest value; to scan where the network has no values for plans."""
        if not self.decides_pre_scan:
            return PreScan.SCAN
        return self._plans[self.network.best(state.observation)]

    def scan(self, state: LayerState) -> bool:
        """Exit when that is worth more than going on."""
        return self.network.advantage(state.observation) > 0

    def draft(self, state: LayerState) -> bool:
        """Draft on while an exit here would be worth more than going on."""
        return self.network.advantage(state.observation) > 0

    def q_values(self, observations: npt.ArrayLike) -> Array:
        """Q of a batch: `(..., output)`, CONTINUE, EXIT and any plans, of observations `(..., feature)`."""
        return self.network.values(observations)

    def greedy(self, observations: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The actions `(...)` that `scan` takes at observations `(..., feature)`, up to float32 rounding at a tie."""
        values = self.q_values(observations)
        return np.where(values[..., EXIT] > values[..., CONTINUE], EXIT, CONTINUE).astype(np.int64)

    def decide(self, observations: npt.ArrayLike, legal: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.int64]:
        """What the policy does in any stage, `(n,)`, up to float32 rounding at a tie.

        Args:
            observations: `(n, feature)`. The stage is told by `in_scan` and `in_draft`; where the observation has
                neither, by `legal`, or it is no pre-scan.
            legal: Actions that may be taken, `(n, action)`; None for all that the stage has.

        Raises:
            ValueError: The network has values for another number of plans.
        """
        seen = np.asarray(observations, dtype=np.float32)
        n_outputs = self.network.n_outputs
        if legal is not None and n_outputs > BLIND and legal.shape[1] != n_outputs:
            raise ValueError(f"the network has {n_outputs} outputs, the legal actions are {legal.shape[1]}")
        values = np.full((len(seen), n_outputs if legal is None else legal.shape[1]), -np.inf, dtype=np.float32)
        values[:, :n_outputs] = self.q_values(seen)
        flags = [self.features.names.index(name) for name in _FLAGS if name in self.features.names]
        if len(flags) == len(_FLAGS):
            before = ~(seen[:, flags] != 0).any(axis=1)
        elif self.config.candidates == ():
            before = np.ones(len(seen), dtype=np.bool_)
        else:
            before = np.zeros(len(seen), dtype=np.bool_) if legal is None else legal[:, BLIND:].any(axis=1)
        values[~before, BLIND:] = -np.inf
        if n_outputs == BLIND:
            values[before, CONTINUE] = -np.inf  # always scans
        if legal is not None:
            values[~legal] = -np.inf
        return np.asarray(values.argmax(axis=1), dtype=np.int64)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """`layers.I.weight` `(out, in)` and `layers.I.bias` `(out,)`, normalisation folded in."""
        named: dict[str, npt.NDArray[Any]] = {}
        for i, (weight, bias) in enumerate(self.network.layers):
            named[f"layers.{i}.weight"], named[f"layers.{i}.bias"] = weight, bias
        return named

    def load_tensors(self, tensors: dict[str, npt.NDArray[Any]]) -> None:
        """Take the network from named tensors.

        Raises:
            ValueError: A tensor is missing, unknown or of the wrong shape.
        """
        n_layers = len(tensors) // 2
        wanted = [f"layers.{i}.{part}" for i in range(n_layers) for part in ("weight", "bias")]
        if not wanted or sorted(tensors) != sorted(wanted):
            raise ValueError(
                f"the Q-network's tensors must be layers.0.weight, layers.0.bias, ..., got {sorted(tensors)}"
            )
        layers = [(tensors[f"layers.{i}.weight"], tensors[f"layers.{i}.bias"]) for i in range(n_layers)]
        self._take(QNetwork(layers))

    def _take(self, network: QNetwork) -> None:
        names = self.config.features.names
        if network.n_features != len(names):
            raise ValueError(f"the Q-network takes {network.n_features} features, the config names {list(names)}")
        candidates, n_lookups, n_fixed = self.config.candidates, len(self.config.lookups), len(self.config.fixed_drafts)
        if network.n_outputs > BLIND or n_lookups or n_fixed or candidates == ():
            n_plans = network.n_outputs - BLIND - n_lookups - n_fixed
            if candidates is None or len(candidates) != n_plans or not candidates + self.config.lookups:
                given = "none are given" if candidates is None else f"they are {list(candidates)}"
                beside = f", beside {n_lookups} lookups" if n_lookups else ""
                beside += f", beside {n_fixed} fixed drafts" if n_fixed else ""
                raise ValueError(
                    f"a Q-network with {network.n_outputs} outputs decides the pre-scan among {n_plans} candidates"
                    f"{beside}, but {given}"
                )
            if candidates and not set(_FLAGS) <= set(names):
                raise ValueError(
                    f"a Q-network with {network.n_outputs} outputs must see the stage: {' and '.join(_FLAGS)} belong "
                    f"to its features, which are {list(names)}"
                )
            if not candidates:
                network = _without_scan(network)
        self._network = network
        self._plans = numbered_plans(candidates or (), self.config.lookups, self.config.fixed_drafts)


def _without_scan(network: QNetwork) -> QNetwork:
    """The network with a value of the scan that never is the largest."""
    weight, bias = (part.copy() for part in network.layers[-1])
    weight[EXIT], bias[EXIT] = 0, -1e30
    return QNetwork([*network.layers[:-1], (weight, bias)])
