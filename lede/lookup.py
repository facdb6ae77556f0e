"""Drafts copied from the text itself: where its end has been before, and what followed there.

An index of n-grams grows with the text, at a few dictionary entries a token however long the text is. Behind it may
stand a memory of other texts (`lede.phrases`), for where the text has nothing of its own. A draft is a function of the
text so far, so it is a point mass: see `lede.verification` for why that keeps the law of sampling.

Source: prompt lookup (Saxena, 2023) and LLMA (arXiv 2304.04487). Departs from both: the index is incremental, generated
text is indexed with the prompt, and a draft that reaches the end of the text goes on in itself, as in LZ77 (Ziv and
Lempel, 1977), so that a loop is drafted to any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from lede.phrases import PhraseMemory

Continuation = Literal["recent", "frequent"]
"""Which earlier place is copied from: the last one, or the last one with the most frequent next token."""

MAX_MATCH = 32
"""Tokens before the end of the text that are compared with those before the place copied from."""

RECENT_TOKENS = 16
"""Tokens that `LookupIndex.hits` looks back on."""

OWN = 2
"""Tokens of a match in the text itself from which on no memory is asked: however well a memory knows its phrase, what
this text wrote before proved right more often."""

_BASE = 1 << 32  # larger than any token id, so that an n-gram is one number
_HITS = (1 << RECENT_TOKENS) - 1


@dataclass(frozen=True)
class LookupConfig:
    """How earlier places are found."""

    max_suffix: int = 3
    """Longest end of the text, in tokens, that is searched for; shorter ones are tried when it is new."""
    min_suffix: int = 1
    """Shortest end of the text that is searched for."""
    continuation: Continuation = "recent"
    """Which of several earlier places is copied from: the most `recent`, or the last with the most `frequent` next
    token."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_suffix <= self.max_suffix <= MAX_MATCH:
            raise ValueError(
                f"a suffix must have 1 <= min_suffix <= max_suffix <= {MAX_MATCH} tokens, got min_suffix "
                f"{self.min_suffix} and max_suffix {self.max_suffix}"
            )
        if self.continuation not in get_args(Continuation):
            names = " or ".join(get_args(Continuation))
            raise ValueError(f"continuation must be {names}, got '{self.continuation}'")


class Match(NamedTuple):
    """Where the end of a text has been before."""

    start: int
    """Place of the token that followed there; where it is remembered, the number of the phrase in the memory."""
    length: int
    """Tokens before it that are those at the end of the text, at most `MAX_MATCH`."""
    occurrences: int
    """Earlier places where the suffix that was searched for stands."""
    agreement: float
    """Share of those places that were followed by the token at `start`."""
    remembered: bool = False
    """Whether the places are in other texts, those of a memory."""


class LookupIndex:
    """The n-grams of one text.

    Args:
        config: How earlier places are found.
        tokens: The beginning of the text.
        memory: Of other texts. It is asked where the text itself has no match of `OWN` tokens, and drafts where its
            phrase is longer than the text's match.
    """

    def __init__(self, config: LookupConfig, tokens: Iterable[int] = (), memory: PhraseMemory | None = None) -> None:
        self.config = config
        self.memory = memory
        self.tokens: list[int] = []
        orders = range(config.max_suffix + 1)
        # by order: the n-gram to where its last copy went on, how often it went on, and how often with which token
        self._last: list[dict[int, int]] = [{} for _ in orders]
        self._count: list[dict[int, int]] = [{} for _ in orders]
        self._pairs: list[dict[int, int]] = [{} for _ in orders]
        self._best: list[dict[int, tuple[int, int]]] = [{} for _ in orders]
        self._hits = 0
        self._found: Match | None = None
        self._next: int | None = None  # the first token of a proposal
        self._fresh = False
        self.extend(tokens)

    @property
    def hits(self) -> float:
        """Share of the last 16 tokens that were what a lookup at their place would have proposed, drafted or not."""
        return self._hits.bit_count() / RECENT_TOKENS

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on."""
        for token in tokens:
            self.match()
            self._hits = (self._hits << 1 | (self._next == token)) & _HITS
            self._append(token)

    def match(self) -> Match | None:
        """Where the longest known suffix of the text has been before; None where even the shortest is new."""
        if not self._fresh:
            self._found, self._next = self._search()
            self._fresh = True
        return self._found

    def propose(self, length: int) -> list[int]:
        """The next `length` tokens by the match; none without one, and fewer where a memory knows no more."""
        found = self.match()
        if found is None or length < 1:
            return []
        if found.remembered:
            assert self.memory is not None
            return self.memory.chain(self.tokens, length, self.config.max_suffix, self.config.min_suffix)
        start, n = found.start, len(self.tokens)
        copied = self.tokens[start : start + length]
        period = n - start
        while len(copied) < length:  # the copy has reached its own beginning
            copied.append(copied[len(copied) - period])
        return copied

    def _append(self, token: int) -> None:
        tokens, place = self.tokens, len(self.tokens)
        key, frequent = 0, self.config.continuation == "frequent"
        for order in range(1, min(self.config.max_suffix, place) + 1):
            key = key * _BASE + tokens[place - order]
            if order < self.config.min_suffix:
                continue
            self._last[order][key] = place
            self._count[order][key] = self._count[order].get(key, 0) + 1
            pair = key * _BASE + token
            n_pairs = self._pairs[order][pair] = self._pairs[order].get(pair, 0) + 1
            if frequent:
                best = self._best[order].get(key)
                if best is None or n_pairs >= best[0]:
                    self._best[order][key] = (n_pairs, place)
        tokens.append(token)
        self._fresh = False

    def _search(self) -> tuple[Match | None, int | None]:
        """The match, in the text or in the memory, and the token that followed there."""
        own = self._search_text()
        if self.memory is not None and (own is None or own.length < OWN):
            phrase = self.memory.find(self.tokens, self.config.max_suffix, self.config.min_suffix)
            if phrase is not None and (own is None or own.length < phrase.length):
                share = phrase.times / phrase.total
                return Match(phrase.node, phrase.length, phrase.total, share, remembered=True), phrase.token
        return own, None if own is None else self.tokens[own.start]

    def _search_text(self) -> Match | None:
        tokens, n = self.tokens, len(self.tokens)
        key, found = 0, (0, 0)
        for order in range(1, min(self.config.max_suffix, n) + 1):
            key = key * _BASE + tokens[n - order]
            if order < self.config.min_suffix:
                continue
            if key not in self._last[order]:
                break  # a longer suffix ends with this one
            found = (order, key)
        order, key = found
        if not order:
            return None
        start = self._best[order][key][1] if self.config.continuation == "frequent" else self._last[order][key]
        length = order
        while length < MAX_MATCH and length < start and tokens[start - 1 - length] == tokens[n - 1 - length]:
            length += 1
        occurrences = self._count[order][key]
        return Match(start, length, occurrences, self._pairs[order][key * _BASE + tokens[start]] / occurrences)


def agreeing(proposed: Sequence[int], said: Sequence[int]) -> int:
    """How many tokens at the beginning of a proposal are those that somebody else says at their places."""
    n = 0
    for mine, theirs in zip(proposed, said, strict=False):
        if mine != theirs:
            break
        n += 1
    return n
