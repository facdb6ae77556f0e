"""The learned policy: a small Q-network, frozen, evaluated in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lede.features import FeatureConfig, parse_candidates
from lede.policies.base import LayerState, Policy, PolicyConfig
from lede.rewards import CONTINUE, EXIT

if TYPE_CHECKING:
    from lede.models import EarlyExitModel

Array = npt.NDArray[np.float32]
Layers = Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]


@dataclass(frozen=True)
class LearnedConfig(PolicyConfig):
    """Settings of a learned policy."""

    features: FeatureConfig = field(default_factory=FeatureConfig)
    """The observation that the network was trained on."""


class QNetwork:
    """A multi-layer perceptron with ReLU between its layers: observation in, value of CONTINUE and EXIT out.

    Everything is allocated once, so a decision costs three numpy calls a layer at most and no garbage; the buffers make
    one object unfit for two threads at once.

    Args:
        layers: Weight `(out, in)` and bias `(out,)` of each layer, the last with two outputs; kept as float32.

    Raises:
        ValueError: Shapes do not fit together, or a weight is not finite.
    """

    def __init__(self, layers: Layers) -> None:
        if not layers:
            raise ValueError("a Q-network needs at least one layer, got none")
        self.layers: list[tuple[Array, Array]] = []
        width = None
        for i, (weight, bias) in enumerate(layers):
            if weight.ndim != 2 or bias.shape != weight.shape[:1] or width not in (None, weight.shape[1]):
                wanted = "(out, in)" if width is None else f"(out, {width})"
                raise ValueError(f"layer {i} has weight {weight.shape} and bias {bias.shape}; {wanted} and (out,) fit")
            if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
                raise ValueError(f"layer {i} of the Q-network holds numbers that are not finite")
            self.layers.append((np.array(weight, dtype=np.float32), np.array(bias, dtype=np.float32)))
            width = weight.shape[0]
        if width != 2:
            raise ValueError(f"the Q-network's last layer has {width} outputs, wanted 2 (continue, exit)")
        self.n_features = self.layers[0][0].shape[1]
        # a constant 1 behind every input carries the bias, which saves a call a layer
        self._weights = [np.hstack([weight, bias[:, None]]) for weight, bias in self.layers[:-1]]
        self._inputs = [np.ones(weight.shape[1] + 1, dtype=np.float32) for weight, _ in self.layers]
        self._heads = [buffer[:-1] for buffer in self._inputs]
        # only the difference of the two values decides
        weight, bias = (part.astype(np.float64) for part in self.layers[-1])
        self._last = np.append(weight[EXIT] - weight[CONTINUE], bias[EXIT] - bias[CONTINUE]).astype(np.float32)

    def __reduce__(self) -> tuple[type[QNetwork], tuple[Layers]]:
        """Copies and pickles are built anew: a copied view would no longer share its buffer."""
        return QNetwork, (self.layers,)

    def advantage(self, observation: Array) -> float:
        """Q(EXIT) - Q(CONTINUE) of one observation `(feature,)`."""
        if observation.shape != (self.n_features,):
            raise ValueError(f"the Q-network takes ({self.n_features},) features, got {observation.shape}")
        heads, inputs = self._heads, self._inputs
        heads[0][:] = observation
        for i, weight in enumerate(self._weights):
            head = heads[i + 1]
            np.dot(weight, inputs[i], out=head)
            np.maximum(head, 0.0, out=head)
        return float(np.dot(self._last, inputs[-1]))

    def values(self, observations: npt.ArrayLike) -> Array:
        """Q of a batch: `(..., 2)`, float32, of observations `(..., feature)`."""
        hidden = np.asarray(observations, dtype=np.float32)
        if hidden.shape[-1:] != (self.n_features,):
            raise ValueError(f"the Q-network takes (..., {self.n_features}) features, got {hidden.shape}")
        for i, (weight, bias) in enumerate(self.layers):
            hidden = hidden @ weight.T + bias
            if i < len(self.layers) - 1:
                hidden = np.maximum(hidden, np.float32(0))
        return np.asarray(hidden, dtype=np.float32)


class LearnedPolicy(Policy):
    """Exits where Q(EXIT) > Q(CONTINUE), and drafts on at the exit layer while that still holds; ties continue.

    Made by `from_network` or loaded from a folder; without a network it refuses to run.

    Source: LEDE (arXiv 2606.03113), sections 3.1 to 3.3. Departs from the paper: `depth` is in the observation (see
    `lede.features`).
    """

    kind: ClassVar[str] = "learned"
    config_class: ClassVar[type[PolicyConfig]] = LearnedConfig
    config: LearnedConfig

    _network: QNetwork | None = None

    @classmethod
    def from_network(
        cls,
        layers: Layers,
        config: LearnedConfig | None = None,
        *,
        mean: npt.ArrayLike | None = None,
        std: npt.ArrayLike | None = None,
        fingerprint: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Self:
        """A policy from the weights of a trained Q-network.

        Args:
            layers: Weight `(out, in)` and bias `(out,)` of each layer, as torch's `Linear` holds them, ReLU between.
            config: Settings; `settings` are laid over them.
            mean: Subtracted from each feature before the first layer, `(feature,)`; folded into it.
            std: Each feature is divided by it after that, `(feature,)`; folded in as well.
            fingerprint: Of the base model; binds the policy, and makes its candidates explicit.
            **settings: Fields of `LearnedConfig`.

        Raises:
            ValueError: The network does not fit the features, or its shapes do not fit together.
        """
        if fingerprint is not None:
            n_layers = int(fingerprint["architecture"]["n_layers"])
            given = settings.get("candidates", config.candidates if config is not None else None)
            settings["candidates"] = parse_candidates(given, n_layers)
        policy = cls(config, **settings)
        policy._take(QNetwork(fold_normalisation(layers, mean, std)))
        policy.fingerprint = fingerprint
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

    def check_model(self, model: EarlyExitModel) -> None:
        """Raise ValueError when a candidate is outside 1..L-1 or the policy has no network."""
        super().check_model(model)
        _ = self.network

    def scan(self, state: LayerState) -> bool:
        """Exit when that is worth more than going on."""
        return self.network.advantage(state.observation) > 0

    def draft(self, state: LayerState) -> bool:
        """Draft on while an exit here would be worth more than going on."""
        return self.network.advantage(state.observation) > 0

    def q_values(self, observations: npt.ArrayLike) -> Array:
        """Q of a batch: `(..., 2)`, CONTINUE and EXIT, of observations `(..., feature)`."""
        return self.network.values(observations)

    def greedy(self, observations: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The actions `(...)` that `scan` takes at observations `(..., feature)`, up to float32 rounding at a tie."""
        values = self.q_values(observations)
        return np.where(values[..., EXIT] > values[..., CONTINUE], EXIT, CONTINUE).astype(np.int64)

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
        self._network = network


def fold_normalisation(
    layers: Layers, mean: npt.ArrayLike | None = None, std: npt.ArrayLike | None = None
) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """The same network on raw features: W (x - mean) / std + b becomes (W / std) x + (b - (W / std) mean).

    Raises:
        ValueError: A deviation is not a positive number.
    """
    folded = list(layers)
    if folded and (mean is not None or std is not None):
        weight, bias = (part.astype(np.float64) for part in folded[0])
        scale = np.ones(weight.shape[1]) if std is None else np.asarray(std, dtype=np.float64)
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise ValueError(f"std must be positive numbers, got {scale.tolist()}")
        shift = np.zeros(weight.shape[1]) if mean is None else np.asarray(mean, dtype=np.float64)
        if scale.shape != shift.shape or scale.shape != weight.shape[1:]:
            raise ValueError(f"mean {shift.shape} and std {scale.shape} must have a number for each of the inputs")
        weight = weight / scale
        folded[0] = (weight, bias - weight @ shift)
    return folded
