"""The README is run: its commands through `lede`'s own main, its Python in one namespace, top to bottom.

What can't be run here (commands that need a model of the reader's, those of docs/) is parsed. Tables of options, links
and the glossary, in README and docs/, are compared with what is there.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections import Counter
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from lede.cli import COMMANDS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
WORDS = ROOT / "docs" / "words.md"
FLAGS = re.compile(
    r"^\| `lede (?P<command>[\w ]+)` \| default \|[^\n]*\n\|[-|]+\|\n(?P<rows>(?:\|[^\n]*\n)+)", re.MULTILINE
)
DEFAULT_ROW = re.compile(r"^\| `--(?P<flag>[\w-]+)` \| (?P<default>[^|]*) \|", re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
NAMED = re.compile(r"`((?:docs|benchmarks|lede|tests)/[\w/]+\.(?:md|py|sh|jsonl))`")
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


def blocks(path: Path = README) -> list[Block]:
    text = path.read_text()
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


def option_tables() -> list[tuple[str, list[tuple[str, str]]]]:
    """The tables of options of README and docs/: the command, and each flag with its default as it stands there."""
    return [
        (table["command"], [(row["flag"], row["default"]) for row in DEFAULT_ROW.finditer(table["rows"])])
        for path in (README, *DOCS)
        for table in FLAGS.finditer(path.read_text())
    ]


def settings_of(command: str) -> Any:
    """The dataclass of a command's settings."""
    return getattr(importlib.import_module(COMMANDS[command].module), COMMANDS[command].config)


def test_every_command_has_one_table_of_options() -> None:
    assert Counter(command for command, _ in option_tables()) == Counter(list(COMMANDS))


@pytest.mark.parametrize("command", COMMANDS)
def test_options_and_defaults_are_the_real_ones(command: str) -> None:
    written = [row for name, rows in option_tables() if name == command for row in rows]
    real = [(field.name.replace("_", "-"), as_written(field.default)) for field in fields(settings_of(command))]
    assert sorted(written) == sorted(real)


def test_the_readme_names_every_page_of_docs() -> None:
    text = README.read_text()
    assert [path.name for path in DOCS if str(path.relative_to(ROOT)) not in text] == []


def anchors(path: Path) -> set[str]:
    """What a link may name behind `#`: headings in lower case, without signs, with dashes for blanks."""
    headings = HEADING.findall(FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [README, ROOT / "CONTRIBUTING.md", *DOCS], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = FENCE.sub("", path.read_text())
    broken = [name for name in NAMED.findall(text) if not (ROOT / name).exists()]
    for link in LINK.finditer(text):
        target = (path.parent / link["target"]).resolve() if link["target"] else path
        if "://" in link["target"]:
            continue
        if not target.exists() or (link["anchor"] and link["anchor"] not in anchors(target)):
            broken.append(link[0])
    assert broken == []


def test_the_glossary_is_alphabetical_and_has_no_word_twice() -> None:
    _, _, table = WORDS.read_text().partition("|---|---|\n")
    words = [line.split("|")[1].strip().split(",")[0].casefold() for line in table.splitlines()]
    assert len(words) > 40
    assert words == sorted(set(words))


@pytest.mark.parametrize("path", [README, *DOCS], ids=lambda path: path.name)
def test_commands_that_are_only_shown_parse(path: Path) -> None:
    import tyro

    for block in blocks(path):
        if path != README or block.language == "text":
            shown = block.text.replace("\\\n", " ").splitlines()
            lines = "\n".join(line for line in shown if line.startswith("lede "))
            for words in commands(Block("bash", block.line, lines)):
                if "..." in words:  # abridged
                    continue
                name = next((name for name in (" ".join(words[1:3]), words[1]) if name in COMMANDS), None)
                assert name is not None, f"{path.name}:{block.line}: {shlex.join(words)}"
                tyro.cli(settings_of(name), args=words[1 + len(name.split()) :])


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
