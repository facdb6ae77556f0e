"""kill -9 of a writer at any moment loses nothing that was committed and shows nothing that was not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lede.buffers import StoreWriter, open_store, same_record, writer
from tests.buffers.samples import make_trace, settings

N_PROMPTS = 9

# One parent that has imported everything forks a writer after another: only the imports are slow. A writer kills
# itself with SIGKILL before or after its k-th change of the file system; between those nothing on disk changes.
DRIVER = """
import os, pathlib, random, signal, sys
from lede.buffers import StoreWriter
import lede.buffers.writer
from tests.buffers.samples import make_trace, settings

path, n_prompts = sys.argv[1], int(sys.argv[2])

def count_down(function, left):
    def wrapped(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return wrapped

def write(k):
    left = [k]
    os.fsync = lambda handle: None  # a killed process loses nothing that the system has taken
    os.replace, pathlib.Path.replace = count_down(os.replace, left), count_down(pathlib.Path.replace, left)
    os.mkdir, os.rmdir = count_down(os.mkdir, left), count_down(os.rmdir, left)
    with StoreWriter.open(path, settings(), shard_prompts=2) as out:
        for index in range(n_prompts):
            if index not in out.done:
                out.add(make_trace(index))

kills, moments = 0, random.Random(0)
for attempt in range(40):
    pid = os.fork()
    if pid == 0:
        write(attempt + 1 if attempt < 12 else moments.randint(1, 160))
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if status == 0:
        break
    if os.WTERMSIG(status) != signal.SIGKILL:
        sys.exit(f"the writer failed by itself: {status}")
    kills += 1
print(kills)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    path = tmp_path / "killed.zarr"
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, str(path), str(N_PROMPTS)], cwd=root, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-1]) >= 20, "it has to be killed for this to mean something"

    # a commit is never taken back, so whatever a reader could see between the kills is still here
    for trace in open_store(path, verify=True):
        assert same_record(trace, make_trace(trace.prompt_index))
    with StoreWriter.open(path, settings(), shard_prompts=2) as out:
        for index in set(range(N_PROMPTS)) - out.done:
            out.add(make_trace(index))
    store = open_store(path, verify=True)
    assert store.prompt_indices == tuple(range(N_PROMPTS))
    assert all(same_record(trace, make_trace(trace.prompt_index)) for trace in store)
    assert store.duplicates == 0
    assert writer.leftovers(path) == []
    assert sorted(file.suffix for file in (path / "commits").iterdir()) == [".json"] * store.n_shards
