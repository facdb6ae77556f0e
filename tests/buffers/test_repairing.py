"""`lede buffer repair` drops what is damaged, whole, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lede.buffers import StoreError, StoreWriter, check_store, info, open_store, repair_store, same_record
from lede.buffers.writer_name import writer_name
from lede.cli import main
from tests.buffers.samples import make_rollout, settings


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three shards of two prompts."""
    path = tmp_path / "r.zarr"
    with StoreWriter.open(path, settings("transitions"), shard_prompts=2) as writer:
        for i in range(6):
            writer.add(make_rollout(i))
    return path


def shard_of(path: Path, prompt: int) -> str:
    """Name of the shard that holds a prompt."""
    (name,) = (f.stem for f in (path / "commits").iterdir() if prompt in json.loads(f.read_text())["prompts"])
    return name


def spoil(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(bytes(content))


def tree(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def remaining(path: Path) -> list[int]:
    store = open_store(path, verify=True)
    assert all(same_record(record, make_rollout(record.prompt_index)) for record in store)
    return list(store.prompt_indices)


def truncate(path: Path, shard: str) -> None:
    chunk = sorted((path / "shards" / shard / "rewards").glob("c.*"))[0]
    chunk.write_bytes(chunk.read_bytes()[:-2])


def flip(path: Path, shard: str) -> None:
    spoil(sorted((path / "shards" / shard / "match").glob("c.*"))[0])


def lose_everything(path: Path, shard: str) -> None:
    (path / "shards" / shard).rename(path.parent / "lost")


def spoil_record(path: Path, shard: str) -> None:
    spoil(path / "commits" / f"{shard}.json")


def empty_record(path: Path, shard: str) -> None:
    (path / "commits" / f"{shard}.json").write_bytes(b"")


@pytest.mark.parametrize("harm", [truncate, flip, lose_everything, spoil_record, empty_record])
def test_the_damaged_shard_goes_and_the_others_stay(path: Path, harm: Any) -> None:
    """A7.3: back to the last commit that is whole; the collection records the rest anew."""
    shard = shard_of(path, 2)
    before = {name: content for name, content in tree(path).items() if shard not in name}
    harm(path, shard)
    assert check_store(path).exit_code == 1
    report = repair_store(path)
    assert report.dropped == (shard,)
    assert report.prompts == (() if "record" in harm.__name__ else (2, 3))
    assert tree(path) == before
    assert check_store(path).exit_code == 0
    assert remaining(path) == [0, 1, 4, 5]
    with StoreWriter.open(path, settings("transitions")) as writer:
        for index in sorted(set(range(6)) - writer.done):
            writer.add(make_rollout(index))
    assert remaining(path) == list(range(6))


def test_a_whole_store_stays_as_it_is(path: Path) -> None:
    before = tree(path)
    report = repair_store(path)
    assert (report.dropped, report.damage, report.prompts, report.removed, report.kept) == ((), (), (), (), ())
    assert tree(path) == before


def test_a_dry_run_changes_nothing(path: Path) -> None:
    flip(path, shard_of(path, 0))
    (path / "shards" / f"{_ended_writer()}-1").mkdir()
    before = tree(path)
    report = repair_store(path, dry_run=True)
    assert (report.dropped, report.prompts, report.dry_run) == ((shard_of(path, 0),), (0, 1), True)
    assert report.removed == (f"shards/{_ended_writer()}-1",)
    assert tree(path) == before
    assert (path / report.removed[0]).is_dir()


def test_a_prompt_with_another_copy_is_not_lost(path: Path) -> None:
    again = path.parent / "again.zarr"
    with StoreWriter.open(again, settings("transitions")) as writer:
        writer.add(make_rollout(2))
    (shard,) = (again / "shards").iterdir()
    shard.rename(path / "shards" / shard.name)
    (again / "commits" / f"{shard.name}.json").rename(path / "commits" / f"{shard.name}.json")
    (damaged,) = {f.stem for f in (path / "commits").iterdir() if json.loads(f.read_text())["prompts"] == [2, 3]}
    flip(path, damaged)
    assert repair_store(path).prompts == (3,)
    assert remaining(path) == [0, 1, 2, 4, 5]


def _ended_writer() -> str:
    """The name of a writer of this machine whose process has ended."""
    return f"{writer_name().split('-')[0]}-{_ENDED}"


_ENDED = int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True).stdout)


def test_only_what_ended_writers_left_is_removed(path: Path) -> None:
    ended, alive, elsewhere = f"{_ended_writer()}-a", f"{writer_name()}-b", "0123456789ab-7-c"
    for name in (ended, alive, elsewhere):
        (path / "shards" / name).mkdir()
        (path / "shards" / name / "zarr.json").write_text("{}")
    for name in (ended, alive):
        (path / "commits" / f".{name}.json.1f.partial").write_text("{")
    report = repair_store(path)
    assert report.removed == (f"shards/{ended}", f"commits/.{ended}.json.1f.partial")
    assert sorted(report.kept) == sorted([alive, elsewhere])
    assert info(path).leftovers == 2
    report = repair_store(path, leftovers=True)  # nobody else writes: what may be a writer's at work here still stays
    assert (report.removed, report.kept) == ((f"shards/{elsewhere}",), (alive,))
    assert (path / "commits" / f".{alive}.json.1f.partial").exists()
    assert remaining(path) == list(range(6))


def test_damaged_settings_are_not_guessed(path: Path) -> None:
    spoil(path / "zarr.json")
    before = tree(path)
    with pytest.raises(StoreError, match="the settings are damaged and stand nowhere else"):
        repair_store(path)
    assert tree(path) == before


def test_a_repair_that_is_cut_short_leaves_what_nobody_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lede.buffers.local_storage import LocalStorage

    flip(path, shard_of(path, 0))

    def refuse(self: LocalStorage, folder: str) -> None:
        raise PermissionError(13, "not allowed", folder)

    monkeypatch.setattr(LocalStorage, "remove_folder", refuse)
    with pytest.raises(StoreError, match=r"the repair stopped .*not allowed.*run it again"):
        repair_store(path)
    monkeypatch.undo()
    assert remaining(path) == [2, 3, 4, 5]
    assert check_store(path).exit_code == 0


@pytest.mark.parametrize("refused", [{1}, {1, 2}, {1, 3}])
def test_what_can_not_be_read_is_not_dropped(path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[int]) -> None:
    """A server that is busy, or a folder without permission, says nothing about the bytes there."""
    from lede.buffers.local_storage import LocalStorage

    before, shard = tree(path), shard_of(path, 2)
    real, n_reads = LocalStorage.read, 0

    def read(self: LocalStorage, names: Iterable[str]) -> dict[str, bytes]:
        nonlocal n_reads
        names = list(names)
        wanted = any(shard in name and "match/c" in name for name in names)
        n_reads += wanted
        if wanted and n_reads in refused:
            raise OSError("SlowDown: reduce your request rate")
        return real(self, names)

    monkeypatch.setattr(LocalStorage, "read", read)
    if refused == {1}:  # the second look finds all of it
        assert repair_store(path).damage == ()
    else:
        with pytest.raises(StoreError, match=rf"shard {shard}.* can't be read.*SlowDown.*nothing was dropped"):
            repair_store(path)
        n_reads = 0
        report = check_store(path)
        assert (report.exit_code, report.damaged_shards) == (1, (shard,))
    monkeypatch.undo()
    assert tree(path) == before


def test_by_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(path, shard_of(path, 4))
    assert main(["buffer", "repair", str(path), "--dry-run"]) == 0
    assert "1 damaged shards would be dropped" in capsys.readouterr().out
    assert main(["buffer", "repair", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == [4, 5]
    assert main(["buffer", "check", str(path)]) == 0
    assert main(["buffer", "repair", str(path.parent / "nothing.zarr")]) == 2
    assert os.listdir(path.parent) == ["r.zarr"]
