"""A model that is a table: vocabulary 4, 3 layers, logits that depend on the whole prefix and on the layer.

It has the interface of EarlyExitModel, so the real decoding loop runs on it, fast enough to walk every path of luck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from lede.decoding import Decoder
from lede.policies.base import SkipSublayers
from lede.verification import Chooser, Warp

VOCAB_SIZE = 4
N_LAYERS = 3


class TableCache:
    """The tokens by position, and a check that each layer is filled without gaps."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.lengths = [0] * N_LAYERS

    def rewind(self, length: int, first_layer: int = 0) -> None:
        self.lengths = [n if i < first_layer else min(n, length) for i, n in enumerate(self.lengths)]


class TableBlock:
    """Where tokens sit."""

    def __init__(self, cache: TableCache, start: int, n_tokens: int) -> None:
        self.cache, self.start, self.n_tokens = cache, start, n_tokens


class TableModel:
    """Logits `(vocabulary,)` of a prefix at a layer are drawn once from the prefix, the layer and the seed.

    Exits resemble the last layer: their logits are a mixture of its logits and of noise.
    """

    n_layers = N_LAYERS
    vocab_size = VOCAB_SIZE
    device = torch.device("cpu")
    dtype = torch.float64
    revision = 0
    compiled = None

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._table: dict[tuple[int, int], torch.Tensor] = {}

    def logits(self, prefix: tuple[int, ...], layer: int) -> torch.Tensor:
        code = 1
        for token in prefix:
            code = code * VOCAB_SIZE + token
        return self._lookup(code, layer)

    def _lookup(self, code: int, layer: int) -> torch.Tensor:
        if (code, layer) not in self._table:
            noise = np.random.default_rng([self.seed, code, layer % 64]).normal(size=VOCAB_SIZE) * 1.5
            if layer < N_LAYERS:
                noise = 0.4 * noise + 0.6 * self._lookup(code, N_LAYERS).numpy()
            self._table[code, layer] = torch.from_numpy(noise)
        return self._table[code, layer]

    def new_cache(self, capacity: int) -> TableCache:
        return TableCache()

    def block(self, cache: TableCache, start: int, n_tokens: int) -> TableBlock:
        return TableBlock(cache, start, n_tokens)

    def embed(self, token_ids: torch.Tensor, block: TableBlock) -> torch.Tensor:
        rows = []
        for i, token in enumerate(token_ids[0].tolist()):
            block.cache.tokens[block.start + i] = token
            code = 1
            for position in range(block.start + i + 1):
                code = code * VOCAB_SIZE + block.cache.tokens[position]
            rows.append([float(code), 0.0])
        return torch.tensor([rows], dtype=torch.float64)

    def run_layers(self, hidden: torch.Tensor, first: int, last: int, block: TableBlock) -> torch.Tensor:
        rows = hidden[0].tolist()
        assert all(done == first for _, done in rows), "layers were left out or run twice"
        for layer in range(first, last):
            assert block.cache.lengths[layer] == block.start, "the cache has a gap"
            block.cache.lengths[layer] = block.start + len(rows)
        return torch.tensor([[(code, last) for code, _ in rows]], dtype=torch.float64)

    def check_sublayers(self) -> None:
        """Any sublayer of this model can be left out."""

    def run_skipping(self, hidden: torch.Tensor, plan: SkipSublayers, block: TableBlock) -> torch.Tensor:
        """Goes on to the end without the inner layer's attention, its MLP or both: three drafts of their own."""
        plan.check(N_LAYERS)
        assert (hidden[..., 1] == plan.prefix).all(), "layers were left out or run twice"
        for layer in range(plan.prefix, N_LAYERS):
            if layer + 1 not in plan.attention:
                assert block.cache.lengths[layer] == block.start, "the cache has a gap"
                block.cache.lengths[layer] = block.start + hidden.shape[1]
        hidden = hidden.clone()
        hidden[..., 1] = len(plan.attention) - 2 * len(plan.mlp) - 2  # a code of its own below every layer's
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = [self._lookup(int(code), int(layer)) for code, layer in hidden[0].tolist()]
        return torch.stack(rows)[None]

    def check_exit_layer(self, layer: int) -> None:
        assert 1 <= layer < N_LAYERS


class Paths:
    """A random source that walks every path: it follows a script and puts the branches not taken on a stack.

    Weights are probabilities, or numbers of draws when `lanes` is given: then each choice splits its draws by a real
    multinomial, which is what that many independent runs of the loop would do.
    """

    def __init__(self, lanes: int | None = None, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed) if lanes else None
        self._stack: list[tuple[list[int], float]] = [([], float(lanes or 1))]
        self._script: list[int] = []
        self._at = 0
        self.weight = 0.0

    def __iter__(self) -> Iterator[None]:
        while self._stack:
            self._script, self.weight = self._stack.pop()
            self._at = 0
            yield

    def _choose(self, probabilities: np.ndarray) -> int:
        if self._at == len(self._script):
            p = np.asarray(probabilities, dtype=np.float64)
            p = p / p.sum()
            weights = self._rng.multinomial(round(self.weight), p) if self._rng else self.weight * p
            outcomes = [int(i) for i in np.flatnonzero(weights)]
            for outcome in outcomes[1:]:
                self._stack.append(([*self._script, outcome], float(weights[outcome])))
            self._script.append(outcomes[0])
            self.weight = float(weights[outcomes[0]])
        self._at += 1
        return self._script[self._at - 1]

    def draw(self, probabilities: torch.Tensor) -> int:
        return self._choose(probabilities.numpy())

    def accept(self, probability: float) -> bool:
        return self._choose(np.array([1 - probability, probability])) == 1


Law = dict[tuple[int, ...], float]


def law_of_loop(
    model: TableModel,
    make_policy: Callable[[], Any],
    warp: Warp,
    n_tokens: int,
    *,
    eos: frozenset[int] = frozenset(),
    processors: LogitsProcessorList | None = None,
    lanes: int | None = None,
    decoder_class: type[Decoder] = Decoder,
) -> Law:
    """The law of what the real loop writes after the prompt (0, 1), or counts of `lanes` draws from it."""
    law: Law = {}
    paths = Paths(lanes)
    for _ in paths:
        decoder = decoder_class(model, make_policy(), Chooser(warp, paths, processors), eos)  # type: ignore[arg-type]  # a stand-in for a model
        text = tuple(t for tokens in decoder.decode((0, 1), n_tokens) for t in tokens)
        law[text] = law.get(text, 0.0) + paths.weight
    return law


def law_of_model(
    model: TableModel,
    warp: Warp,
    n_tokens: int,
    *,
    eos: frozenset[int] = frozenset(),
    processors: LogitsProcessorList | None = None,
) -> Law:
    """The law of plain decoding, by multiplying the table's own probabilities: no code of the loop is used."""
    law: Law = {}

    def extend(text: tuple[int, ...], weight: float) -> None:
        if len(text) == n_tokens or (text and text[-1] in eos):
            law[text] = law.get(text, 0.0) + weight
            return
        scores = model.logits((0, 1, *text), N_LAYERS).float()
        if processors:
            scores = processors(torch.tensor([[0, 1, *text]]), scores[None].clone())[0]  # type: ignore[arg-type]  # typed for long ids
        for token, p in enumerate(warp.probabilities(scores).tolist()):
            if p > 0:
                extend((*text, token), weight * p)

    extend((), 1.0)
    return law


def distance(law: Law, other: Law) -> float:
    """Total variation distance of two laws."""
    return 0.5 * sum(abs(law.get(text, 0.0) - other.get(text, 0.0)) for text in law.keys() | other.keys())


def first_tokens(law: Law, n: int) -> Law:
    """The joint law of the first n tokens."""
    out: Law = {}
    for text, weight in law.items():
        out[text[:n]] = out.get(text[:n], 0.0) + weight
    return out


def chi_square_z(counts: Law, law: Law) -> float:
    """Chi-square statistic of counts against a law, in standard deviations above its mean."""
    n = sum(counts.values())
    cells = [(counts.get(text, 0.0), n * p) for text, p in law.items()]
    stray = sum(weight for text, weight in counts.items() if text not in law)
    chi = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells if wanted >= 5)
    dof = max(1, sum(1 for _, wanted in cells if wanted >= 5) - 1)
    return float("inf") if stray else (chi - dof) / (2 * dof) ** 0.5
