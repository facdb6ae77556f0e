"""`python train.py` and `python deploy.py` are the commands of the same name."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from lede.cli import main

ROOT = Path(__file__).parent.parent


def run_script(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    return stopped.value.code


@pytest.mark.parametrize("name", ["train", "deploy"])
@pytest.mark.parametrize("arguments", [["--help"], ["--no-such-flag"], []], ids=["help", "wrong-flag", "nothing-given"])
def test_script_is_the_command(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = main([name, *arguments])
    told = capsys.readouterr()
    assert expected == (0 if arguments == ["--help"] else 2)
    assert run_script(name, arguments, monkeypatch) == expected
    assert capsys.readouterr() == told


def test_script_decodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "import os", "--max-new-tokens", "2", "--policy", "static:exit_layer=2;draft_length=1"]
    assert run_script("deploy", [*arguments, "--json"], monkeypatch) == 0
    assert '"results"' in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train", "deploy"])
def test_importing_a_script_runs_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--no-such-flag"])
    assert runpy.run_path(str(ROOT / f"{name}.py"))["main"] is main
