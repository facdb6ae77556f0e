"""Every command that takes a store takes a URL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from lede.buffers import open_store, same_record
from lede.buffers.storage import storage_for
from lede.cli import main
from tests.buffers.s3_server import needs_s3, s3_server

COLLECT = ["collect", "--episodes", "4", "--max-new-tokens", "6", "--collector", "teacher", "--branches", "0"]
COLLECT += ["--batch-size", "1"]  # to the bit; batches of other sizes round otherwise


@pytest.fixture(params=["memory", pytest.param("s3", marks=[needs_s3, pytest.mark.slow])])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "memory":
        yield f"memory://{uuid4().hex}"
        return
    with s3_server() as bucket:
        yield f"{bucket}/runs"


def test_from_collecting_to_training(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, local = f"{place}/traces.zarr", str(tmp_path / "traces.zarr")
    assert main([*COLLECT, "--episodes", "2", "--out", url]) == 0
    assert main([*COLLECT, "--out", url]) == 0, "gone on with"
    assert main([*COLLECT, "--out", local]) == 0
    there = {record.prompt_index: record for record in open_store(url, verify=True)}
    here = {record.prompt_index: record for record in open_store(local)}
    assert there.keys() == here.keys() == set(range(4))
    assert all((there[i].token_ids == here[i].token_ids).all() for i in here)
    assert same_record(there[3], here[3])

    assert main([*COLLECT, "--seed", "1", "--out", url]) == 2
    assert f"{url} was made with other settings (store / now): seed: 0 / 1" in capsys.readouterr().err
    assert main(["buffer", "info", "--json", url]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 4
    few = ["--steps", "3", "--min-exits", "1", "--batch-size", "4", "--objective", "paper"]
    assert main(["train", "--buffer", url, "--out", str(tmp_path / "run"), *few]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["buffer"] == url

    parts = [f"{place}/traces-train.zarr", f"{place}/traces-holdout.zarr"]
    assert main(["buffer", "split", "--holdout", "0.25", url]) == 0
    assert [len(open_store(part)) for part in parts] == [3, 1]
    assert main(["buffer", "merge", *parts, "--out", f"{place}/merged.zarr"]) == 0
    assert main(["buffer", "check", f"{place}/merged.zarr"]) == 0
    merged = open_store(f"{place}/merged.zarr")
    assert all(same_record(record, there[record.prompt_index]) for record in merged)
    storage = storage_for(merged.path or "")
    (commit,) = merged.shards
    storage.publish(f"{commit.folder}/entropy/c.0.0", b"")
    capsys.readouterr()
    assert main(["buffer", "check", storage.url]) == 1
    assert f"shard {commit.name}, array 'entropy'" in capsys.readouterr().out
    assert main(["buffer", "repair", storage.url]) == 0
    assert main(["buffer", "check", storage.url]) == 0
    assert len(open_store(storage.url)) == 0
    assert [path.name for path in tmp_path.iterdir() if ":" in path.name] == [], "no URL was taken for a path"
