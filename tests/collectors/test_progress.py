from __future__ import annotations

import io

import pytest
from rich.console import Console

from lede.collectors import CollectProgress


def test_without_a_terminal_there_is_a_line_an_interval_and_one_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("lede.collectors.progress.time.monotonic", lambda: clock[0])
    out = io.StringIO()
    with CollectProgress(10, 2, Console(file=out, width=200), line_every=10) as progress:
        for _ in range(4):
            clock[0] += 5
            progress.tokens(30)
            progress.prompt()
    assert out.getvalue().splitlines() == [
        "3/10 prompts, 6.0 tokens/s, 70 s left",
        "5/10 prompts, 6.0 tokens/s, 33 s left",
        "6/10 prompts, 6.0 tokens/s, 20 s left",
    ]


def test_no_time_left_is_told_before_the_first_prompt_and_after_the_last() -> None:
    progress = CollectProgress(2, 1, Console(file=io.StringIO()))
    assert "left" not in progress.line()
    progress.prompt()
    assert progress.line().startswith("2/2 prompts, 0.0 tokens/s")
    assert "left" not in progress.line()


def test_where_nothing_is_left_no_speed_is_told() -> None:
    out = io.StringIO()
    with CollectProgress(4, 4, Console(file=out, width=200)):
        pass
    assert out.getvalue() == "4/4 prompts, all of them collected before\n"


def test_on_a_terminal_there_is_a_bar() -> None:
    out = io.StringIO()
    with CollectProgress(4, 1, Console(file=out, force_terminal=True, width=100)) as progress:
        progress.tokens(50)
        progress.prompt()
    assert "2/4" in out.getvalue()
    assert "tokens/s" in out.getvalue()


def test_prompts_that_were_lost_are_taken_back_and_the_clock_starts_with_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("lede.collectors.progress.time.monotonic", lambda: clock[0])
    with CollectProgress(10, 2, Console(file=io.StringIO())) as progress:
        clock[0] += 50
        progress.begin()
        clock[0] += 10
        progress.prompt(4)
        progress.prompt(-2)
        progress.tokens(30)
        assert progress.line() == "4/10 prompts, 3.0 tokens/s, 30 s left"
