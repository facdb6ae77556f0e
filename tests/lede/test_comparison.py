"""Reports side by side: what changed, and whether it can be told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lede.bench_report import write_report
from lede.bench_runs import PLAIN, PromptRecord, PromptRun
from lede.comparison import CompareConfig, ComparedRow, Comparison, compare
from tests.lede.bench_examples import baseline_runs, contender, run, setup, write

N = 12


def report(out: Path, seconds: float, first_prompt: int = 0, noise: float = 1.02, **given: object) -> Path:
    """A report of a policy that takes so many seconds a prompt, give or take noise, where plain decoding takes one."""
    runs = baseline_runs(N, noise)
    for i in range(N):
        runs.append(run("drafting", i, seconds * (noise if i % 2 else 1 / noise)))
    settings = given.pop("settings", "drafting")
    assert isinstance(settings, str)
    return _write(out, runs, first_prompt, settings, **given)


def _write(out: Path, runs: list[PromptRun], first_prompt: int, settings: str, **given: object) -> Path:
    prompts = [PromptRecord("code", i, "", (first_prompt + i, 1, 2), None) for i in range(N)]
    write(out, runs, setup(contender("drafting", settings), n_prompts=N, **given), prompts)
    write_report(out)
    return out / "report.json"


def compared(first: Path, second: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Comparison, ComparedRow, str]:
    found = compare(CompareConfig(first, second))
    told = capsys.readouterr().out
    return found, next(row for row in found.rows if row.name == "drafting"), told


def test_a_clear_change_is_resolved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From 2x to 4x, pair by pair, on a machine that is twice as slow."""
    first, second = report(tmp_path / "a", 0.5), tmp_path / "b"
    runs = [run(each.policy, each.prompt_index, 2 * each.decode_seconds) for each in baseline_runs(N)]
    runs += [run("drafting", i, 0.5) for i in range(N)]
    found, row, told = compared(first, _write(second, runs, 0, "drafting"), capsys)
    assert row.interval is not None
    assert row.ratio == pytest.approx(2.0, rel=0.01)
    assert row.interval.lower < 2 < row.interval.upper
    assert (row.n_paired, row.resolved, row.exactness_changed) == (N, True, False)
    assert found.differences == ()
    assert [each.name for each in found.rows] == ["transformers", PLAIN, "drafting"]
    assert "12 and 12 prompts, 12 in common; plain decoding 4.0 and 2.0 tok/s" in told
    assert max(map(len, told.splitlines())) <= 80


def test_a_change_within_the_noise_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The prompts that were slower than average are faster the second time."""
    _, row, told = compared(report(tmp_path / "a", 0.5), report(tmp_path / "b", 0.498, noise=1 / 1.02), capsys)
    assert (row.n_paired, row.resolved) == (N, False)
    assert "not resolved" in told


def test_a_change_has_the_colour_of_the_prompts_in_common(tmp_path: Path) -> None:
    """Faster on the six prompts in common, slower over all: what is resolved and shown is the former."""
    from rich.console import Console

    from lede.bench_report import read_report
    from lede.comparison import compare_reports
    from lede.comparison_table import shown

    def written(out: Path, first_prompt: int, seconds: tuple[float, float]) -> Path:
        halves = [seconds[i >= N // 2] for i in range(N)]
        return _write(
            out, [*baseline_runs(N, 1.001), *(run("drafting", i, each) for i, each in enumerate(halves))],
            first_prompt, "drafting",
        )  # fmt: skip

    first = written(tmp_path / "a", 0, (0.1, 0.5))
    second = written(tmp_path / "b", N // 2, (0.25, 2.0))
    found = compare_reports(*map(read_report, (first, second)))
    row = next(each for each in found.rows if each.name == "drafting")
    assert row.interval is not None
    assert row.ratio is not None
    assert (row.n_paired, row.resolved, row.ratio < 1 < row.interval.value) == (N // 2, True, True)
    console = Console(width=80, force_terminal=True, color_system="standard")
    with console.capture() as told:
        console.print(shown(found))
    assert "\x1b[32m2.00" in told.get()


def test_few_prompts_resolve_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five prompts in common are not enough, six are."""
    first = report(tmp_path / "a", 0.5)
    for n, resolved in ((6, True), (5, False)):
        second = report(tmp_path / str(n), 0.1, first_prompt=N - n)
        _, row, _ = compared(first, second, capsys)
        assert (row.n_paired, row.resolved) == (n, resolved)


def test_other_prompts_are_not_paired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their intervals are held against each other instead."""
    first = report(tmp_path / "a", 0.5)
    _, row, told = compared(first, report(tmp_path / "b", 0.25, first_prompt=100), capsys)
    assert (row.interval, row.n_paired, row.resolved) == (None, 0, True)
    assert "2.00 unpaired" in told
    assert not compared(first, report(tmp_path / "c", 0.5, first_prompt=100), capsys)[1].resolved


def test_prompts_in_common_are_paired_by_their_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt 3 of one is prompt 0 of the other."""
    first, second = report(tmp_path / "a", 0.5), report(tmp_path / "b", 0.5, first_prompt=3)
    assert compared(first, second, capsys)[1].n_paired == N - 3


def test_settings_and_versions_that_differ_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = report(tmp_path / "a", 0.5)
    second = report(
        tmp_path / "b",
        0.5,
        settings="drafting:layer=4",
        versions={"lede": "0.1.0", "torch": "2.14.0"},
        commit="def5678",
        config={"model": "tiny", "temperature": 0.0, "seed": 7, "suite": ["demo", "lm:x"]},
    )
    found, _, told = compared(first, second, capsys)
    assert found.differences == (
        "commit: abc1234 -> def5678",
        "versions.torch: 2.13.0 -> 2.14.0",
        "config.suite: absent -> demo, lm:x",
        "code, drafting: drafting -> drafting:layer=4",
    )
    assert "versions.torch: 2.13.0 -> 2.14.0" in told


def test_a_text_that_became_wrong_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [*baseline_runs(N), *(run("drafting", i, 0.5, divergence=(1, 0.4, False)) for i in range(N))]
    second = _write(tmp_path / "b", runs, 0, "drafting")
    _, row, told = compared(report(tmp_path / "a", 0.5), second, capsys)
    assert row.exactness_changed
    assert "-> NO at 12" in told


def test_contenders_of_one_report_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "b"
    write(out, baseline_runs(N), setup(contender("other"), n_prompts=N))
    write_report(out)
    found, row, told = compared(report(tmp_path / "a", 0.5), out, capsys)  # a folder will do
    assert [each.name for each in found.rows] == ["transformers", PLAIN, "other", "drafting"]
    assert (row.second, row.ratio, row.resolved, row.exactness_changed) == (None, None, False, False)
    assert "absent" in told


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*No such file"),
        ("{", "cannot read .*Expecting"),
        (json.dumps({"rows": []}), "is no report of `lede bench`"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, content: str | None, message: str) -> None:
    odd = tmp_path / "odd.json"
    if content is not None:
        odd.write_text(content)
    good = report(tmp_path / "a", 0.5)
    for pair in ((good, odd), (odd, good)):
        with pytest.raises(ValueError, match=message) as told:
            compare(CompareConfig(*pair))
        assert str(odd) in str(told.value)
        assert "\n" not in str(told.value)
