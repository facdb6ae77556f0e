"""The README is run: its commands through `lede`'s own main, its Python in one namespace, top to bottom."""

from __future__ import annotations

import importlib
import re
import shlex
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
FLAGS = re.compile(
    r"^\| `lede (?P<command>[\w ]+)` \| default \|[^\n]*\n\|[-|]+\|\n(?P<rows>(?:\|[^\n]*\n)+)", re.MULTILINE
)
DEFAULT_ROW = re.compile(r"^\| `--(?P<flag>[\w-]+)` \| (?P<default>[^|]*) \|", re.MULTILINE)
FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("bash", "console")
SET_UP = ("pip", "pytest", "git", "cd")  # what brought the reader, or this test, here
ELSEWHERE = (["lede", "demo"],)  # runs in tests/test_demo.py


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    line: int
    """Line of the block's first line in the README, from 1."""
    text: str


def blocks() -> list[Block]:
    text = README.read_text()
    return [
        Block(found["language"], text.count("\n", 0, found.start("text")) + 1, found["text"])
        for found in FENCE.finditer(text)
    ]


def commands(block: Block) -> list[list[str]]:
    """The commands of a shell block as words; in a console block those behind `$ `."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    found: list[list[str]] = []
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if word in ("&&", ";"):
                found.append(words)
                words = []
            else:
                words.append(word)
    return [words for words in found if words]


def lede_arguments(words: list[str]) -> list[str] | None:
    """What goes to lede's main, None where another program is called."""
    if words[0] == "lede":
        return words[1:]
    if words[:2] in (["python", "train.py"], ["python", "deploy.py"]):
        return [words[1].removesuffix(".py"), *words[2:]]
    return None


def run_lede(arguments: list[str]) -> None:
    from lede.cli import main

    try:
        code: Any = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    assert not code, f"lede {shlex.join(arguments)} ended with {code}"


def as_written(value: object) -> str:
    """A default as the table writes it."""
    if value is MISSING:
        return "-"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return {None: "none", True: "on", False: "off"}[value] if value is None or isinstance(value, bool) else str(value)


def flags(command: str) -> dict[str, str]:
    """The flags of a command and their defaults, as the README has them."""
    (table,) = (found for found in FLAGS.finditer(README.read_text()) if found["command"] == command)
    return {found["flag"]: found["default"] for found in DEFAULT_ROW.finditer(table["rows"])}


@pytest.mark.parametrize("command", [found["command"] for found in FLAGS.finditer(README.read_text())])
def test_flags_and_defaults_are_the_real_ones(command: str) -> None:
    from lede.cli import COMMANDS
    from lede.training import TrainConfig

    config: Any = getattr(importlib.import_module(COMMANDS[command].module), COMMANDS[command].config)
    given = fields(TrainConfig if command == "train" else config)  # that of a sweep has more
    real = {field.name.replace("_", "-"): as_written(field.default) for field in given}
    if command == "train":
        real = {name: default for name, default in real.items() if default != "-"}
    assert flags(command) == real


def test_the_tables_of_flags_are_found() -> None:
    assert {found["command"] for found in FLAGS.finditer(README.read_text())} >= {"train", "verify", "export"}


def test_every_block_says_what_it_is() -> None:
    languages = [block.language for block in blocks()]
    assert set(languages) <= {*SHELL, "python", "text"}
    assert "python" in languages


def test_every_command_is_known() -> None:
    unknown = [
        f"README.md:{block.line}: {shlex.join(words)}"
        for block in blocks()
        if block.language in SHELL
        for words in commands(block)
        if lede_arguments(words) is None and words[0] not in SET_UP
    ]
    assert unknown == []


def test_the_top_is_two_commands() -> None:
    first, second = (block for block in blocks()[:2])
    assert commands(first)[-1] == ["lede", "demo"]
    assert commands(second)[-1] == ["pytest"]
    assert second.line < 40


def test_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("lede", "docs", "tests"):  # paths in the README are those of a checkout
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "readme"}
    seen = set()
    for block in blocks():
        if block.language == "python":
            # as many lines before it as in the README, so that a traceback names the README's own line
            exec(compile("\n" * (block.line - 1) + block.text, str(README), "exec"), namespace)
        elif block.language in SHELL:
            for words in commands(block):
                arguments = lede_arguments(words)
                if arguments is not None and words[:2] not in ELSEWHERE:
                    run_lede(arguments)
                    seen.add(arguments[0])
    assert {"collect", "train", "deploy"} <= seen
    assert capsys.readouterr().out
