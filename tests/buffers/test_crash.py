"""kill -9 of a writer at any moment loses nothing that was committed and shows nothing that was not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lede.buffers import StoreWriter, open_store, same_record, writer
from lede.buffers.commits import read_commits
from tests.buffers.samples import make_trace, settings

PER_KILL = 12  # prompts that a writer has to have committed before the next kill comes, at most

# One parent that has imported everything forks a writer after another, waits until it has told of some commits, and
# kills it a moment later. The parent compares every byte with its checksum but decodes none: forking after zarr was at
# work can hang.
DRIVER = f"""
import os, random, signal, sys, time
from lede.buffers import StoreWriter, open_store
from lede.buffers.commits import read_commits
from tests.buffers.samples import make_trace, settings

path, n_kills = sys.argv[1], int(sys.argv[2])

def write(told):
    with StoreWriter.open(path, settings(), shard_prompts=1) as out:
        for index in range({PER_KILL} * n_kills):
            if index not in out.done:
                out.add(make_trace(index))
                os.write(told, b"%d " % index)
    os.write(told, b"end")
    signal.pause()

moments, safe = random.Random(n_kills), set()
for kill in range(n_kills):
    read, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            write(told)
        finally:
            os._exit(1)
    os.close(told)
    heard, wanted = b"", moments.randint(1, {PER_KILL} - 2)
    while heard.count(b" ") < wanted:
        heard += os.read(read, 100) or sys.exit("the writer failed by itself")
    time.sleep(moments.random() * 0.03)
    os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    while more := os.read(read, 100):
        heard += more
    os.close(read)
    safe |= {{int(index) for index in heard.replace(b"end", b"").split(b" ")[:-1]}}
    there = set(open_store(path, verify=True).prompt_indices)
    assert safe <= there <= set(range(len(there))), (safe, there)
    safe = there
print(len(safe))
"""


def killed_and_resumed(path: Path, n_kills: int) -> None:
    """Kill writers of a store, then finish it and compare it with what an uninterrupted run would have written."""
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, str(path), str(n_kills)], cwd=root, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    n_prompts = PER_KILL * n_kills
    before = {index: files_of(path, index) for index in open_store(path).prompt_indices}
    assert len(before) == int(run.stdout)
    with StoreWriter.open(path, settings()) as out:
        for index in set(range(n_prompts)) - out.done:
            out.add(make_trace(index))
    store = open_store(path, verify=True)
    assert store.prompt_indices == tuple(range(n_prompts))
    assert all(same_record(trace, make_trace(trace.prompt_index)) for trace in store)
    assert store.duplicates == 0
    assert writer.leftovers(path) == []
    assert sorted(file.suffix for file in (path / "commits").iterdir()) == [".json"] * store.n_shards
    assert all(files_of(path, index) == times for index, times in before.items()), "a commit is never taken back"


def files_of(path: Path, index: int) -> list[tuple[str, int]]:
    """Names and times of the files of the shard that holds a prompt, and of its record."""
    (commit,) = (commit for commit in read_commits(path) if index in commit.prompts)
    files = [path / commit.record, *((path / commit.folder / name) for name in commit.files)]
    return [(file.name, file.stat().st_mtime_ns) for file in files]


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_three_kills_and_a_resume_equal_an_uninterrupted_run(tmp_path: Path) -> None:
    """A7.2: a writer killed at a random moment loses no committed row, and no row reads as zeros."""
    killed_and_resumed(tmp_path / "killed.zarr", 3)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_thirty_kills_and_a_resume_equal_an_uninterrupted_run(tmp_path: Path) -> None:
    """A7.2, again and again."""
    killed_and_resumed(tmp_path / "killed.zarr", 30)
