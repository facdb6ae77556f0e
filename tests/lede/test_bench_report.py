"""report.json, report.md, what the terminal shows, and the plots, of benchmarks written by hand."""

from __future__ import annotations

import io
import json
import math
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lede.bench_plots import write_plots
from lede.bench_report import BenchReport, read_report, terminal, write_report
from lede.bench_runs import CONTROL, PLAIN, PROFILE, RUNS, TRANSFORMERS, PromptRecord, PromptRun, Setup, SuiteSetup
from lede.cost_model import CostModel, Costs
from lede.cost_profile import CostProfile
from tests.lede.bench_examples import COST, N_LAYERS, baseline_runs, contender, failed, rounds, run, setup, write

N_PROMPTS = 4


def example() -> tuple[list[PromptRun], Setup, list[PromptRecord]]:
    """A fast policy, a static one, a wrong text that is fastest, one that failed once, and one that never ran."""
    found = setup(
        contender("fast", "/runs/fast/policy", as_given="/runs/fast/policy", cost=COST),
        contender("static", "static:exit_layer=3;draft_length=4", cost=replace(COST, note="nobody timed the lunch")),
        contender("wrong", kind="external"),
        contender("shaky"),
        contender("absent", kind="external", failed="no such layer"),
        n_prompts=N_PROMPTS,
        verification_seconds=(1.0, 1.1, 1.2, 1.3),
    )
    agreement = tuple(layer / N_LAYERS for layer in range(1, N_LAYERS + 1))
    found = replace(found, suites=(replace(found.suites[0], agreement=agreement),))
    runs = baseline_runs(N_PROMPTS, rounds=((0, 0, 1, 0, 0),) * 4, category="heads")
    for i in range(N_PROMPTS):
        drafts = {"rounds": rounds(2, 0, drafted=3), "head_reads": 6, "category": "heads", "sections": {"draft": 1.0}}
        runs.append(run("fast", i, 0.4 + 0.02 * i, **drafts))
        runs.append(run("static", i, 0.5 + 0.02 * i, **drafts))
        runs.append(run("wrong", i, 0.1, divergence=(2, 0.5, False)))
        runs.append(failed("shaky", i) if i == 1 else run("shaky", i, 1.001))
    prompts = [PromptRecord("code", i, "heads", (i, i + 1, i + 2), None) for i in range(N_PROMPTS)]
    return runs, found, prompts


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write(tmp_path, *example())
    return tmp_path


def shown(content: dict[str, Any], colour: bool = False) -> str:
    console = Console(width=80, file=io.StringIO(), force_terminal=colour, color_system="standard" if colour else None)
    console.print(terminal(content))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_json_holds_rows_prompts_and_where_it_ran(out: Path) -> None:
    content = write_report(out)
    assert json.loads((out / "report.json").read_text()) == content
    assert (content["schema"], content["schema_version"]) == ("lede-bench", 1)
    facts = {"device": "a processor", "dtype": "float32", "seed": 7, "commit": "abc1234", "temperature": 0.0}
    assert {name: content[name] for name in facts} == facts
    assert content["versions"] == {"lede": "0.1.0", "torch": "2.13.0"}
    rows = {row["policy"]: row for row in content["rows"]}
    assert list(rows) == [TRANSFORMERS, PLAIN, CONTROL, "/runs/fast/policy", "static", "wrong", "shaky", "absent"]
    fast = rows["/runs/fast/policy"]
    assert (fast["suite"], fast["name"], fast["exact"]) == ("code", "fast", "yes")
    assert (fast["n_prompts"], fast["n_failed"]) == (N_PROMPTS, 0)
    assert fast["acceptance_rate"] == 2 / 6
    assert fast["speedup_over_plain"]["value"] == pytest.approx(4 / (4 * 0.43))
    assert fast["speedup_over_best_static"]["value"] == pytest.approx(0.53 / 0.43)
    assert rows["wrong"]["exact"] == "NO"
    assert (rows["absent"]["n_failed"], rows["absent"]["exact"]) == (N_PROMPTS, None)
    prompts = [each for each in content["prompts"] if each["name"] == "fast"]
    assert [each["seconds"] for each in prompts] == [0.4 + 0.02 * i for i in range(N_PROMPTS)]
    assert len({each["prompt_digest"] for each in prompts}) == N_PROMPTS
    [suite] = content["suites"]
    assert (suite["best_static"], suite["hindsight_static"], suite["n_test"]) == ("static", "static", N_PROMPTS)
    assert suite["control"]["lower"] <= 1 <= suite["control"]["upper"]


def test_speed_by_category(tmp_path: Path) -> None:
    """Code twice as fast, prose half as fast; a prompt without a category is in none."""
    runs = []
    for i, (category, seconds) in enumerate([("code", 0.5)] * 6 + [("prose", 2.0)] * 2 + [("", 0.1)]):
        runs += [run(PLAIN, i, category=category), run(CONTROL, i, category=category)]
        runs.append(run("fast", i, seconds, category=category))
    write(tmp_path, runs, setup(contender("fast"), n_prompts=9))
    content = write_report(tmp_path)
    found = {each["category"]: each for each in content["categories"] if each["name"] == "fast"}
    told = {name: (e["n_prompts"], e["speedup_over_plain"]["value"]) for name, e in found.items()}
    assert told == {"code": (6, 2.0), "prose": (2, 0.5)}
    assert [found[name]["speedup_over_plain"]["resolved"] for name in ("code", "prose")] == [True, False]
    assert BenchReport.from_json(content).to_json() == content


def test_a_report_is_read_back_as_it_was(out: Path) -> None:
    content = write_report(out)
    report = read_report(out / "report.json")
    assert report.to_json() == content
    assert BenchReport.from_json(content) == report


def section(text: str, title: str) -> list[str]:
    """First cells of the tables under a heading of a report.md."""
    part = re.split(r"^#+ ", text.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line for line in part.splitlines() if line.startswith("| ")]
    return [line.split(" | ")[0].removeprefix("| ") for line in rows if not line.startswith("| policy")]


def test_markdown_ranks_by_speed_and_keeps_wrong_texts_apart(out: Path) -> None:
    write_report(out)
    text = (out / "report.md").read_text()
    assert section(text, "code: speed") == ["fast", "static", "plain", "shaky", "transformers"]
    assert section(text, "code: lengths and shares") == ["fast", "static", "plain"]
    assert set(section(text, "code: not the plain text (out of the ranking)")) == {"wrong"}
    assert "NO at 4" in text
    assert "- shaky failed on 1 of 4 prompts: RuntimeError: no" in text
    assert "- absent failed on 4 of 4 prompts: no such layer" in text
    assert "- static: nobody timed the lunch" in text
    assert "- static: `static:exit_layer=3;draft_length=4`" in text
    assert "1.00 (1.00-1.00), not resolved" in text
    assert "A pass over q tokens over a pass over one: 2: 1.10, 4: 1.30." in text
    assert "Drafts of n tokens at layer 3 pay from an acceptance of" in text


def test_the_terminal_is_narrow_and_wrong_texts_are_red(out: Path) -> None:
    content = write_report(out)
    plain = shown(content)
    assert max(map(len, plain.splitlines())) <= 80
    assert "not resolved" in plain
    assert plain.index(" static ") < plain.index(" shaky ") < plain.index(" wrong ")
    coloured = shown(content, colour=True).splitlines()
    assert all("\x1b[31m" in line for line in coloured if "wrong " in line)
    assert not any("\x1b[31m" in line for line in coloured if "static " in line)


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    """No decode yet, or one of them alone, torn lines included."""
    runs, found, prompts = example()
    write(tmp_path, [], found, prompts)
    content = write_report(tmp_path)
    assert all(row["speedup_over_plain"] is None for row in content["rows"])
    assert shown(content)
    write(tmp_path, runs[:1], found)
    with (tmp_path / RUNS).open("a") as file:
        file.write('{"suite": "co')
    content = write_report(tmp_path)
    assert [row["n_prompts"] for row in content["rows"]] == [0, 1, 0, 0, 0, 0, 0, N_PROMPTS]
    assert content["prompts"][0]["prompt_digest"] is None
    assert write_plots(tmp_path, content)


def test_modelled_speed_comes_from_the_profile_beside_the_runs(out: Path) -> None:
    """A layer costs 1 s and nothing else does: two rounds of 4 positions through 3 layers and 5 more, against 4 x 8."""
    assert next(row for row in write_report(out)["rows"] if row["name"] == "static")["modelled_speedup"] is None
    names = CostProfile.__dataclass_fields__
    zero = dict.fromkeys(Costs.__dataclass_fields__, 0.0)
    values: dict[str, Any] = {**dict.fromkeys(names, ""), "fingerprint": {}, "versions": {}, "residuals": {}}
    values |= {"candidates": (3,), "contexts": (3,), "repeats": 1, "threads": 1, "measurements": ()}
    costs = CostModel(N_LAYERS, (None,) * N_LAYERS, Costs(**{**zero, "layer": 1.0}))
    CostProfile(**{**values, "costs": costs}).save(out / PROFILE)
    content = write_report(out)
    rows = {row["name"]: row for row in content["rows"]}
    assert rows["static"]["modelled_speedup"] == pytest.approx(4 * 8 / (2 * (4 * 3 + 5)))
    assert rows["plain"]["modelled_speedup"] == 1.0
    assert rows["wrong"]["modelled_speedup"] is None
    assert content["break_even"]["3"][0] == pytest.approx((2 * 3 + 5) / 8 - 1)


def test_a_margin_that_is_no_number_is_an_error_and_reports(out: Path) -> None:
    runs, found, prompts = example()
    odd = replace(runs[3 * N_PROMPTS], policy="fast", divergence=(1, math.nan, False))
    others = [each for each in runs if (each.policy, each.prompt_index) != (odd.policy, odd.prompt_index)]
    write(out, [odd, *others], found, prompts)
    assert "NaN" in (out / RUNS).read_text()
    rows = {row["name"]: row for row in write_report(out)["rows"]}
    assert (rows["fast"]["exact"], rows["fast"]["n_wrong"]) == ("NO", 1)
    assert "NaN" not in (out / "report.json").read_text()


def test_rows_are_ranked_on_the_prompts_that_plain_decoding_answered_too(tmp_path: Path) -> None:
    """The one that failed on the slow prompt has the higher rate, and the lower speedup."""
    found = setup(contender("lucky"), contender("steady"), n_prompts=2)
    runs = [run(PLAIN, 0, 1.0), run(PLAIN, 1, 100.0), run("lucky", 0, 0.9), failed("lucky", 1)]
    runs += [run("steady", 0, 0.5), run("steady", 1, 50.0)]
    write(tmp_path, runs, found)
    content = write_report(tmp_path)
    rates = {row["name"]: row["tokens_per_second"] for row in content["rows"]}
    assert rates["lucky"]["value"] > rates["steady"]["value"]
    assert section((tmp_path / "report.md").read_text(), "code: speed") == ["steady", "lucky", "plain"]


def test_a_report_from_before_a_column_is_read(out: Path) -> None:
    path, content = out / "report.json", write_report(out)
    for row in content["rows"]:
        del row["exact_against"]
    path.write_text(json.dumps(content))
    assert all(row.exact_against is None for row in read_report(path).rows)


def test_a_folder_without_a_benchmark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no benchmark: setup\.json is missing"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: [], r"is no report of `lede bench`"),
        (lambda content: {**content, "schema": "other"}, r"is no report of `lede bench`"),
        (lambda content: {**content, "schema_version": 0}, "has schema version 0, wanted 1"),
        (lambda content: {**content, "rows": [{}]}, "is damaged"),
        (lambda content: {**content, "suites": 3}, "is damaged"),
        (lambda content: {name: each for name, each in content.items() if name != "seed"}, "is damaged: KeyError"),
    ],
    ids=["list", "other", "old", "row", "suites", "fact"],
)
def test_foreign_files_are_refused(out: Path, change: Any, message: str) -> None:
    path = out / "report.json"
    path.write_text(json.dumps(change(write_report(out))))
    with pytest.raises(ValueError, match=message) as told:
        read_report(path)
    assert str(told.value).startswith(str(path))
    assert "\n" not in str(told.value)


def size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG in pixels."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_plots_are_drawn_as_large_as_their_labels_need(out: Path, tmp_path: Path) -> None:
    from matplotlib import image

    written = write_plots(out, write_report(out))
    names = ["speed.png", "accepted_lengths.png", "exit_layers.png", "agreement.png", "verification.png"]
    assert [path.name for path in written] == names
    for path in written:
        assert min(size(path)) > 250
        assert image.imread(path)[:, :, :3].std() > 0.02  # more than a white page
    runs, found, prompts = example()
    more = [replace(each, suite="prose") for each in runs]
    suites = (*found.suites, SuiteSetup("prose", "jsonl:prose", tuple(range(N_PROMPTS)), (), 0))
    contenders = (*found.contenders, *(replace(each, suite="prose") for each in found.contenders))
    (tmp_path / "two").mkdir()
    write(tmp_path / "two", [*runs, *more], replace(found, suites=suites, contenders=contenders), prompts)
    wider = write_plots(tmp_path / "two", write_report(tmp_path / "two"))
    assert size(wider[0])[0] > size(written[0])[0]


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    write(tmp_path, [], setup(contender("fast")))
    assert write_plots(tmp_path, write_report(tmp_path)) == []
