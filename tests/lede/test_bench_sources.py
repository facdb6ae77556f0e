"""Rounds and tokens by source in a benchmark's report, and what lookups are held against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lede.bench import run_bench
from lede.bench_plots import write_plots
from lede.bench_report import BenchReport, read_report, terminal, write_report
from lede.bench_runs import PLAIN, read_setup
from lede.models import EarlyExitModel
from lede.round_sources import SourceCounts, add_counts, count_sources, round_shares, token_shares
from tests.lede.bench_examples import COST, baseline_runs, contender, rounds, run, setup, write
from tests.lede.test_bench import config, model, prompts

__all__ = ["model", "prompts"]  # fixtures

N_PROMPTS = 6
MIXED = (*rounds(3, drafted=4), (8, 5, 6, 0, 0), (0, 0, 1, 0, 0))
COPIES = ((8, 5, 6, 0, 0), (0, 0, 1, 0, 0), (0, 0, 1, 0, 0))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A policy over both sources, the best static lookup, one more of them, and transformers' own."""
    found = setup(
        contender("both", "/runs/both/policy", as_given="/runs/both/policy", cost=COST),
        contender("lookup", "lookup:draft_length=8", cost=COST),
        contender("lookup:draft_length=4"),
        contender("prompt-lookup", "prompt-lookup:tokens=8", kind="external", cost=COST),
        n_prompts=N_PROMPTS,
    )
    runs = baseline_runs(N_PROMPTS, rounds=((0, 0, 1, 0, 0),) * 4)
    for i in range(N_PROMPTS):
        runs.append(run("both", i, 0.4 + 0.01 * i, rounds=MIXED))
        runs.append(run("lookup", i, 0.6 + 0.01 * i, rounds=COPIES))
        runs.append(run("lookup:draft_length=4", i, 0.5 + 0.01 * i, rounds=COPIES))
        runs.append(run("prompt-lookup", i, 0.8 + 0.01 * i))
    write(tmp_path, runs, found)
    return tmp_path


def table_of(text: str, title: str) -> dict[str, dict[str, str]]:
    """Cells of a table of report.md by row and column."""
    lines = text.split(f"### {title}\n\n", 1)[1].split("\n\n", 1)[0].splitlines()
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {cells[0]: dict(zip(head[1:], cells[1:], strict=True)) for cells in body}


def test_counts_by_hand() -> None:
    """Two copies, the second of which ended the text, an exit, and a plain pass."""
    found = count_sources([("lookup", 8, 5, 6), (None, 0, 0, 1), ("exit", 4, 3, 4), ("lookup", 2, 2, 2)])
    assert found == {
        "exit": SourceCounts(1, 4, 3, 4),
        "lookup": SourceCounts(2, 10, 7, 8),
        "plain": SourceCounts(1, 0, 0, 1),
    }
    assert list(found) == ["exit", "lookup", "plain"]
    assert found["lookup"].acceptance_rate == 0.7
    assert found["plain"].acceptance_rate is None
    assert round_shares(found) == {"exit": 0.25, "lookup": 0.5, "gaps": 0.0, "plain": 0.25}
    assert token_shares(found) == {"exit": 4 / 13, "lookup": 8 / 13, "gaps": 0.0, "plain": 1 / 13}
    assert add_counts([found, {"gaps": SourceCounts(1, 2, 1, 2)}, found])["lookup"] == SourceCounts(4, 20, 14, 16)
    assert (count_sources([]), round_shares({}), token_shares({})) == ({}, {}, {})


def test_report_json_has_shares_and_ratios(out: Path) -> None:
    content = write_report(out)
    rows = {row["name"]: row for row in content["rows"]}
    both = rows["both"]
    assert both["round_shares"] == {"exit": 1 / 3, "lookup": 1 / 3, "gaps": 0.0, "plain": 1 / 3}
    assert both["token_shares"] == {"exit": 4 / 11, "lookup": 6 / 11, "gaps": 0.0, "plain": 1 / 11}
    assert both["acceptance_by_source"] == {"exit": 0.75, "lookup": 0.625}
    assert both["speedup_over_best_lookup"]["value"] == pytest.approx(0.625 / 0.425)
    assert both["speedup_over_hindsight_lookup"]["value"] == pytest.approx(0.525 / 0.425)
    assert both["speedup_over_prompt_lookup"]["value"] == pytest.approx(0.825 / 0.425)
    assert both["speedup_over_best_static"] is None
    assert rows["prompt-lookup"]["token_shares"] is None
    [suite] = content["suites"]
    held = (suite["best_lookup"], suite["hindsight_lookup"], suite["prompt_lookup"], suite["best_static"])
    assert held == ("lookup", "lookup:draft_length=4", "prompt-lookup", None)
    prompts = [each for each in content["prompts"] if each["name"] == "both"]
    assert prompts[0]["sources"]["lookup"] == {"rounds": 1, "drafted": 8, "accepted": 5, "committed": 6}
    assert BenchReport.from_json(content).to_json() == content


def test_tables_show_where_tokens_come_from(out: Path) -> None:
    write_report(out)
    text = (out / "report.md").read_text()
    by_source = table_of(text, "code: rounds and tokens by source")
    assert list(by_source) == ["both", "lookup:draft_length=4", "lookup", PLAIN]
    assert by_source["both"] == {
        "exit rounds %": "33", "lookup rounds %": "33", "plain rounds %": "33",
        "exit tokens %": "36", "lookup tokens %": "55", "plain tokens %": "9",
        "exit rate": "0.75", "lookup rate": "0.62",
    }  # fmt: skip
    assert by_source["lookup"]["exit rounds %"] == "-"
    speed = table_of(text, "code: speed")
    assert (speed["both"]["x lookup"], speed["both"]["x hf lookup"]) == ("1.47", "1.94")
    assert speed["lookup"]["x lookup"] == "1"
    assert "x static" not in speed["both"]
    assert table_of(text, "code: costs")["both"]["x lookup in hindsight"] == "1.24"
    assert "Best static lookup on validation prompts: lookup (lookup:draft_length=8)" in text
    assert "Best static lookup in hindsight: lookup:draft_length=4" in text


def test_the_terminal_has_the_columns_that_say_something(out: Path) -> None:
    def shown(content: dict[str, Any]) -> str:
        console = Console(width=80)
        with console.capture() as capture:
            console.print(terminal(content))
        return capture.get()

    text = shown(write_report(out))
    assert max(map(len, text.splitlines())) <= 80
    assert "x lookup" in text
    assert "x static" not in text
    runs = [run(PLAIN, i) for i in range(2)] + [run("static", i, 0.5) for i in range(2)]
    write(out, runs, setup(contender("static", "static:exit_layer=3", cost=COST)))
    assert "x lookup" not in (again := shown(write_report(out)))
    assert "x static" in again


def test_everybody_in_one_terminal_table_fits(out: Path) -> None:
    runs = baseline_runs(N_PROMPTS)
    names = {"both": 0.4, "static": 0.5, "lookup": 0.6, "prompt-lookup": 0.8}
    runs += [run(name, i, seconds + 0.1 * (i % 3)) for name, seconds in names.items() for i in range(N_PROMPTS)]
    found = setup(
        contender("both"),
        contender("static", "static:exit_layer=3", cost=COST),
        contender("lookup", "lookup:draft_length=8", cost=COST),
        contender("prompt-lookup", kind="external"),
        n_prompts=N_PROMPTS,
    )
    write(out, runs, found)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(terminal(write_report(out)))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in capture.get()


def test_tokens_by_source_are_drawn_where_anything_was_copied(out: Path) -> None:
    from matplotlib import image

    written = write_plots(out, write_report(out))
    (path,) = [path for path in written if path.name == "sources.png"]
    assert image.imread(path)[:, :, :3].std() > 0.02  # more than a white page
    write(out, [run("drafting", rounds=rounds(2))], setup(contender("drafting")))
    assert "sources.png" not in {path.name for path in write_plots(out, write_report(out))}


def test_a_report_from_before_sources_is_read(out: Path) -> None:
    content = write_report(out)
    new = ("round_shares", "token_shares", "acceptance_by_source", "speedup_over_best_lookup")
    for row in content["rows"]:
        for name in new:
            del row[name]
    for each in content["prompts"]:
        del each["sources"]
    for suite in content["suites"]:
        for name in ("best_lookup", "hindsight_lookup", "prompt_lookup"):
            del suite[name]
    (out / "report.json").write_text(json.dumps(content))
    report = read_report(out / "report.json")
    assert all(row.token_shares is None for row in report.rows)
    assert all(each.sources == {} for each in report.prompts)
    assert report.suites[0].best_lookup is None


def test_lookups_are_swept_and_their_rounds_told_by_source(
    model: EarlyExitModel, prompts: Path, tmp_path: Path
) -> None:
    given = ("lookup:min_suffix=2", "lookup:prune_at=2")
    settings = config(prompts, tmp_path / "out", policy=given, sweep=("lookup",), max_new_tokens=24)
    report = run_bench(settings, model)
    found = {contender.name: contender for contender in read_setup(settings.out).contenders}
    assert found["lookup"].settings.startswith("lookup:draft_length=")  # which one is the clock's choice
    assert found["lookup"].cost.evaluations > 1000
    assert found["lookup"].cost.collecting_seconds > 0
    swept = [each for name, each in found.items() if each.settings.startswith("lookup:draft_length=")]
    assert len(swept) == 5
    assert sum(each.cost.evaluations > 0 for each in swept) == 1
    rows = {row["name"]: row for row in report["rows"]}
    for row in (rows[each.name] for each in swept):
        assert row["exact"] == "yes"
        assert (row["head_reads"] > 0) == ("prune_at" in row["settings"])
        assert row["token_shares"]["exit"] == 0
        assert sum(row["token_shares"].values()) == pytest.approx(1)
    plain, cut = (rows[name] for name in given)
    assert plain["token_shares"]["lookup"] > plain["round_shares"]["lookup"] > 0
    assert (plain["head_reads"], cut["head_reads"] > 0) == (0, True)
    assert cut["modelled_speedup"] > 0
    assert report["suites"][0]["best_lookup"] == "lookup"
    assert report["suites"][0]["hindsight_lookup"] in found
