"""A commit that fails or is killed at any of its file operations loses nothing and shows nothing half-written."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lede.buffers import StoreError, StoreWriter, open_store, same_record, writer
from lede.buffers.columns import Columns
from lede.buffers.encoding import encode
from lede.buffers.shards import check_shard, read_commits
from lede.buffers.writer_name import writer_name
from tests.buffers.faults import MAKING, Faults, Killed, files_below, quick_folder
from tests.buffers.samples import make_rollout, settings

SETTINGS = settings("transitions")


@pytest.fixture
def base() -> Iterator[Path]:
    """A store with prompt 0."""
    with quick_folder() as folder:
        path = folder / "base.zarr"
        with StoreWriter.open(path, SETTINGS) as out:
            out.add(make_rollout(0))
        yield path


@pytest.fixture
def faults(base: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """File operations that can fail; a shard is encoded only the first time."""
    known: dict[bytes, dict[str, bytes]] = {}

    def encode_once(columns: Columns) -> dict[str, bytes]:
        prompts = columns["prompt_index"].tobytes()
        if prompts not in known:
            known[prompts] = encode(columns)
        return known[prompts]

    monkeypatch.setattr("lede.buffers.shards.encode", encode_once)
    return Faults(monkeypatch)


def a_copy(base: Path) -> tuple[Path, StoreWriter]:
    """A copy of the store, and a writer that is about to commit prompt 1."""
    path = base.with_name("copy.zarr")
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(base, path, copy_function=os.link)  # no file is ever changed in place
    out = StoreWriter.open(path, SETTINGS)
    out.add(make_rollout(1))
    return path, out


def visible(path: Path) -> tuple[int, ...]:
    """The prompts that a reader sees, once every byte was compared with its checksum."""
    return open_store(path, verify=True).prompt_indices


def operations(base: Path, faults: Faults) -> list[str]:
    """The file operations of a commit that works."""
    _, out = a_copy(base)
    faults.count()
    out.commit()
    return faults.stop()


def refusal(action: Callable[[], object]) -> str | None:
    """What the store says when it can't do something; None when it can."""
    try:
        action()
    except StoreError as error:
        return str(error)
    return None


def assert_whole(path: Path) -> None:
    """Both prompts are there, each once, value by value."""
    store = open_store(path, verify=True)
    assert (store.prompt_indices, store.duplicates) == ((0, 1), 0)
    assert all(same_record(record, make_rollout(record.prompt_index)) for record in store)


@pytest.mark.parametrize(
    ("number", "lasting"),
    [(errno.ENOSPC, True), (errno.EACCES, True), (errno.EIO, False)],
    ids=["disk full", "no permission", "one failure"],
)
def test_an_error_at_any_operation_leaves_the_store_intact(
    base: Path, faults: Faults, number: int, lasting: bool
) -> None:
    names = operations(base, faults)
    refused = 0
    for at in range(1, len(names) + 1):
        path, out = a_copy(base)
        faults.error(at, number, lasting)
        message = refusal(out.commit)
        faults.stop()
        if message is not None:
            refused += 1
            assert str(path) in message
            assert os.strerror(number) in message
            assert ("a crash of the machine may lose it" in message) == (1 in out.done)
        assert visible(path) == ((0, 1) if 1 in out.done else (0,))
        assert message is not None or 1 in out.done
        assert writer.leftovers(path) == [] or not lasting, "room was made"
        out.close()  # what failed can be done again
        assert visible(path) == (0, 1)
    assert refused >= sum(name in MAKING for name in names)
    assert_whole(path)


def test_a_full_disk_ends_a_run_with_one_clear_error(base: Path, faults: Faults) -> None:
    path, out = a_copy(base)

    def run() -> None:
        with out:
            out.shard_prompts = 2
            faults.error(40, errno.ENOSPC, lasting=True)
            out.add(make_rollout(2))

    with pytest.raises(
        StoreError, match=r"No space left on device\); 2 prompts are not in the store, what was"
    ) as raised:
        run()
    assert faults.stop().count("rmdir") > 0, "room was made"
    assert isinstance(raised.value.__cause__, OSError), "and no second attempt was made on the way out"
    assert raised.value.__cause__.__context__ is None
    assert visible(path) == (0,)
    with StoreWriter.open(path, SETTINGS) as again:
        assert again.done == {0}
        again.add(make_rollout(1))
    assert_whole(path)


def dead_process() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_kill_at_any_operation_loses_nothing(base: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """A7.2: not a row is lost, none reads as zeros, and the run that resumes gives what an uninterrupted one would."""
    names = operations(base, faults)
    whole = files_below(base.with_name("copy.zarr"))
    replaced = names.index("replace") + 1
    dead = f"{writer_name().split('-')[0]}-{dead_process()}"
    moments = [(at, half) for at, name in enumerate(names, 1) for half in (False, True)[: 1 + (name == "write")]]
    for at, half in moments:
        path, out = a_copy(base)
        with monkeypatch.context() as patch:
            patch.setattr(writer, "writer_name", lambda: dead)
            faults.kill(at, half)
            with pytest.raises(Killed):
                out.commit()
            faults.stop()
        assert visible(path) == ((0, 1) if at > replaced else (0,))
        with StoreWriter.open(path, SETTINGS) as again:
            if 1 not in again.done:
                again.add(make_rollout(1))
        assert visible(path) == (0, 1)
        assert files_below(path) == whole, "nothing is left over"
    assert_whole(path)


def test_a_reader_sees_the_last_commit_at_any_operation(base: Path, faults: Faults) -> None:
    """A7.9: whatever a writer is in the middle of, who opens the store finds the last commit, whole."""
    path, out = a_copy(base)
    earlier = open_store(path)
    seen = []
    faults.watch(lambda: seen.append(visible(path)))
    out.commit()
    names = faults.stop()
    replaced = names.index("replace") + 1
    assert seen == [(0,)] * replaced + [(0, 1)] * (len(names) - replaced)
    assert [record.prompt_index for record in earlier] == [0], "an open store stays as it was"


def test_a_record_appears_when_all_that_it_names_is_on_disk(base: Path, faults: Faults) -> None:
    path, out = a_copy(base)
    shutil.rmtree(path / "commits")
    shutil.rmtree(path / "shards")  # so that these have to be made, and synced, too
    faults.count()
    out.commit()
    faults.stop()
    (commit,) = read_commits(path)
    shard = path / commit.folder
    replace = [name for name, _ in faults.calls].index("replace")
    record = faults.calls[replace][1]
    written = {name: i for i, (operation, name) in enumerate(faults.calls[:replace]) if operation == "write"}
    synced = {name: i for i, (operation, name) in enumerate(faults.calls[:replace]) if operation == "fsync"}
    assert set(written) == {str(shard / name) for name in commit.files} | {record}
    assert all(synced[name] > i for name, i in written.items())
    folders = {str((shard / name).parent) for name in commit.files}
    assert set(synced) - set(written) == folders | {str(shard), str(shard.parent), str(path)}
    assert faults.calls[replace + 1 :].count(("fsync", str(path / "commits"))) == 1


def test_making_a_store_can_fail_or_be_killed_anywhere(base: Path, faults: Faults) -> None:
    path = base.parent / "folder" / "new.zarr"
    faults.count()
    StoreWriter.open(path, SETTINGS)
    count = len(faults.stop())
    for at in range(1, count + 1):
        for killed in (False, True):
            shutil.rmtree(path.parent)
            if killed:
                faults.kill(at, half_written=True)
            else:
                faults.error(at, errno.ENOSPC, lasting=True)
            with suppress(Killed):
                assert "No space left on device" in (
                    refusal(lambda: StoreWriter.open(path, SETTINGS)) or os.strerror(28)
                )
            faults.stop()
            assert "no store" in (refusal(lambda: open_store(path)) or "no store")
            with StoreWriter.open(path, SETTINGS) as out:
                out.add(make_rollout(0))
            assert visible(path) == (0,)


def test_a_shard_that_is_not_there_as_written_is_not_committed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = a_copy(base)

    def write_less(handle: int, content: memoryview) -> int:
        return os.pwrite(handle, content[:-1], 0) + 1

    monkeypatch.setattr(os, "write", write_less)
    with pytest.raises(StoreError, match=r"a shard can't be written .* bytes, \d+ were committed"):
        out.commit()
    monkeypatch.undo()
    assert visible(path) == (0,)
    out.commit()
    assert_whole(path)


def test_the_millionth_commit_costs_what_the_first_did(base: Path, faults: Faults) -> None:
    """A7.6, A7.7: a shard is written whole, one file a chunk, in as many operations as the one before it."""
    counts = []
    _, out = a_copy(base)
    for index in range(2, 12):
        out.commit()
        out.add(make_rollout(index))
        faults.count()
        out.commit()
        counts.append(len(faults.stop()))
    assert len(set(counts)) == 1
    commits = read_commits(out.storage)
    assert len(commits) == 12
    for commit in commits:
        check_shard(out.storage, commit, verify=True)
        assert {name.split("/")[-1] for name in commit.files} == {"zarr.json", "c.0", "c.0.0"}
