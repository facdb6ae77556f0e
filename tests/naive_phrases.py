"""What a memory of phrases knows, by counting in plain dictionaries."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from lede.lookup import OWN, LookupConfig
from tests.naive_lookup import naive_match, naive_proposal

Texts = Sequence[tuple[Sequence[int], Sequence[int]]]


class NaivePhrases:
    """Counts of what followed each n-gram, where it was written and not asked."""

    def __init__(self, texts: Texts, max_suffix: int) -> None:
        self.max_suffix = max_suffix
        self.followed: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for prompt, answer in texts:
            tokens = [*prompt, *answer]
            for place in range(len(prompt), len(tokens)):
                for length in range(1, min(max_suffix, place) + 1):
                    self.followed[tuple(tokens[place - length : place])][tokens[place]] += 1

    def find(self, tokens: Sequence[int], longest: int, shortest: int) -> tuple[int, int, int, int] | None:
        """Length, token, how often it followed, how often any did."""
        for length in range(min(longest, self.max_suffix, len(tokens)), shortest - 1, -1):
            seen = self.followed.get(tuple(tokens[len(tokens) - length :]))
            if seen:
                most = max(seen.values())
                return length, min(t for t, n in seen.items() if n == most), most, sum(seen.values())
        return None

    def chain(self, tokens: Sequence[int], length: int, longest: int, shortest: int) -> list[int]:
        text = list(tokens)
        for _ in range(length):
            found = self.find(text, longest, shortest)
            if found is None:
                break
            text.append(found[1])
        return text[len(tokens) :]


def proposal_with_memory(
    tokens: Sequence[int], config: LookupConfig, phrases: NaivePhrases, length: int
) -> tuple[list[int], bool]:
    """What is proposed where a memory stands behind the text, and whether it is the memory's."""
    own = naive_match(tokens, config)
    known = phrases.find(tokens, config.max_suffix, config.min_suffix)
    if known is not None and (own is None or own.length < min(OWN, known[0])):
        return phrases.chain(tokens, length, config.max_suffix, config.min_suffix), True
    return naive_proposal(tokens, config, length), False
