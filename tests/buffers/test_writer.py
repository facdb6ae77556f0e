"""A writer resumes what is its own, refuses the rest, and leaves nothing half-written behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zarr

from lede.buffers import StoreError, StoreWriter, open_store, prompts_digest, same_record, writer
from lede.buffers.writer_name import writer_name
from lede.features import FeatureConfig
from lede.rewards import RewardConfig
from tests.buffers.samples import make_rollout, make_trace, settings

FINGERPRINT: dict[str, Any] = {
    "name": "tiny",
    "architecture": {"n_layers": 6},
    "tokenizer": None,
    "logits": [1.0, -2.0, 3.0],
    "dtype": "float32",
}


def test_resuming_knows_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    with StoreWriter.open(path, settings(), shard_prompts=2) as out:
        for i in range(3):
            out.add(make_trace(i))
        assert out.done == {0, 1}  # prompt 2 waits for its shard
    with StoreWriter.open(path, settings()) as out:
        assert out.done == {0, 1, 2}
        with pytest.raises(ValueError, match=r"prompt 1 is in .* already"):
            out.add(make_trace(1))
        out.add(make_trace(3))
        with pytest.raises(ValueError, match=r"prompt 3 is in .* already"):
            out.add(make_trace(3))
    assert open_store(path).prompt_indices == (0, 1, 2, 3)


def test_rows_fill_a_shard_too(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "t.zarr", settings(), shard_prompts=100, shard_rows=20) as out:
        out.add(make_trace(0, n_tokens=20))
        assert out.done == frozenset()
        out.add(make_trace(1, n_tokens=2))
        assert out.done == {0, 1}
        out.add(make_trace(2, n_tokens=20))
        assert out.done == {0, 1}, "counting starts anew"


def test_ctrl_c_keeps_what_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"

    def interrupted() -> None:
        with StoreWriter.open(path, settings()) as out:
            out.add(make_trace(0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert open_store(path).prompt_indices == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 7}, "seed: 0 / 7"),
        ({"temperature": 0.5}, "temperature: 0.0 / 0.5"),
        ({"max_new_tokens": 9}, "max_new_tokens: 64 / 9"),
        ({"candidates": (1, 2)}, r"candidates: \[1, 2, 4\] / \[1, 2\]"),
        ({"reward": RewardConfig(final_reward=1.0)}, "reward: .*'final_reward': 0.0.* / .*'final_reward': 1.0"),
        ({"features": FeatureConfig(window=3)}, "features: .*'window': 8.* / .*'window': 3"),
        ({"prompts_digest": prompts_digest([[1, 2]])}, "prompts_digest: "),
        ({"kind": "transitions"}, "kind: traces / transitions"),
        ({"branch_share": 0.1}, "branch_share: 0.0 / 0.1"),
        ({"branch_depth": 5}, "branch_depth: 11 / 5"),
        ({"epsilon": (1, 0.1)}, r"epsilon: None / \[1.0, 0.1\]"),
        ({"fingerprint": {**FINGERPRINT, "logits": [1.0, 2.0, 3.0]}}, "fingerprint: logits"),
        ({"fingerprint": {**FINGERPRINT, "architecture": {"n_layers": 7}}}, "fingerprint: n_layers 6 and 7"),
        ({"fingerprint": {**FINGERPRINT, "dtype": "bfloat16"}}, "fingerprint.dtype: float32 / bfloat16"),
        ({"fingerprint": {}}, "fingerprint: {'name': 'tiny'.* / {}"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "t.zarr"
    mine = settings(fingerprint=FINGERPRINT)
    StoreWriter.open(path, mine).close()
    with pytest.raises(ValueError, match=message) as error:
        StoreWriter.open(path, settings(**{"fingerprint": FINGERPRINT, **changes}))
    named = str(error.value).split("): ")[1].split(". Use")[0]
    assert "; " not in named, "nothing else differs"


def test_what_changes_no_content_may_differ(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    StoreWriter.open(path, settings(fingerprint=FINGERPRINT, versions={"torch": "1"})).close()
    elsewhere = {**FINGERPRINT, "name": "a/copy", "logits": [1.001, -2.0, 3.0]}
    other = settings(fingerprint=elsewhere, versions={"torch": "2"}, model="a/copy")
    assert StoreWriter.open(path, other).done == frozenset()


def test_models_without_fingerprint_go_by_name(tmp_path: Path) -> None:
    StoreWriter.open(tmp_path / "t.zarr", settings()).close()
    with pytest.raises(ValueError, match="model: tiny / other"):
        StoreWriter.open(tmp_path / "t.zarr", settings(model="other"))


def test_an_existing_store_needs_resume(tmp_path: Path) -> None:
    StoreWriter.open(tmp_path / "t.zarr", settings()).close()
    with pytest.raises(ValueError, match="exists already"):
        StoreWriter.open(tmp_path / "t.zarr", settings(), resume=False)


def test_foreign_paths_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine")
    zarr.create_group(tmp_path / "other.zarr", zarr_format=3)
    for name in ("file", "folder", "other.zarr"):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(StoreError, match=name):
            StoreWriter.open(tmp_path / name, settings())
        with pytest.raises(StoreError, match="no store of lede"):
            open_store(tmp_path / name)
        assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(StoreError, match="there is no store at"):
        open_store(tmp_path / "nothing.zarr")


def test_records_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    out = StoreWriter.open(tmp_path / "t.zarr", settings())
    with pytest.raises(ValueError, match="takes PromptTrace, got PromptRollout"):
        out.add(make_rollout(0))
    features = FeatureConfig(names=("confidence", "depth"))
    out = StoreWriter.open(tmp_path / "r.zarr", settings("transitions", features=features))
    with pytest.raises(ValueError, match=r"`final_observation` has rows of shape \(4,\).* \(2,\)"):
        out.add(make_rollout(0))


def dead_process() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_leftovers_of_ended_writers_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    out = StoreWriter.open(path, settings())
    out.add(make_trace(0))

    out.commit()
    machine, pid = writer_name().split("-")
    assert int(pid) == os.getpid()
    mine, dead = f"{machine}-{pid}-{'1' * 32}", f"{machine}-{dead_process()}-{'2' * 32}"
    foreign = f"{'0' * 12}-{dead_process()}-{'3' * 32}"
    for name in (mine, dead, foreign):
        (path / "shards" / name).mkdir()
        (path / "shards" / name / "zarr.json").write_text("{}")
        (path / "commits" / f".{name}.json.0.partial").write_text("{")
    assert set(writer.leftovers(path)) == {mine, dead, foreign}
    StoreWriter.open(path, settings())
    assert set(writer.leftovers(path)) == {mine, foreign}, "the writer of one lives, that of the other may"
    assert {f.name for f in path.glob("commits/.*")} == {f".{name}.json.0.partial" for name in (mine, foreign)}
    assert open_store(path, verify=True).prompt_indices == (0,)


def test_what_is_committed_while_leftovers_are_looked_for_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.zarr"
    out = StoreWriter.open(path, settings())
    out.add(make_trace(0))

    def ends_now(shard: str) -> bool:
        """The other writer commits and ends between two looks at the store."""
        for file in tmp_path.glob("*.json"):
            file.rename(path / "commits" / file.name)
        return True

    out.commit()
    (record,) = (path / "commits").iterdir()
    record.rename(tmp_path / record.name)
    monkeypatch.setattr(writer, "is_abandoned", ends_now)
    StoreWriter.open(path, settings())
    assert open_store(path, verify=True).prompt_indices == (0,)


# Forks eight processes that write to one store at once, 10,000 rows each.
WORKERS = """
import os, sys
from lede.buffers import StoreWriter
from tests.buffers.samples import make_trace, settings

children = []
for worker in range(8):
    pid = os.fork()
    if pid == 0:
        with StoreWriter.open(sys.argv[1], settings(), shard_prompts=5) as out:
            for i in range(10):
                out.add(make_trace(10 * worker + i, n_tokens=1001))
        os._exit(0)
    children.append(pid)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in children]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_no_row_of_many_writers_is_lost(tmp_path: Path) -> None:
    """A7.1, A7.5: nobody appends to an array, nobody shares a shard; 8 writers x 10,000 rows are 80,000, each once."""
    path = tmp_path / "t.zarr"
    subprocess.run([sys.executable, "-c", WORKERS, str(path)], cwd=Path(__file__).parents[2], check=True)
    store = open_store(path, verify=True)
    assert (store.n_rows, store.n_shards, store.duplicates) == (80_000, 16, 0)
    assert store.prompt_indices == tuple(range(80))
    assert all(same_record(trace, make_trace(trace.prompt_index, n_tokens=1001)) for trace in store)


def test_digest_of_prompts_tells_where_one_ends() -> None:
    assert prompts_digest([[1, 2], [3]]) == prompts_digest([(1, 2), (3,)])
    assert prompts_digest([[1, 2], [3]]) != prompts_digest([[1], [2, 3]])
    assert prompts_digest([[1, 2], [3]]) != prompts_digest([[3], [1, 2]])
