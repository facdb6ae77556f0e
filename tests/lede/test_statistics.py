"""Counts and rates, on worked values."""

from __future__ import annotations

import pytest

from lede.statistics import Meter, Round, Seconds, summarize

SECONDS = Seconds(prefill=1.0, draft=1.0, inspect=0.5, policy=0.25, verify=2.0, other=0.25)


def rounds(*accepted: int, drafted: int = 4, layer: int = 3) -> list[Round]:
    return [Round(tuple(range(a + 1)), drafted, a, layer) for a in accepted]


def test_two_requests_pooled() -> None:
    """Rounds that accepted [3, 3] and [0] of 4 drafted each: the rate is 6/12, tokens a round (6 + 3)/3."""
    stats = summarize([*rounds(3, 3), *rounds(0)], SECONDS, head_reads=12, n_sequences=2)
    assert stats.acceptance_rate == 6 / 12
    assert stats.mean_accepted_length == 2.0
    assert (stats.tokens - 2) / stats.rounds == 3.0  # with the correction or bonus token
    assert stats.tokens == 2 + 9
    assert stats.tokens_per_second == 9 / 4.0


def test_plain_rounds_have_no_drafting_rates() -> None:
    stats = summarize([Round((5,), 0, 0, None)] * 3, SECONDS, head_reads=0)
    assert stats.acceptance_rate is None
    assert stats.mean_draft_length is None
    assert stats.mean_exit_layer is None
    assert stats.mean_accepted_length == 0
    assert stats.full_passes == 3


def test_nothing_after_the_prefill() -> None:
    stats = summarize([], SECONDS, head_reads=0)
    assert stats.tokens == 1
    assert stats.tokens_per_second is None
    assert stats.mean_accepted_length is None


def test_exit_layer_is_weighted_by_drafted_tokens() -> None:
    mixed = [*rounds(1, drafted=1, layer=2), *rounds(0, drafted=3, layer=6), Round((1,), 0, 0, None)]
    stats = summarize(mixed, SECONDS, head_reads=4)
    assert stats.mean_exit_layer == (1 * 2 + 3 * 6) / 4
    assert stats.mean_draft_length == 2.0


def test_skipped_share_is_that_of_drafts_with_gaps() -> None:
    """1 token without 3 of 8 sublayers, 3 without 4; an exit counts for the exit layer, a plain pass for neither."""
    gaps = [Round((1, 2), 1, 1, None, 3), Round((1,), 3, 0, None, 4)]
    stats = summarize([*gaps, *rounds(0, drafted=2, layer=2), Round((1,), 0, 0, None)], SECONDS, 6, n_layers=4)
    assert stats.mean_skipped_share == pytest.approx((1 * 3 / 8 + 3 * 4 / 8) / 4)
    assert stats.mean_exit_layer == 2
    assert stats.acceptance_rate == 1 / 6
    assert summarize(gaps, SECONDS, head_reads=4).mean_skipped_share is None  # of how many nobody said
    assert summarize(rounds(1), SECONDS, 1, n_layers=4).mean_skipped_share is None


def test_sections_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 3.5, 4.0, 10.0])
    monkeypatch.setattr("lede.statistics.time.perf_counter", lambda: next(clock))
    meter = Meter(_since=0.0)
    next(clock)
    meter.enter("prefill")  # at 1.0
    meter.enter("draft")  # at 3.0
    meter.enter("search")  # at 3.5
    meter.enter("verify")  # at 4.0
    seconds = meter.stats().seconds  # at 10.0
    assert (seconds.other, seconds.prefill, seconds.draft, seconds.search, seconds.verify) == (1.0, 2.0, 0.5, 0.5, 6.0)
    assert seconds.total == 10.0
