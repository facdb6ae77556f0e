"""What a user gets: the wheel, built from the sdist as an index would, against the folders of the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from lede.demo.run import LEARNED

ROOT = Path(__file__).parent.parent
FOLDERS = {"lede": "lede", "envs": "lede/envs", "collectors": "lede/collectors", "buffers": "lede/buffers"}
BESIDE = (
    *("tests", "docs", "benchmarks", ".ci", "train.py", "deploy.py", "pyproject.toml", "MANIFEST.in"),
    *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"),
)
LITTER = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with one sdist and the wheel built from it; built from a copy, which keeps the checkout clean."""
    copy, dist = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for name in (*FOLDERS, *BESIDE):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=LITTER)
        else:
            shutil.copy2(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dist


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def shipped_files() -> set[str]:
    """Every file below the four folders, named as in an installation; links are not followed."""
    found = set()
    for folder, package in FOLDERS.items():
        for where, folders, files in os.walk(ROOT / folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            inside = Path(where).relative_to(ROOT / folder)
            found |= {(Path(package) / inside / name).as_posix() for name in files}
    return found


def test_wheel_holds_the_files_of_the_folders_and_nothing_else(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert len(names) == len(set(names))
    assert set(names) == shipped_files()
    assert {"lede/py.typed", "lede/demo/model/model.safetensors", "lede/envs/__init__.py"} <= set(names)


def test_sdist_holds_the_entry_points_and_the_tests(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = {member.name.split("/", 1)[-1]: member for member in archive.getmembers()}
    assert {"train.py", "deploy.py", "LICENSE", "envs/__init__.py"} <= set(members)
    for folder in ("tests", "docs", "benchmarks"):  # tests read docs and run benchmarks
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert {name for name in files if "_cache" not in name and "__pycache__" not in name} <= set(members)
    assert not any(member.issym() or member.islnk() for member in members.values())


def test_metadata_keeps_serving_light(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        scripts = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert metadata["Name"] == "lede-rl"
    assert metadata["License-Expression"] == "Apache-2.0"
    needs = [(re.split(r"[^\w-]", line)[0], line) for line in metadata.get_all("Requires-Dist", [])]
    base = {name for name, line in needs if "extra ==" not in line}
    assert base == {"torch", "transformers", "safetensors", "numpy", "tyro", "rich"}
    assert {name for name, line in needs if 'extra == "collect"' in line} == {"gymnasium", "numcodecs", "zarr"}
    assert "d3rlpy" in {name for name, line in needs if 'extra == "train"' in line}
    assert "lede = lede.cli:main" in scripts


def run_elsewhere(wheel: Path, folder: Path, *arguments: str) -> str:
    """What the installed command prints, far from the checkout."""
    site = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True)
    # the target folder comes first: neither this checkout nor an editable install of it can be what is imported
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = "import lede, lede.envs; print(lede.__file__, lede.envs.__file__, sep='\\n')"
    told = []
    for command in ([sys.executable, "-P", "-c", where], [str(site / "bin" / "lede"), *arguments]):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        told.append(done.stdout)
    assert [Path(line).parent for line in told[0].split()] == [site / "lede", site / "lede" / "envs"]
    return told[1]


def test_an_installed_wheel_decodes_elsewhere(wheel: Path, tmp_path: Path) -> None:
    policy = "static:exit_layer=5;draft_length=4"
    asked = ("deploy", "--prompt", "def main():\n", "--policy", policy, "--max-new-tokens", "16", "--json")
    summary = json.loads(run_elsewhere(wheel, tmp_path, *asked))["summary"]
    assert summary["tokens"] == 16
    assert summary["accepted"] > 0


@pytest.mark.slow
def test_an_installed_wheel_runs_the_demo_elsewhere(wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    run_elsewhere(wheel, tmp_path, "demo", "--quick", "--out", str(out))
    rows = {row["name"]: row for row in json.loads((out / "report.json").read_text())["rows"]}
    assert rows[LEARNED]["exact"] in ("yes", "ties")
    assert rows["best static"]["acceptance_rate"] > 0
