"""The command line through `main([...])`: what it prints, where, and with which exit code."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lede.cli import COMMANDS, main
from lede.generation import generate
from lede.models import load_model

HEADS = ["def add(a, b):", "import os\n\n\ndef walk(path):"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in HEADS), encoding="utf-8")
    return path


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail as a user error does: exit code 2, nothing on stdout, one line on stderr."""
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("lede: error: ")
    assert told.err.count("\n") == 1
    return told.err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in COMMANDS)
    assert main([]) == 2


def test_a_family_of_commands_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", "--help"]) == 0
    told = capsys.readouterr().out
    assert "buffer merge" in told
    assert "collect" not in told
    assert main(["buffer"]) == 2
    assert capsys.readouterr().out == told
    wrong = fails(["buffer", "inform", "x.zarr"], capsys)
    assert "commands are buffer info, buffer check, " in wrong
    assert "train" not in wrong


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    assert f"usage: lede {name}" in capsys.readouterr().out


def test_help_and_version_load_no_framework() -> None:
    code = (
        "import sys; from lede.cli import main; main(['--help']); main(['--version']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'zarr', 'd3rlpy', 'gymnasium')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_parsers_complaint_has_no_box_or_colour(
    encoding: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser draws for the terminal that stdout is: coloured, in Unicode or ASCII."""

    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal(io.BytesIO(), encoding=encoding))
    told = fails(["collect", "--collector", "teacher"], capsys)
    assert told.startswith("lede: error: Missing from lede collect: --out PATH Folder of the store")
    assert not {"\x1b", "│", "╭", "─"} & set(told)
    assert "---" not in told
    told = fails(["deploy", "--polcy"], capsys)
    assert told == "lede: error: Unrecognized options: --polcy; see lede deploy --help\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dploy"], "there is no command 'dploy'"),
        (["deploy"], "lede: error: give either --prompt TEXT or --prompts FILE"),
        (["deploy", "--prompt", "x", "--polcy", "static"], "--polcy"),
        (["deploy", "--prompt", "x\udcff"], "the prompt is not valid Unicode"),
        (["deploy", "--prompt", "x", "--max-new-tokens", "many"], "many"),
        (["deploy", "--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["deploy", "--prompt", "x", "--max-new-tokens", "99999"], "positions"),
        (["deploy", "--prompt", "x", "--policy", "statik"], "statik"),
        (["deploy", "--prompt", "x", "--policy", "static:exit_layer=99"], "exit layer 99 is outside"),
        (["deploy", "--prompt", "x", "--temperature", "-1"], "temperature must be"),
        (["deploy", "--prompt", "x", "--model", "no/such/folder"], "cannot load model 'no/such/folder'"),
        (["deploy", "--prompts", "nothing.jsonl"], "nothing.jsonl"),
        (["collect", "--collector", "teacher"], "--out"),
        (["train", "--buffer", "nothing.zarr", "--out", "out"], "nothing.zarr"),
        (["buffer", "info", "nothing.zarr"], "nothing.zarr"),
        (["buffer", "inform", "nothing.zarr"], "there is no command 'buffer inform'"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_user_errors_are_one_line_and_exit_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert message in fails(arguments, capsys)
    assert list(tmp_path.iterdir()) == []  # nothing half-written


def test_missing_package_is_told_with_the_command_that_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    monkeypatch.delitem(sys.modules, "lede.buffers.encoding", raising=False)
    monkeypatch.delitem(sys.modules, "lede.buffers.shards", raising=False)
    monkeypatch.delitem(sys.modules, "lede.buffers.store", raising=False)
    monkeypatch.delitem(sys.modules, "lede.buffers.statistics", raising=False)
    monkeypatch.delitem(sys.modules, "lede.buffers.inspection", raising=False)
    assert "pip install 'lede-rl[collect]'" in fails(["buffer", "info", "x.zarr"], capsys)


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    import lede.environment

    def interrupt(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lede.environment, "show_environment", interrupt)
    assert main(["env"]) == 130


def test_env_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    assert "transformers" in capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["torch"]
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + [line for lines in project["optional-dependencies"].values() for line in lines]
    names = {re.split(r"[^\w-]", line)[0] for line in needed} - {project["name"]}
    assert set(facts["packages"]) == names
    assert "llama" in facts["families"]


def test_deploy_json_is_one_object_with_the_texts_of_generate(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["deploy", "--prompts", str(prompts), "--policy", "static", "--max-new-tokens", "12", "--json"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"results", "summary"}
    model = load_model("demo")
    texts = [generate(model, head, max_new_tokens=12).text for head in HEADS]
    assert [result["text"] for result in report["results"]] == texts
    summary = report["summary"]
    assert summary["n_prompts"] == 2
    assert summary["policy"] == "static"
    for name in ("tokens", "rounds", "drafted", "accepted"):
        assert summary[name] == sum(result["stats"][name] for result in report["results"])
    assert summary["acceptance_rate"] == summary["accepted"] / summary["drafted"]


def test_deploy_tells_where_tokens_come_from(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["deploy", "--prompts", str(prompts), "--policy", "lookup:draft_length=4", "--max-new-tokens", "64"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found, summary = report["summary"]["sources"], report["summary"]
    assert list(found) == ["lookup", "plain"]
    assert found["lookup"]["rounds"] + found["plain"]["rounds"] == summary["rounds"]
    assert found["lookup"]["committed"] + found["plain"]["committed"] == summary["tokens"] - summary["n_prompts"]
    assert found["lookup"]["acceptance_rate"] == summary["acceptance_rate"]
    assert found["lookup"]["accepted"] == sum(each["sources"]["lookup"]["accepted"] for each in report["results"])
    shares = {name: f"{100 * found[name]['token_share']:.0f} % of tokens" for name in found}
    assert main(arguments) == 0
    told = capsys.readouterr().err
    assert all(f"{name} " in told and share in told for name, share in shares.items())
    assert main(["deploy", "--prompt", HEADS[0], "--max-new-tokens", "4"]) == 0
    assert "% of tokens" not in capsys.readouterr().err


def test_deploy_streams_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "--prompt", HEADS[0], "--policy", "threshold", "--max-new-tokens", "8"]) == 0
    told = capsys.readouterr()
    text = generate(load_model("demo"), HEADS[0], max_new_tokens=8).text
    assert told.out == f"{HEADS[0]}{text}\n"
    assert "tokens/s" in told.err


def test_sampled_prompts_have_streams_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "same.txt"
    path.write_text("def f(x):\n" * 3, encoding="utf-8")
    arguments = ["deploy", "--prompts", str(path), "--temperature", "1.5", "--max-new-tokens", "8", "--json"]
    texts = []
    for _ in range(2):
        assert main(arguments) == 0
        texts.append([result["text"] for result in json.loads(capsys.readouterr().out)["results"]])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


@pytest.mark.filterwarnings("default:the policy was fitted at temperature")
def test_warnings_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lede.policies import StaticPolicy

    StaticPolicy(exit_layer=2, draft_length=2, trained_temperature=0.6).save_pretrained(str(tmp_path))
    assert main(["deploy", "--prompt", "x", "--policy", str(tmp_path), "--max-new-tokens", "2", "--json"]) == 0
    told = capsys.readouterr().err
    assert told.startswith("lede: warning: the policy was fitted at temperature 0.6")
    assert told.count("\n") == 1


def test_collect_train_and_deploy(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The three commands after one another, on both kinds of store."""
    pytest.importorskip("d3rlpy")
    for collector in ("rollout", "teacher"):
        store, out = str(tmp_path / f"{collector}.zarr"), str(tmp_path / collector)
        common = ["--prompts", str(prompts), "--episodes", "2", "--max-new-tokens", "40", "--out", store]
        assert main(["collect", "--collector", collector, *common, "--candidates", "2,4"]) == 0
        capsys.readouterr()
        assert main(["buffer", "info", store, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["prompts"] == 2
        fast = ["--steps", "20", "--eval-interval", "10", "--min-exits", "5", "--batch-size", "32"]
        assert main(["train", "--buffer", store, "--out", out, *fast]) == 0
        assert capsys.readouterr().out.endswith(f"\nwritten to {out}/policy\n")
        assert (
            main(["deploy", "--prompt", HEADS[0], "--policy", f"{out}/policy", "--max-new-tokens", "8", "--json"]) == 0
        )
        report = json.loads(capsys.readouterr().out)
        assert report["results"][0]["text"] == generate(load_model("demo"), HEADS[0], max_new_tokens=8).text
        assert "other settings" in fails(
            ["train", "--buffer", store, "--out", out, "--resume", "--seed", "1", *fast], capsys
        )
        assert "holds a run already" in fails(["train", "--buffer", store, "--out", out, *fast], capsys)
        assert "--max-new-tokens" in fails(["collect", "--collector", collector, *common, "--candidates", "2,4",
                                          "--max-new-tokens", "41"], capsys)  # fmt: skip


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    code = (
        "import sys, os; from lede import cli, environment\n"
        "def leave(config): raise BrokenPipeError(32, 'Broken pipe')\n"
        "environment.show_environment = leave\n"
        "sys.exit(cli.main(['env']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
