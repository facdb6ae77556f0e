"""What decoding costs in seconds, as a linear model of layers, tokens and context, and the cost of a whole round.

A span of n layers over q tokens behind c tokens of context takes

    span + n (layer + [q > 1] layer_block + (q - 1) layer_token) + v (layer_context + (q - 1) layer_pair)

seconds, where v is c summed over the span's layers, each counting no more than its sliding window shows. A head read
takes head + [q > 1] head_block + (q - 1) head_token. One token is a matrix times a vector, several are a matrix times a
matrix, and so there is a step between them. In a draft the same shallow layers run token after token, and are cheaper
where a processor's caches keep them; `CostModel.again` says by how much.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from lede.features import FeatureConfig

Kind = Literal[
    "embed",
    "layers",
    "again",
    "head",
    "observe",
    "features",
    "features_entropy",
    "features_top_k",
    "policy",
    "choose",
    "accept",
    "verify",
    "index",
    "propose",
]
Ending = Literal["stop", "cap", "eos"]

_SIMPLE: dict[str, tuple[str, ...]] = {
    "embed": ("embed",),
    "observe": ("observe",),
    "features": ("observe", "features"),
    "features_entropy": ("observe", "features", "features_entropy"),
    "features_top_k": ("observe", "features", "features_top_k"),
    "policy": ("policy",),
    "choose": ("choose",),
    "index": ("index",),
    "propose": ("propose",),
}
"""Costs in an operation without layers, once each."""
_CONTEXT_TERMS = ("layer_context", "layer_pair")


@dataclass(frozen=True)
class Measurement:
    """One operation of the engine, timed several times."""

    kind: Kind
    """The operation; `verify` is layers, head and acceptance in one, `again` is layers right after the same layers, and
    the features come with the observation."""
    first: int
    """Layers that the states went through before."""
    last: int
    """Layers that they went through after; equal to `first` where no layer runs."""
    q: int
    """Tokens in the block."""
    context: int
    """Tokens in the cache before the block; 0 where nothing depends on it."""
    seconds: float
    """Median over the repeats."""
    lower: float
    """First quartile, in seconds."""
    upper: float
    """Third quartile, in seconds."""


@dataclass(frozen=True)
class Costs:
    """Fitted seconds, none negative; the terms of the formula above, and operations without layers."""

    span: float
    """A block once: masks, rotary tables, positions."""
    layer: float
    """A layer for one token."""
    layer_block: float
    """More in a layer for several tokens, however many."""
    layer_token: float
    """More in a layer for each further token."""
    layer_context: float
    """More in a layer for each token of context."""
    layer_pair: float
    """More in a layer for each pair of a further token and a token of context."""
    head: float
    """A head read of one position."""
    head_block: float
    """More for several positions, however many."""
    head_token: float
    """More for each further position."""
    embed: float
    """One token's block and embedding."""
    observe: float
    """The observation vector, once what it holds is known."""
    features: float
    """Surprisal, margin and likeliest token from logits, moved to the host."""
    features_entropy: float
    """More for the entropy."""
    features_top_k: float
    """More for the confidence in more than one token."""
    policy: float
    """One decision of a Q-network with two hidden layers of 64 units."""
    choose: float
    """A greedy token from logits."""
    accept: float
    """Acceptance of a block of one token."""
    accept_token: float
    """More for each further token."""
    index: float = 0.0
    """One more token in the index of lookups, and the search for the text's end in it; 0 if it was not measured."""
    propose: float = 0.0
    """A proposal copied from the text; 0 if it was not measured."""


@dataclass(frozen=True)
class CostModel:
    """Predicts seconds on one model and device; contexts count the tokens in the cache before the block."""

    n_layers: int
    """Decoder layers."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens; None for full attention."""
    costs: Costs
    """Fitted seconds."""
    again: tuple[tuple[int, float], ...] = ()
    """Layer l and what layers 1..l cost for a token right after the token before, over what they cost after all layers;
    ascending. A processor whose caches hold them is faster then. None: the same."""
    blocks: tuple[tuple[int, float], ...] = ()
    """q and what verifying q tokens takes over the formula, ascending: matrix kernels come in steps. None: the same."""

    def again_seconds(self, last: int, context: int) -> float:
        """Seconds of layers 1..last for one token that follows another one there, as in a draft."""
        return self.seconds(0, last, 1, context) * _between(self.again, last)

    def seconds(self, first: int, last: int, q: int = 1, context: int = 0, resumed: bool = False) -> float:
        """Seconds of layers first+1..last over q tokens; `resumed` when the block went through layers before.

        Raises:
            ValueError: There is no such span, or q or context is out of range.
        """
        total = self._total("layers", first, last, q, context)
        return total - self.costs.span if resumed and first < last else total

    def head_seconds(self, q: int = 1) -> float:
        """Seconds of a head read of q positions."""
        return self._total("head", 0, 0, q, 0)

    def verify_seconds(self, layer: int, q: int, context: int) -> float:
        """Seconds of q states going from `layer` to the last layer, through the head and into acceptance."""
        return self._total("verify", layer, self.n_layers, q, context) * _between(self.blocks, q)

    def plain_seconds(self, context: int) -> float:
        """Seconds of a plain pass: one token embedded, through all layers, read and chosen."""
        return self.costs.embed + self.verify_seconds(0, 1, context)

    def pre_scan_seconds(self, features: FeatureConfig | None = FeatureConfig()) -> float:
        """Seconds of asking a policy before the scan: observation and policy; 0 for one that observes nothing."""
        return 0.0 if features is None else self.costs.observe + self.costs.policy

    def decision_seconds(self, features: FeatureConfig | None = FeatureConfig(), drafting: bool = False) -> float:
        """Seconds of asking a policy at a layer: head read, features, policy; 0 for one that observes nothing.

        Args:
            features: What the policy observes.
            drafting: Whether a position of the draft is asked about, above the lowest candidate: there, features with
                `draft_agreement` cost a second head read.
        """
        if features is None:
            return 0.0
        costs = self.costs
        seconds = self.head_seconds() + costs.observe + self._reading_seconds(features) + costs.policy
        if drafting and features.draft_agreement:
            seconds += self.head_seconds() + costs.choose
        return seconds

    def choice_seconds(self, features: FeatureConfig | None) -> float:
        """Seconds of a greedy token from logits at hand: none where a policy read them, which tells the token too."""
        return self.costs.choose if features is None else 0.0

    def blind_seconds(self, features: FeatureConfig | None = FeatureConfig()) -> float:
        """Seconds of drafting a token that nobody was asked about, from a state at the exit layer.

        A head read and a choice; what the features remember of a drafted position is read too.
        """
        seconds = self.head_seconds() + self.costs.choose
        if features is None or {"trace", "survival", "certainty", "outlook"}.isdisjoint(features.names):
            return seconds
        return seconds + self._reading_seconds(features)

    def _reading_seconds(self, features: FeatureConfig) -> float:
        """Seconds of reading what the features name off logits."""
        seconds = self.costs.features
        if "entropy" in features.names:
            seconds += self.costs.features_entropy
        if "confidence" in features.names and features.top_k > 1:
            seconds += self.costs.features_top_k
        return seconds

    def draft_seconds(
        self, layer: int, context: int, features: FeatureConfig | None = FeatureConfig(), lowest: int = 0
    ) -> float:
        """Seconds of one drafted token: embedded, through layers 1..layer, read, decided on and chosen.

        Args:
            layer: The exit layer.
            context: Tokens in the cache before it.
            features: What the policy observes; None for a policy that is not asked, whose head read drafts alone.
            lowest: The lowest candidate.
        """
        read = self.head_seconds() if features is None else self.decision_seconds(features, drafting=layer > lowest)
        return self.costs.embed + self.again_seconds(layer, context) + read + self.choice_seconds(features)

    def round_seconds(
        self,
        context: int,
        scanned: Sequence[int] = (),
        exit_layer: int | None = None,
        n_drafted: int = 0,
        ending: Ending = "cap",
        features: FeatureConfig | None = FeatureConfig(),
        pre_scan: bool = False,
        lowest: int = 0,
    ) -> float:
        """Seconds of one round, operation by operation as the decoding loop runs them.

        Args:
            context: Tokens in the cache before the round: the text but for its newest token.
            scanned: Candidates inspected in the scan, ascending; the last one is the exit layer if the scan exited.
                None inspected is a skip, or with an exit layer a blind draft.
            exit_layer: The layer that drafts; None for no draft.
            n_drafted: Tokens drafted, at least 1 with an exit layer.
            ending: What ended the draft: the policy ("stop", one more position went to the exit layer and was read),
                the cap (one more position, unread), or an end of sequence (no further position).
            features: What the policy observes; None for a policy that looks at nothing: the head is read to draft
                alone, and the policy's own time is not charged.
            pre_scan: Whether the policy was asked on an observation before the scan.
            lowest: The lowest candidate, where `draft_agreement` has nothing to agree with and reads no second head.

        Raises:
            ValueError: The parts do not make a round.
        """
        layers = [0, *scanned, self.n_layers]
        if any(a >= b for a, b in pairwise(layers)):
            raise ValueError(f"scanned layers {list(scanned)} must ascend within 1..{self.n_layers - 1}")
        if (exit_layer is None) != (n_drafted == 0) or n_drafted < 0:
            raise ValueError(f"a draft needs an exit layer and tokens, got layer {exit_layer} and {n_drafted} tokens")
        if exit_layer is not None and (scanned[-1] if scanned else exit_layer) != exit_layer:
            raise ValueError(f"the scan ended at layer {scanned[-1]}, not at the exit layer {exit_layer}")
        if exit_layer is not None and not 1 <= exit_layer < self.n_layers:
            raise ValueError(f"exit layer {exit_layer} is outside 1..{self.n_layers - 1}")
        total = self.costs.embed
        if pre_scan:
            total += self.pre_scan_seconds(features)
        ask = self.decision_seconds(features)
        for start, layer in zip(layers, scanned, strict=False):
            total += self.seconds(start, layer, 1, context, resumed=start > 0) + ask
        if exit_layer is None:
            return total + self.verify_seconds(scanned[-1] if scanned else 0, 1, context)
        if not scanned:
            total += self.seconds(0, exit_layer, 1, context)
        asked = bool(scanned) and features is not None
        total += self.choice_seconds(features) if asked else self.blind_seconds(features)
        total += sum(self.draft_seconds(exit_layer, context + i, features, lowest) for i in range(1, n_drafted))
        if ending != "eos":
            total += self.costs.embed + self.again_seconds(exit_layer, context + n_drafted)
            total += self.decision_seconds(features, exit_layer > lowest) if ending == "stop" else 0.0
        return total + self.verify_seconds(exit_layer, n_drafted + (ending != "eos"), context)

    def predict(self, measurement: Measurement) -> float:
        """Seconds that the model gives for an operation that was measured."""
        m = measurement
        if m.kind == "again":
            return self.again_seconds(m.last, m.context)
        if m.kind == "verify":
            return self.verify_seconds(m.first, m.q, m.context)
        return self._total(m.kind, m.first, m.last, m.q, m.context)

    def _total(self, kind: Kind, first: int, last: int, q: int, context: int) -> float:
        if not 0 <= first <= last <= self.n_layers:
            raise ValueError(f"layers {first}..{last} are not a span of a model with {self.n_layers} layers")
        if q < 1 or context < 0:
            raise ValueError(f"q must be at least 1 and context at least 0, got {q} and {context}")
        if kind == "layers" and first == last:
            return 0.0
        terms = _terms(kind, last - first, visible(self.windows, first, last, context), q)
        return sum(times * float(getattr(self.costs, name)) for name, times in terms.items())


def visible(windows: Sequence[int | None], first: int, last: int, context: int) -> int:
    """Tokens of context that a new token sees, summed over layers first+1..last."""
    return sum(context if w is None else min(context, w - 1) for w in windows[first:last])


def fit(measurements: Sequence[Measurement], windows: Sequence[int | None]) -> CostModel:
    """The cost model nearest to the medians: least squares of the relative error, no cost below 0.

    A term that would come out negative is left out and the rest fitted again. With one context only, the terms of the
    context are left out, and the model holds near that context.
    """
    names = [field.name for field in fields(Costs)]
    again = [m for m in measurements if m.kind == "again"]
    measurements = [m for m in measurements if m.kind != "again"]
    rows = [_terms(m.kind, m.last - m.first, visible(windows, m.first, m.last, m.context), m.q) for m in measurements]
    matrix = np.array(
        [[row.get(name, 0) / m.seconds for name in names] for row, m in zip(rows, measurements, strict=True)]
    )
    scale = np.linalg.norm(matrix, axis=0)
    one_context = len({m.context for m in measurements if m.kind in ("layers", "verify")}) == 1
    active = [i for i, name in enumerate(names) if scale[i] > 0 and not (one_context and name in _CONTEXT_TERMS)]
    while True:
        found = np.linalg.lstsq(matrix[:, active] / scale[active], np.ones(len(rows)), rcond=None)[0]
        if found.min() >= 0:
            break
        del active[int(found.argmin())]
    solution = dict.fromkeys(names, 0.0)
    solution.update({names[i]: float(value / scale[i]) for i, value in zip(active, found, strict=True)})
    formula = CostModel(len(windows), tuple(windows), Costs(**solution))
    layers = [(m.last, m.seconds / formula.seconds(0, m.last, 1, m.context)) for m in again]
    blocks = [(m.q, m.seconds / formula.predict(m)) for m in measurements if m.kind == "verify"]
    return replace(formula, again=_medians(layers), blocks=_medians(blocks))


def _medians(pairs: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Median of the ratios at each place, ascending."""
    places = sorted({place for place, _ in pairs})
    return tuple((place, statistics.median(ratio for at, ratio in pairs if at == place)) for place in places)


def _between(table: tuple[tuple[int, float], ...], place: int) -> float:
    """The ratio at a place, linear between those in the table; 1 where there is none."""
    if not table:
        return 1.0
    places, ratios = zip(*table, strict=True)
    return float(np.interp(place, places, ratios))


def residuals(model: CostModel, measurements: Sequence[Measurement]) -> dict[str, float]:
    """Root mean square of (predicted / measured - 1) by kind of operation, and over `all`."""
    errors: dict[str, list[float]] = {}
    for m in measurements:
        error = model.predict(m) / m.seconds - 1
        for key in (m.kind, "all"):
            errors.setdefault(key, []).append(error * error)
    return {key: (sum(squares) / len(squares)) ** 0.5 for key, squares in errors.items()}


def _terms(kind: Kind, n_layers: int, seen: int, q: int) -> dict[str, int]:
    """How often each cost occurs in an operation."""
    more, several = q - 1, int(q > 1)
    if kind in _SIMPLE:
        return dict.fromkeys(_SIMPLE[kind], 1)
    layers = {
        "span": 1,
        "layer": n_layers,
        "layer_block": several * n_layers,
        "layer_token": more * n_layers,
        "layer_context": seen,
        "layer_pair": more * seen,
    }
    head = {"head": 1, "head_block": several, "head_token": more}
    accept = {"accept": 1, "accept_token": more}
    return {"layers": layers, "head": head, "accept": accept, "verify": {**layers, **head, **accept}}[kind]
