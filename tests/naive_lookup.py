"""What a lookup proposes, by searching the whole text anew each time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from lede.lookup import MAX_MATCH, RECENT_TOKENS, LookupConfig, Match


def naive_match(tokens: Sequence[int], config: LookupConfig) -> Match | None:
    """The longest suffix that stands somewhere before and went on, and where it is copied from."""
    text = list(tokens)
    for order in range(min(config.max_suffix, len(text)), config.min_suffix - 1, -1):
        suffix = text[len(text) - order :]
        starts = [end for end in range(order, len(text)) if text[end - order : end] == suffix]
        if not starts:
            continue
        followed = Counter(text[start] for start in starts)
        if config.continuation == "frequent":
            most = max(followed.values())
            # the token that reached that count last, at its last place
            reached = {token: [s for s in starts if text[s] == token][-1] for token, n in followed.items() if n == most}
            start = max(reached.values())
        else:
            start = starts[-1]
        length = order
        while length < min(MAX_MATCH, start) and text[start - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        return Match(start, length, len(starts), followed[text[start]] / len(starts))
    return None


def naive_proposal(tokens: Sequence[int], config: LookupConfig, length: int) -> list[int]:
    """Token by token, each from where the one before was copied."""
    found = naive_match(tokens, config)
    if found is None:
        return []
    text = list(tokens)
    for i in range(length):
        text.append(text[found.start + i])
    return text[len(tokens) :]


def naive_features(tokens: Sequence[int], config: LookupConfig) -> dict[str, float]:
    """The features that the text alone defines."""
    found = naive_match(tokens, config)
    hits = [naive_proposal(tokens[:i], config, 1) == [tokens[i]] for i in range(len(tokens))][-RECENT_TOKENS:]
    values = {"lookup_hits": sum(hits) / RECENT_TOKENS}
    if found is not None:
        values |= {"match_length": found.length, "match_count": math.log(1 + found.occurrences)}
        values |= {"match_agreement": found.agreement}
    return values
