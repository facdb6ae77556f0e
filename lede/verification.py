"""Acceptance: which drafted tokens stay, and which token follows them.

Greedy decoding keeps the longest prefix that equals the whole model's choices. Sampling keeps token i with
probability min(1, p_i / q_i) and on the first rejection draws from the positive part of p_i - q_i, so that the output
has the whole model's law.

That holds, also when decisions look at distributions, under four conditions:

1. Whether to draft at position i, from which layer, and the warping depend only on what is known before token i is
   drawn (that may include q_i), never on the drawn token, its acceptance draw, or anything computed from them.
2. The token is drawn from exactly the q_i that is used in the ratio and in the residual.
3. A drawn token is always submitted: not dropped, not redrafted from a deeper layer.
4. p_i is the whole model's distribution on that same prefix under the same warping, with a fresh acceptance draw.

A token copied from the text is a point mass: q is 1 at that token, which is a function of the prefix alone. Condition 2
holds with acceptance p(token) and, as the positive part of p - q, p without that token as the residual. Condition 3 is
about drawn tokens, whose dropping would select among draws; leaving a copied token out selects nothing, since its
position would then have been proposed the same token whatever is drawn, and gets a token from p itself. So the tail
of a copied draft may be cut by anything that is a function of the prefix, such as what a layer thinks of it.

Logits processors are part of the warping: they act on the drafting layer's logits and on the whole model's alike, each
on the prefix of its own position, drafted tokens included. They must be functions of that prefix and the logits, with
no memory of their own, since a rejected position comes again with another prefix.

Source: speculative sampling, Leviathan et al. (arXiv 2211.17192), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any, Protocol

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lede.devices import numbers_on
from lede.scores import ScoreRecord


@dataclass(frozen=True)
class Warp:
    """How logits become the distribution that tokens are drawn from; greedy at temperature 0."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Keep the k likeliest tokens; None or 0 keeps all."""
    top_p: float | None = None
    """Keep the smallest set of likeliest tokens whose probabilities reach p; None or 1 keeps all."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p"):
            value: Any = getattr(self, name)
            if value is not None and not isinstance(value, (Real, torch.Tensor)):
                raise ValueError(f"{name} must be a number, got {value!r}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if self.top_k is not None and int(self.top_k) != self.top_k:
            raise ValueError(f"top_k must be a whole number, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.greedy and (self.top_k or (self.top_p or 1) < 1):
            raise ValueError("top_k and top_p only act on sampling; give a temperature above 0 as well")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The warped distribution `(..., vocabulary)` of raw logits `(..., vocabulary)`, by transformers' warpers.

        Raises:
            ValueError: The warp is greedy and has no distribution.
        """
        return torch.softmax(self.scores(logits), dim=-1)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """What the distribution is the softmax of, `(..., vocabulary)`; -inf for tokens that are never drawn.

        Raises:
            ValueError: The warp is greedy and has no distribution.
        """
        if self.greedy:
            raise ValueError("greedy decoding takes the likeliest token; it has no distribution to draw from")
        flat = logits.reshape(-1, logits.shape[-1])
        no_prefix: Any = torch.empty((flat.shape[0], 0), dtype=torch.long, device=flat.device)
        top_k, top_p = self.top_k or 0, 1.0 if self.top_p is None else self.top_p
        for warper in _warpers(float(self.temperature), min(int(top_k), flat.shape[-1]), float(top_p)):
            flat = warper(no_prefix, flat)
        return flat.reshape(logits.shape)


@lru_cache
def _warpers(temperature: float, top_k: int, top_p: float) -> tuple[LogitsProcessor, ...]:
    """Warpers of transformers, none of which keeps anything; its own list asks for their signatures at every call."""
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k=top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p=top_p))
    return tuple(warpers)


class RandomSource(Protocol):
    """Where sampling takes its luck from."""

    def draw(self, probabilities: torch.Tensor) -> int:
        """A token from a distribution `(vocabulary,)`."""

    def accept(self, probability: float) -> bool:
        """True with this probability."""


class TorchSource:
    """Luck from torch generators, which nothing else may share.

    Args:
        generator: Draws tokens, on the device of the distributions.
        acceptance: Accepts them, on the CPU, so that no device is waited for; None for the same generator.
    """

    def __init__(self, generator: torch.Generator, acceptance: torch.Generator | None = None) -> None:
        self.generator = generator
        self.acceptance = acceptance or generator

    def draw(self, probabilities: torch.Tensor) -> int:
        """A token from a distribution `(vocabulary,)`."""
        if probabilities.is_cpu:
            return int(torch.multinomial(probabilities, 1, generator=self.generator))
        # the same race of exponential clocks, but a device that is asked for its winner once, and not thrice
        clocks = torch.empty_like(probabilities).exponential_(generator=self.generator)
        best, token = (probabilities / clocks).max(-1)
        how_fast, winner = torch.stack([best.float(), token.float()]).tolist()  # exact up to 2^24 entries
        if not 0 < how_fast < float("inf"):
            raise RuntimeError("a distribution to draw from holds NaN or infinity, or nothing but zeros")
        return int(winner)

    def accept(self, probability: float) -> bool:
        """True with this probability."""
        return float(torch.rand((), generator=self.acceptance, device=self.acceptance.device)) < probability


class Chooser:
    """Turns logits into tokens, for drafts and for the whole model alike.

    Args:
        warp: Temperature, top-k and top-p.
        source: The luck of sampling; not used when greedy.
        processors: transformers logits processors, called with the tokens before the position, and before the warp.
        padding: Ids put in front of those tokens, for processors that were made for a padded row.
        record: Where the whole model's scores of every token that stays are kept; None keeps none.
    """

    def __init__(
        self,
        warp: Warp,
        source: RandomSource,
        processors: LogitsProcessorList | None = None,
        padding: Sequence[int] = (),
        record: ScoreRecord | None = None,
    ) -> None:
        self.warp = warp
        self.source = source
        self.processors = processors if processors else None
        self.padding = padding
        self.record = record

    @property
    def takes_likeliest(self) -> bool:
        """Whether a token is the likeliest by raw logits."""
        return self.processors is None and self.warp.greedy

    def choose(self, logits: torch.Tensor, prefix: Sequence[int]) -> tuple[int, torch.Tensor | None]:
        """The next token from raw logits `(vocabulary,)`, and the distribution it was drawn from (None if greedy)."""
        scores = logits.float() if self.processors is None else self._process(logits[None], prefix, ())[0]
        if self.warp.greedy:
            return int(scores.argmax()), None
        q = self.warp.probabilities(scores)
        return self.source.draw(q), q

    def verify(
        self,
        logits: torch.Tensor,
        drafted: Sequence[int],
        distributions: Sequence[torch.Tensor | None],
        prefix: Sequence[int],
    ) -> tuple[int, int | None]:
        """How many drafted tokens stay, and the token after them.

        Args:
            logits: The whole model's raw logits at the drafted positions and, when there is one, at the position of the
                bonus token, `(drafted [+ 1], vocabulary)`.
            drafted: Drafted tokens.
            distributions: What each was drawn from, `(vocabulary,)`; None entries when greedy, and for a token that is
                a function of the prefix.
            prefix: Tokens before the first drafted one.

        Returns:
            The number accepted, and the correction or bonus token; None when all were accepted and there is no bonus.
        """
        scores = self._process(logits, prefix, drafted, distributions)
        drafted, distributions = drafted[: len(scores)], distributions[: len(scores)]
        if self.warp.greedy:
            accepted, following = _longest_prefix(scores, drafted)
        else:
            scores = self.warp.scores(scores)
            accepted, following = self._verify_sampled(torch.softmax(scores, dim=-1), drafted, distributions)
        if self.record is not None:
            n_tokens = accepted + (following is not None)
            self.record.add(logits[:n_tokens], scores[:n_tokens])
        return accepted, following

    def _verify_sampled(
        self, p: torch.Tensor, drafted: Sequence[int], distributions: Sequence[torch.Tensor | None]
    ) -> tuple[int, int | None]:
        ratios: Iterable[Any] = (
            p[i, token] if q is None else p[i, token] / q[token]
            for i, (token, q) in enumerate(zip(drafted, distributions, strict=True))
        )
        if drafted and not p.is_cpu:
            ratios = torch.stack(list(ratios)).tolist()  # one transfer, and not one a token
        for i, (token, q, ratio) in enumerate(zip(drafted, distributions, ratios, strict=True)):
            if self.source.accept(min(1.0, float(ratio))):
                continue
            if q is None:
                residual = p[i].clone()
                residual[token] = 0
            else:
                residual = (p[i] - q).clamp_min(0)
            total = residual.sum()
            # rejected although p equals q up to rounding: nothing is left over, and p is the right law
            return i, self.source.draw(torch.where(total > 0, residual / total, p[i]))
        bonus = self.source.draw(p[len(drafted)]) if p.shape[0] > len(drafted) else None
        return len(drafted), bonus

    def _process(
        self,
        logits: torch.Tensor,
        prefix: Sequence[int],
        drafted: Sequence[int],
        distributions: Sequence[torch.Tensor | None] = (),
    ) -> torch.Tensor:
        """Scores `(row, vocabulary)` of logits at the position after the prefix and after each drafted token.

        Processors are not asked about what follows a token that can't stay, whose rows are then left out: plain
        decoding would never come there, and a grammar, for example, may have no answer.
        """
        scores = logits.float()  # as transformers does before it chooses, so that ties fall alike
        if self.processors is None:
            return scores
        ids = numbers_on(scores.device, [[*self.padding, *prefix, *drafted]])
        first = ids.shape[1] - len(drafted)
        rows: list[torch.Tensor] = []
        for i in range(scores.shape[0]):
            rows.append(self.processors(ids[:, : first + i], scores[i : i + 1].clone()))  # type: ignore[arg-type]  # as above
            if i < len(drafted) and self._rules_out(rows[i], drafted[i], distributions[i]):
                break
        return torch.cat(rows)

    def _rules_out(self, scores: torch.Tensor, drafted: int, q: torch.Tensor | None) -> bool:
        """Whether a drafted token can't stay by the scores at its position, `(1, vocabulary)`."""
        if self.warp.greedy:
            return int(scores.argmax()) != drafted
        # a token that was drawn is one that the processors allow
        return q is None and float(self.warp.probabilities(scores)[0, drafted]) == 0


def _longest_prefix(scores: torch.Tensor, drafted: Sequence[int]) -> tuple[int, int | None]:
    """How many drafted tokens are the likeliest at their position, and the likeliest token behind them, if any."""
    targets = scores.argmax(-1).tolist()
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == targets[accepted]:
        accepted += 1
    return accepted, targets[accepted] if accepted < len(targets) else None
