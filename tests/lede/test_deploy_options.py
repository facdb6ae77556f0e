"""`lede deploy` with the options of `generate`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lede.cli import main
from lede.generation import generate
from lede.models import load_model

HEAD = "def merge_sort(items):\n"


def deployed(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """The result of one prompt."""
    arguments = ["deploy", "--prompt", HEAD, "--policy", "static:exit_layer=4", "--max-new-tokens", "40", "--json"]
    assert main([*arguments, *flags]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert isinstance(result, dict)
    return result


def test_penalties_reach_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "max_new_tokens": 40}
    found = deployed(capsys, "--repetition-penalty", "1.2", "--no-repeat-ngram-size", "3")
    assert found["text"] == generate(load_model("demo"), HEAD, **settings).text
    assert found["text"] != generate(load_model("demo"), HEAD, max_new_tokens=40).text


def test_stop_strings_and_time_end_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = generate(load_model("demo"), HEAD, max_new_tokens=40).text or ""
    stop = next(word for word in text.split() if len(word) > 3 and word not in HEAD and text.index(word) > 20)
    found = deployed(capsys, "--stop-strings", "never written", stop)
    assert found["finish_reason"] == "stop"
    assert text.startswith(found["text"])
    assert stop in found["text"]
    assert found["stats"]["tokens"] == len(found["token_ids"]) < 40
    found = deployed(capsys, "--max-time", "1e-9")
    assert (found["finish_reason"], len(found["token_ids"])) == ("time", 1)


def test_min_p_samples_among_the_likely(capsys: pytest.CaptureFixture[str]) -> None:
    greedy = generate(load_model("demo"), HEAD, max_new_tokens=40).text
    assert deployed(capsys, "--temperature", "1.5", "--min-p", "0.999")["text"] == greedy
    assert deployed(capsys, "--temperature", "1.5")["text"] != greedy


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--min-p", "0.1"], "--min-p acts on sampling alone"),
        (["--max-time", "-1"], "--max-time must be a positive number of seconds"),
        (["--stop-strings", ""], "--stop-strings must be texts of at least one character"),
        (["--repetition-penalty", "-1"], "penalty"),
    ],
)
def test_odd_options_are_told_in_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "--prompt", HEAD, *flags]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
