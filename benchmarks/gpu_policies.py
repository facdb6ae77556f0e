"""Policies for a model that nothing was trained on: a few seconds of measuring, then arithmetic.

A static setting from the measured agreement and the measured seconds of a pass, of a draft and of a head read; and a
learned policy whose network is written by hand: it drafts blind at one layer and stops where the head read's surprisal
says that the next token is not worth its draft. A trained network can only be better.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lede.features import FeatureConfig, primitives
from lede.generation import generate
from lede.interleaving import synchronize
from lede.layer_agreement import layer_agreement
from lede.models import EarlyExitModel
from lede.policies import LearnedPolicy, StaticPolicy

Text = tuple[Sequence[int], Sequence[int]]
"""A prompt and its new tokens."""

MAX_DRAFT = 12
"""Most tokens drafted in a round."""
_REPEATS = 7
_BLOCK = 4  # tokens of the verification that is timed


@dataclass(frozen=True)
class PassSeconds:
    """What the parts of a round take, in seconds."""

    layer: float
    """A layer over one token."""
    verified_layer: float
    """A layer over a few tokens."""
    head: float
    """A head read, and the host waiting for its token."""
    n_layers: int
    """Layers of the model."""

    @property
    def plain(self) -> float:
        """A plain pass."""
        return self.n_layers * self.layer + self.head

    def round(self, layer: int, length: int) -> float:
        """A round that drafts `length` tokens at `layer`."""
        shallow = (length + 1) * layer * self.layer + length * self.head
        return shallow + (self.n_layers - layer) * self.verified_layer + self.head


@dataclass(frozen=True)
class Tuned:
    """What the arithmetic chose."""

    layer: int
    """Exit layer of both policies."""
    length: int
    """Draft length of the static one."""
    agreement: tuple[float, ...]
    """Measured share of tokens that each layer foretells, from layer 1."""
    surprisal: float
    """Where the learned one stops drafting, in nats."""
    expected_speedup: float
    """Of the static setting over plain decoding, by the arithmetic."""
    static: StaticPolicy
    """The static policy."""
    learned: LearnedPolicy
    """The hand-made network."""


def plain_texts(model: EarlyExitModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Text]:
    """Greedy texts of the plain model."""
    return [
        (ids, generate(model, input_ids=ids, max_new_tokens=max_new_tokens).sequences[0, len(ids) :].tolist())
        for ids in prompts
    ]


@torch.inference_mode()
def pass_seconds(model: EarlyExitModel) -> PassSeconds:
    """Time the parts of a round on the model itself; medians."""
    depth = model.n_layers
    cache = model.new_cache(2 * _BLOCK)
    hidden = model.embed(torch.zeros(1, _BLOCK, dtype=torch.long, device=model.device), model.block(cache, 0, _BLOCK))

    def layers(n_tokens: int) -> None:
        model.run_layers(hidden[:, :n_tokens], 0, depth, model.block(cache, 0, n_tokens))
        cache.rewind(0)

    return PassSeconds(
        layer=_median_seconds(model, lambda: layers(1)) / depth,
        verified_layer=_median_seconds(model, lambda: layers(_BLOCK)) / depth,
        head=_median_seconds(model, lambda: int(model.head(hidden[:, :1])[0, -1].argmax())),
        n_layers=depth,
    )


def best_static(agreement: Sequence[float], seconds: PassSeconds) -> tuple[int, int, float]:
    """The exit layer and draft length that write most tokens a second, and the speedup over plain decoding.

    A draft of n tokens, each right with probability a if those before it were, writes 1 + a + ... + a^n tokens.

    Args:
        agreement: a of each layer, from layer 1; that of the last layer is not looked at.
        seconds: What the parts of a round take.
    """

    def speedup(layer: int, length: int) -> float:
        tokens = sum(agreement[layer - 1] ** i for i in range(length + 1))
        return tokens * seconds.plain / seconds.round(layer, length)

    settings = [(layer, length) for layer in range(1, seconds.n_layers) for length in range(1, MAX_DRAFT + 1)]
    best = max(settings, key=lambda setting: speedup(*setting))
    return *best, speedup(*best)


def best_surprisal(surprisals: Sequence[float], matches: Sequence[bool], break_even: float) -> float:
    """The surprisal up to which drafting gains most, each position gaining 1 - break_even if right, else -break_even.

    Just above the last surprisal that is worth it; 0 where none is.
    """
    order = np.argsort(surprisals, kind="stable")
    ordered = np.asarray(surprisals, dtype=np.float64)[order]
    gains = np.cumsum(np.asarray(matches, dtype=np.float64)[order] - break_even)
    if not len(gains) or gains.max() <= 0:
        return 0.0
    best = int(gains.argmax())
    return float((ordered[best] + ordered[best + 1]) / 2 if best + 1 < len(ordered) else ordered[best] + 1.0)


def stop_network(layer: int, surprisal: float, pays: bool) -> LearnedPolicy:
    """A learned policy that drafts blind at `layer` while its surprisal is under `surprisal`.

    Args:
        layer: Its only candidate.
        surprisal: In nats.
        pays: Whether to draft at all; without it every round is a plain pass.
    """
    # Q of CONTINUE, EXIT and the blind draft; surprisal is 0 before the scan, where in_scan and in_draft are 0 too
    weight = np.array([[0.0, 0.0, 0.0], [-1.0, surprisal, surprisal], [0.0, -10.0, -10.0]])
    bias = np.array([0.0, 0.0, 1.0 if pays else -1.0])
    features = FeatureConfig(("surprisal", "in_scan", "in_draft"))
    return LearnedPolicy.from_network([(weight, bias)], features=features, candidates=(layer,), max_draft=MAX_DRAFT)


def tune(model: EarlyExitModel, texts: Sequence[Text]) -> Tuned:
    """Both policies, from plain texts of prompts that are not decoded later.

    Raises:
        ValueError: No text has a second token.
    """
    agreement = layer_agreement(model, texts)
    if agreement is None:
        raise ValueError("no text has a second token to tune on; give a larger budget or other prompts")
    seconds = pass_seconds(model)
    layer, length, speedup = best_static(agreement, seconds)
    surprisals, matches = _readings(model, texts, layer)
    # one more drafted token takes that long; a right one saves what a token takes now
    break_even = (layer * seconds.layer + seconds.head) * max(speedup, 1.0) / seconds.plain
    stop = best_surprisal(surprisals, matches, break_even)
    return Tuned(
        layer=layer,
        length=length,
        agreement=agreement,
        surprisal=stop,
        expected_speedup=speedup,
        static=StaticPolicy(exit_layer=layer, draft_length=length),
        learned=stop_network(layer, stop, pays=speedup > 1 and stop > 0),
    )


@torch.inference_mode()
def _readings(model: EarlyExitModel, texts: Sequence[Text], layer: int) -> tuple[list[float], list[bool]]:
    """Surprisal at the layer at each new token but the first, and whether its likeliest token is the text's."""
    surprisals: list[float] = []
    matches: list[bool] = []
    for prompt, new in texts:
        ids, first = [*prompt, *new[:-1]], len(prompt)
        if len(new) < 2:
            continue
        block = model.block(model.new_cache(len(ids)), 0, len(ids))
        hidden = model.run_layers(model.embed(torch.tensor([ids], device=model.device), block), 0, layer, block)
        read = primitives(model.head(hidden[:, first:])[0], 1)
        surprisals += (-read.top1).tolist()
        matches += (read.token.cpu() == torch.tensor(new[1:])).tolist()
    return surprisals, matches


def _median_seconds(model: EarlyExitModel, run: Callable[[], object]) -> float:
    spent = []
    for _ in range(_REPEATS + 2):
        synchronize(model)
        start = time.perf_counter()
        run()
        synchronize(model)
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[2:])
