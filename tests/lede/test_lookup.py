"""The index of a text against searching it anew, and drafts that are copied from it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lede.lookup import MAX_MATCH, RECENT_TOKENS, LookupConfig, LookupIndex, Match, agreeing
from tests.naive_lookup import naive_match, naive_proposal

CONFIGS = st.builds(
    lambda low, more, continuation: LookupConfig(low + more, low, continuation),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(["recent", "frequent"]),
)
TEXTS = st.lists(st.integers(0, 3), max_size=60) | st.lists(st.sampled_from([0, 7, 49_151]), max_size=60)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(text=TEXTS, config=CONFIGS, cuts=st.lists(st.integers(0, 60), max_size=3), length=st.integers(1, 20))
def test_the_index_finds_what_a_search_of_the_whole_text_finds(
    text: list[int], config: LookupConfig, cuts: list[int], length: int
) -> None:
    index, before = LookupIndex(config), 0
    for cut in [*sorted(min(cut, len(text)) for cut in cuts), len(text)]:
        index.extend(text[before:cut])
        before = cut
        assert index.match() == naive_match(text[:cut], config)
        assert index.propose(length) == naive_proposal(text[:cut], config, length)
    assert index.tokens == text
    hits = [naive_proposal(text[:i], config, 1) == [text[i]] for i in range(len(text))]
    assert index.hits == sum(hits[-RECENT_TOKENS:]) / RECENT_TOKENS


@pytest.mark.parametrize(
    ("text", "config", "match", "proposal"),
    [
        ([1, 2, 3, 4, 1, 2, 3], LookupConfig(), Match(3, 3, 1, 1.0), [4, 1, 2, 3]),
        ([9, 2, 3, 4, 1, 2, 3], LookupConfig(max_suffix=1), Match(3, 2, 1, 1.0), [4, 1, 2, 3]),  # seen further back
        ([1, 2, 1, 3, 1], LookupConfig(), Match(3, 1, 2, 0.5), [3, 1, 3, 1]),  # goes on in itself
        ([1, 2, 1, 2, 1, 3, 1], LookupConfig(continuation="frequent"), Match(3, 1, 3, 2 / 3), [2, 1, 3, 1]),
        ([1, 2, 1, 2, 1, 3, 1], LookupConfig(), Match(5, 1, 3, 1 / 3), [3, 1, 3, 1]),
        ([1, 2, 1], LookupConfig(min_suffix=2), None, []),
        ([1, 2, 3], LookupConfig(), None, []),
        ([5], LookupConfig(), None, []),
        ([], LookupConfig(), None, []),
    ],
)
def test_worked_examples(text: list[int], config: LookupConfig, match: Match | None, proposal: list[int]) -> None:
    index = LookupIndex(config, text)
    assert index.match() == match
    assert index.propose(4) == proposal


def test_a_match_is_followed_back_to_a_bound() -> None:
    index = LookupIndex(LookupConfig(), [*range(100), *range(100)])
    assert index.match() == Match(100, MAX_MATCH, 1, 1.0)


def test_a_proposal_does_not_change_the_index() -> None:
    index = LookupIndex(LookupConfig(), [1, 2, 1])
    assert [index.propose(5), index.propose(0), index.propose(5)] == [[2, 1, 2, 1, 2], [], [2, 1, 2, 1, 2]]
    assert index.tokens == [1, 2, 1]


def test_entries_grow_with_the_text_and_not_with_its_square() -> None:
    """At most one new entry an order and token, in each table."""
    index = LookupIndex(LookupConfig(max_suffix=3), [i * i % 257 for i in range(5_000)])
    for tables in (index._last, index._count, index._pairs):
        assert sum(map(len, tables)) <= 3 * 5_000


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_suffix": 0}, "max_suffix 0"),
        ({"min_suffix": 4}, "min_suffix 4 and max_suffix 3"),
        ({"max_suffix": 33}, "<= 32 tokens"),
        ({"continuation": "rare"}, "continuation must be recent or frequent, got 'rare'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LookupConfig(**settings)  # type: ignore[arg-type]


def test_agreeing_counts_the_common_beginning() -> None:
    assert [agreeing([1, 2, 3], said) for said in ([1, 2, 3, 4], [1, 2], [1, 9, 3], [9], [])] == [3, 2, 1, 0, 0]
