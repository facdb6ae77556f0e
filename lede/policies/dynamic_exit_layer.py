"""The dynamic-exit-layer policy: what every layer would have drafted tells where, and how far, to draft next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from lede.features import FeatureConfig
from lede.policies.base import (
    ExitAt,
    LayerState,
    Policy,
    PolicyConfig,
    PreScan,
    PreScanState,
    RoundReport,
    SkipSublayers,
)
from lede.policies.shadow_counts import ShadowCounts

if TYPE_CHECKING:
    from lede.models import EarlyExitModel

Stop = Literal["both", "length", "confidence"]

_FEATURES = FeatureConfig(names=("surprisal",))  # a limit on the probability is one on its negative logarithm


@dataclass(frozen=True)
class DynamicExitLayerConfig(PolicyConfig):
    """Settings of a dynamic-exit-layer policy."""

    every_layer: bool = False
    """Whether all layers 1..L-1 may draft and are read after each round, whatever the candidates are."""
    stop: Stop = "both"
    """What ends a draft: the "length" that the estimates ask for, "confidence" that falls below the threshold, or
    "both", whichever comes first."""
    decay: float = 0.95
    """Weight of all that was counted before, at each round that counts more (omega)."""
    prior: float = 1.0
    """Made-up positions, half of them right, that the counts of every layer begin with; 0 for none."""
    head_cost: float = 0.0
    """Layers that a head read counts as where tokens per layer are weighed."""
    carry: bool = True
    """Whether a text begins with what was counted in the texts before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop not in get_args(Stop):
            raise ValueError(f"stop must be one of {', '.join(get_args(Stop))}, got '{self.stop}'")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be within 0..1, got {self.decay}")
        for name in ("prior", "head_cost"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")


def tokens_per_layer(
    acceptance: Sequence[float] | npt.NDArray[np.floating],
    layers: Sequence[int] | npt.NDArray[np.integer],
    n_layers: int,
    max_draft: int,
    head_cost: float = 0.0,
) -> npt.NDArray[np.float64]:
    """Tokens that a round brings for each layer that runs, `(layer, length)` with lengths 0..max_draft.

    A draft of d tokens at layer l brings 1 + a + ... + a^d tokens when each is right with probability a if those before
    it are, and runs d l + L layers.

    Source: DEL (arXiv 2504.05598), tokens per layer: ((1 - a^(d+1)) / (1 - a)) / (d l + L), here as a sum, which holds
    at a = 1 too.
    Departs from the paper: where a head read counts as h layers, a round costs d (l + h) + L + h of them; h = 0 is the
    paper's.

    Args:
        acceptance: Probability that a layer's token is right, `(layer,)`.
        layers: Exit layers, `(layer,)`.
        n_layers: Layers of the model.
        max_draft: Longest draft.
        head_cost: Layers that a head read counts as.
    """
    lengths = np.arange(max_draft + 1)
    right = np.asarray(acceptance, dtype=np.float64)[:, None]
    tokens = np.cumsum(right**lengths, axis=1)
    cost = lengths * (np.asarray(layers)[:, None] + head_cost) + (n_layers + head_cost)
    return np.asarray(tokens / cost)


class DynamicExitLayerPolicy(Policy):
    """Drafts where, and as far as, tokens per layer are expected to be most; a shaky token ends a draft early.

    After a round the states of all layers at the positions whose prefix is the text are there anyway. The head reads
    from them the token that each layer would have drafted, its shadow token. The share of shadow tokens that the text
    confirmed is the layer's acceptance; before the next round the exit layer and the length are those that maximise
    `tokens_per_layer`, the shallowest and shortest of equals. Length 0 is a plain pass. A draft also ends where the
    likeliest token is less likely than the threshold of the layer: halfway between the mean probability of its shadow
    tokens that were right and of those that were wrong. While there is none of either, no confidence ends a draft.

    Source: DEL (arXiv 2504.05598), shadow tokens, tokens per layer and dynamic draft exiting; the threshold halfway,
    counts that fade by 0.95 a round, and positions counted up to the first that the exit layer had wrong are those of
    the authors' code.
    Departs from the paper: it reads the last 32 positions of the prompt before the first round of each text; here
    nothing of the prompt is read, counts begin with a prior and go on from text to text unless `carry` says no. It
    estimates every layer; here the candidates, for fewer head reads, unless `every_layer` says so. In the authors' code
    the draft ends by confidence alone (18 tokens at most), whatever the length chosen: `stop=confidence` is that. The
    first token that is not likely enough is not drafted here: its position is at the exit layer already, so it joins
    verification and yields the token after the draft. Where text is sampled, shadow tokens are held against the text,
    not against the likeliest token of the whole model. With logits processors, shadow tokens are those of raw logits
    while drafts and the text are not: the text stays exact, but the estimates may be off.
    """

    kind: ClassVar[str] = "del"
    config_class: ClassVar[type[PolicyConfig]] = DynamicExitLayerConfig
    config: DynamicExitLayerConfig

    _n_layers: int | None = None
    _counts: ShadowCounts | None = None
    _restored: dict[str, Any] | None = None  # a state that waits for a model

    def __init__(self, config: PolicyConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._length, self._limit = 0, math.inf  # of the round that is on

    @property
    def features(self) -> FeatureConfig | None:
        """The one feature that is compared; none where the length alone ends a draft."""
        return None if self.config.stop == "length" else _FEATURES

    @property
    def shadow_layers(self) -> tuple[int, ...]:
        """The layers that may draft."""
        return self.counts.layers

    @property
    def counts(self) -> ShadowCounts:
        """What is known of every layer that may draft.

        Raises:
            ValueError: No model has told yet which layers these are.
        """
        if self._counts is None:
            raise ValueError("this del policy takes its layers from the model; call check_model(model) first")
        return self._counts

    def candidates_for(self, n_layers: int) -> tuple[int, ...]:
        """The layers that may draft.

        Raises:
            ValueError: A candidate is outside 1..L-1.
        """
        candidates = super().candidates_for(n_layers)
        return tuple(range(1, n_layers)) if self.config.every_layer else candidates

    def check_model(self, model: EarlyExitModel) -> None:
        """Settle the layers on this model; what was counted at other layers, or at another depth, is forgotten.

        Raises:
            ValueError: A candidate is outside 1..L-1, or a restored state is of other layers.
        """
        layers = self.candidates_for(model.n_layers)
        if self._counts is None or self._counts.layers != layers or self._n_layers != model.n_layers:
            self._counts = ShadowCounts(layers, self.config.decay, self.config.prior)
        self._n_layers = model.n_layers
        if self._restored is not None:
            self._counts.restore(self._restored)
            self._restored = None

    def choose(self) -> tuple[int, int]:
        """The exit layer and the length of the draft that promise most tokens per layer."""
        counts = self.counts
        assert self._n_layers is not None  # known together with the counts
        config = self.config
        promised = tokens_per_layer(
            counts.acceptance(), counts.layers, self._n_layers, config.max_draft, config.head_cost
        )
        place, length = divmod(int(promised.argmax()), promised.shape[1])
        return counts.layers[place], length

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt | SkipSublayers:
        """Draft at the layer that promises most, or not at all."""
        layer, length = self.choose()
        if length == 0:
            return PreScan.SKIP
        stop = self.config.stop
        self._length = self.config.max_draft if stop == "confidence" else length
        threshold = 0.0 if stop == "length" else self.counts.threshold(layer)
        self._limit = -math.log(threshold) if threshold > 0 else math.inf
        return ExitAt(layer)

    def scan(self, state: LayerState) -> bool:
        """Exit at the layer that promises most; asked only where a caller scans in spite of `pre_scan`."""
        layer, length = self.choose()
        return length > 0 and state.layer == layer

    def draft(self, state: LayerState) -> bool:
        """Draft on until the length is reached or the likeliest token is too unlikely."""
        if state.n_drafted >= self._length:
            return False
        return self._limit == math.inf or float(state.observation[0]) <= self._limit

    def begin(self, n_prompt_tokens: int) -> None:
        """A text begins: forget the ones before it where the settings say so."""
        if not self.config.carry:
            self.reset()

    def verified(self, report: RoundReport) -> None:
        """Count the shadow tokens of a round.

        Raises:
            ValueError: They are of other layers.
        """
        if report.shadow is not None:
            self.counts.add(report.shadow)

    def state(self) -> dict[str, Any]:
        """What was counted, by layer; empty before a model has told the layers."""
        if self._counts is None:
            return dict(self._restored or {})
        return self._counts.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what was counted; before a model has told the layers, at `check_model`.

        Raises:
            ValueError: It is not what `state` gave, or of other layers than those that may draft.
        """
        if self._counts is None:
            ShadowCounts.check(state)
            self._restored = dict(state) or None
        elif state:
            self._counts.restore(state)
        else:
            self._counts.clear()

    def reset(self) -> None:
        """Forget what was counted."""
        self._restored = None
        if self._counts is not None:
            self._counts.clear()
