"""House rules that a linter has no rule for: sizes, unfinished work, who may import whom."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON_FOLDERS = ("lede", "envs", "collectors", "buffers", "tests", "benchmarks", "docs")
LINKED = ("envs", "collectors", "buffers")
LONGEST_FILE = 400

# spelt with a class in the middle, so that this file doesn't match itself
UNFINISHED = re.compile(r"\b(TO[D]O|FIX[M]E|NotImplemented[E]rror|place[h]older|not implemented [y]et)\b", re.I)
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|home)/")

SERVING = ("lede.generation", "lede.checkpoint", "lede.models", "lede.policies")
SERVING_PACKAGES = {"torch", "transformers", "safetensors", "numpy", "huggingface_hub"}  # the last by transformers
OPTIONAL = {"sklearn": "lede.policies.swift_search"}  # inside a function, and only where a setting asks for it
MAY_NOT_REACH = {
    SERVING: {"lede.envs", "lede.collectors", "lede.buffers", "lede.training", "lede.cli"},
    ("lede.envs",): {"lede.collectors", "lede.training", "lede.cli"},
    ("lede.buffers",): {"lede.envs", "lede.collectors", "lede.training", "lede.cli", "gymnasium"},
    ("lede.collectors",): {"lede.training", "lede.cli"},
    ("lede.training",): {"lede.envs", "lede.collectors", "lede.cli", "gymnasium"},
}


def python_files() -> Iterator[Path]:
    """Every file once, at its real place: the links lede/envs and so on are not followed."""
    yield from ROOT.glob("*.py")
    for folder in PYTHON_FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if not (folder == "lede" and path.relative_to(ROOT / folder).parts[0] in LINKED):
                yield path


def text_files() -> Iterator[Path]:
    yield from python_files()
    others = [*ROOT.glob("*"), *ROOT.glob("docs/**/*"), *ROOT.glob(".ci/*"), *ROOT.glob("lede/**/*.md")]
    yield from (path for path in others if path.suffix in {".md", ".toml", ".in"} or path.parent.name == ".ci")


def modules() -> dict[str, Path]:
    """Files of the package by module name."""
    found = {}
    for path in python_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] in ("lede", *LINKED):
            name = ".".join(parts if parts[0] == "lede" else ("lede", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path) -> set[str]:
    """Every name that a file imports, at its top or inside a function, with the parents of each."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 2)}


BROUGHT_ALONG = {"lede.buffers.minari_folder": {"gymnasium"}}
"""What comes with an optional package that a module needs anyway: data sets of Minari describe spaces by Gymnasium."""


def reached(starts: tuple[str, ...]) -> dict[str, str]:
    """What the modules `starts` import, directly or through other modules of ours: name -> module that imports it."""
    files, found, queue = modules(), {name: name for name in starts}, list(starts)
    del files["lede"]  # imports the public names when they are first used, so it links everything to everything
    while queue:
        importer = queue.pop()
        for name in imported(files[importer]) - set(found) - BROUGHT_ALONG.get(importer, set()):
            found[name] = importer
            if name in files:
                queue.append(name)
    return found


def test_the_walk_finds_each_file_once() -> None:
    found = [path.relative_to(ROOT).as_posix() for path in python_files()]
    assert len(found) == len(set(found))
    assert {"train.py", "lede/models.py", "envs/__init__.py", "tests/test_project.py"} <= set(found)
    assert {"lede.models", "lede.envs", "lede.policies"} <= set(modules())


def test_no_file_is_too_long() -> None:
    lengths = {p.relative_to(ROOT).as_posix(): len(p.read_text().splitlines()) for p in python_files()}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FILE} == {}


@pytest.mark.parametrize("pattern", [UNFINISHED, MACHINE_PATH], ids=["unfinished", "machine-path"])
def test_no_file_holds(pattern: re.Pattern[str]) -> None:
    lines = (
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    )
    assert list(lines) == []


@pytest.mark.parametrize("starts", MAY_NOT_REACH, ids=lambda starts: starts[0])
def test_imports_point_one_way(starts: tuple[str, ...]) -> None:
    found = reached(starts)
    assert {name: importer for name, importer in found.items() if name in MAY_NOT_REACH[starts]} == {}


def test_serving_needs_the_declared_packages_only() -> None:
    found = {name: importer for name, importer in reached(SERVING).items() if "." not in name}
    foreign = set(found) - set(sys.stdlib_module_names) - SERVING_PACKAGES - {"lede"}
    assert {name: found[name] for name in foreign} == OPTIONAL
    assert {"torch", "transformers", "safetensors"} <= set(found)
