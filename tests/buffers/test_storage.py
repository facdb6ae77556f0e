"""Every place of a store behaves alike: a local folder, fsspec's file systems, a bucket behind a real S3 server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from lede.buffers import StoreError, StoreWriter, info, open_store, same_record, writer
from lede.buffers.fsspec_storage import FsspecStorage
from lede.buffers.local_storage import LocalStorage
from lede.buffers.shards import read_commits
from lede.buffers.storage import Storage, place_url, storage_for
from tests.buffers.s3_server import needs_s3, s3_server
from tests.buffers.samples import make_rollout, make_trace, settings


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(params=["path", "file", "memory", pytest.param("s3", marks=needs_s3)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place where nothing is yet."""
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{uuid4().hex}/t.zarr"
    places = {"path": f"{tmp_path}/t.zarr", "file": f"file://{tmp_path}/t.zarr", "memory": f"memory://{uuid4().hex}/t"}
    return places[request.param]


def test_files_come_back_as_they_were_put(url: str) -> None:
    storage = storage_for(url)
    assert isinstance(storage, Storage)
    assert storage.is_local == (not url.startswith(("memory", "s3")))
    assert (storage.state(), storage.names(), storage.sizes(), storage.size("a")) == ("absent", [], {}, None)
    storage.write({"f/a/one": b"1", "f/two": b"22"})
    storage.write({})
    storage.publish("zarr.json", b"root")
    assert storage.state() == "folder"
    assert (storage.names(), storage.names("f"), storage.names("g")) == (["f", "zarr.json"], ["a", "two"], [])
    assert storage.sizes() == {"f/a/one": 1, "f/two": 2, "zarr.json": 4}
    assert storage.sizes("f") == {"a/one": 1, "two": 2}
    assert storage.sizes("f/a/one/x") == {}
    assert (storage.size("f/two"), storage.size("f"), storage.size("f/three")) == (2, None, None)
    assert storage.read(["f/two", "f/a/one"]) == {"f/two": b"22", "f/a/one": b"1"}
    assert storage.read([]) == {}
    with pytest.raises(FileNotFoundError):
        storage.read(["f/two", "f/three"])


def test_files_are_replaced_made_once_and_removed(url: str) -> None:
    storage = storage_for(url)
    storage.publish("a/b", b"old")
    storage.publish("a/b", b"new")
    assert storage.read(["a/b"]) == {"a/b": b"new"}
    assert storage.create("a/c", b"mine")
    assert not storage.create("a/c", b"theirs")
    assert storage.read(["a/c"]) == {"a/c": b"mine"}
    assert storage.names("a") == ["b", "c"], "no temporary file is left"
    storage.remove(["a/c", "a/x", "y/z"])
    assert storage.names("a") == ["b"]
    storage.write({"a/d/e": b"", "a/d/f/g": b""})
    storage.remove_folder("a/d")
    storage.remove_folder("a/d")
    assert storage.sizes() == {"a/b": 3}
    assert storage_for(f"{url}/a/b").state() == "file"


def test_only_one_of_two_makes_a_file(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have looked and found nothing, then both make it."""
    storage = storage_for(url)
    storage.publish("zarr.json", b"theirs")
    sizes = iter([None, 6])
    monkeypatch.setattr(FsspecStorage, "size", lambda self, name: next(sizes))
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert not storage.create("zarr.json", b"mine")
    monkeypatch.undo()
    assert storage.read(["zarr.json"]) == {"zarr.json": b"theirs"}


def test_a_store_is_the_same_anywhere(url: str, tmp_path: Path) -> None:
    for place in (url, tmp_path / "here.zarr"):
        with StoreWriter.open(place, settings(), shard_prompts=2) as out:
            for index in range(3):
                out.add(make_trace(index))
    with StoreWriter.open(url, settings()) as out:
        assert out.done == {0, 1, 2}
        out.add(make_trace(3))
    with pytest.raises(ValueError, match="seed: 0 / 1") as error:
        StoreWriter.open(url, settings(seed=1))
    there, here = open_store(url, verify=True), open_store(tmp_path / "here.zarr")
    assert (str(there.path) in str(error.value), there.n_shards, here.n_shards) == (True, 3, 2)
    assert all(same_record(record, make_trace(record.prompt_index)) for record in there)
    assert there.prompt_indices == (0, 1, 2, 3)
    assert (info(url).rows, info(url).leftovers) == (there.n_rows, 0)
    files = [
        {tuple(sorted(commit.files.items())) for commit in read_commits(place)} for place in (url, here.path or "")
    ]
    assert files[1] < files[0], "byte for byte"


def test_damage_is_named_anywhere(url: str) -> None:
    with StoreWriter.open(url, settings("transitions")) as out:
        out.add(make_rollout(0))
    storage = storage_for(url)
    (commit,) = read_commits(storage)
    chunk = f"{commit.folder}/rewards/c.0"
    content = storage.read([chunk])[chunk]
    storage.write({chunk: content[:-1] + bytes([content[-1] ^ 1])})
    with pytest.raises(StoreError, match=rf"shard {commit.name}: file rewards/c.0 was altered"):
        open_store(url, verify=True)
    storage.write({chunk: content[:-1]})
    with pytest.raises(StoreError, match=r"file rewards/c\.0 has"):
        open_store(url)
    storage.write({chunk: content})
    store = open_store(url, verify=True)
    storage.remove([chunk])
    with pytest.raises(StoreError, match=r"has lost its file rewards/c\.0"):
        list(store)
    with pytest.raises(StoreError, match=r"has lost its file rewards/c\.0"):
        open_store(url)
    storage.write({"commits/more.json": b"{"})
    with pytest.raises(StoreError, match=r"commit record more\.json is damaged"):
        open_store(url)


def test_foreign_files_are_left_alone(url: str) -> None:
    storage = storage_for(url)
    with pytest.raises(StoreError, match="there is no store at"):
        open_store(url)
    storage.write({"thesis.tex": b"mine"})
    with pytest.raises(StoreError, match="is no store of lede"):
        StoreWriter.open(url, settings())
    with pytest.raises(StoreError, match=r"thesis\.tex is a file, a store is a folder"):
        StoreWriter.open(f"{url}/thesis.tex", settings())
    assert storage.sizes() == {"thesis.tex": 4}


@needs_s3
def test_a_commit_to_a_bucket_is_one_object_put(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A7.7: whole objects only, the record last, by one PUT that is never a copy, a rename or an upload in parts."""
    import s3fs

    url = f"{bucket}/{uuid4().hex}.zarr"
    writer_ = StoreWriter.open(url, settings(), shard_prompts=1)
    calls: list[tuple[str, str]] = []
    real = s3fs.S3FileSystem._call_s3

    async def call(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        calls.append((method, kwargs.get("Key", "")))
        return await real(self, method, *args, **kwargs)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    writer_.add(make_trace(0))
    (commit,) = read_commits(url)
    changes = [(method, key) for method, key in calls if not method.startswith(("list", "head", "get"))]
    root = url.removeprefix("s3://").partition("/")[2]
    assert {method for method, _ in changes} == {"put_object"}
    assert sorted(key for _, key in changes[:-1]) == sorted(f"{root}/{commit.folder}/{name}" for name in commit.files)
    assert changes[-1] == ("put_object", f"{root}/{commit.record}")


@needs_s3
def test_a_bucket_that_refuses_is_a_clear_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="s3://nobodys-bucket/t: the store can't be made: "):
        StoreWriter.open("s3://nobodys-bucket/t", settings())
    url = f"{bucket}/{uuid4().hex}.zarr"
    out = StoreWriter.open(url, settings())
    out.add(make_trace(0))

    def refuse(self: FsspecStorage, name: str, content: bytes) -> None:
        raise OSError("SlowDown")

    with monkeypatch.context() as patch:
        patch.setattr(FsspecStorage, "publish", refuse)
        with pytest.raises(StoreError, match=r"can't be written \(SlowDown\); 1 prompts are not in the store"):
            out.commit()
    assert len(open_store(url)) == 0
    assert len(writer.leftovers(url)) == 1, "kept: the record may have been on its way"
    out.commit()
    StoreWriter.open(url, settings())
    assert len(writer.leftovers(url)) == 1, "whether its writer lives can't be known there"
    assert open_store(url, verify=True).prompt_indices == (0,)


def test_a_record_that_arrived_although_the_call_failed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid4().hex}"
    out = StoreWriter.open(url, settings())
    out.add(make_trace(0))
    real = FsspecStorage.publish

    def time_out(self: FsspecStorage, name: str, content: bytes) -> None:
        real(self, name, content)
        raise OSError("timed out")

    monkeypatch.setattr(FsspecStorage, "publish", time_out)
    with pytest.raises(StoreError, match="timed out"):
        out.commit()
    assert out.done == {0}
    out.close()
    assert open_store(url, verify=True).duplicates == 0


def test_a_failure_among_many_files_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = StoreWriter.open(tmp_path / "t.zarr", settings())
    out.add(make_trace(0))
    real, count = os.fsync, iter(range(1000))

    def fail_once(handle: int) -> None:
        if next(count) == 30:
            raise OSError(28, os.strerror(28))
        real(handle)

    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises(StoreError, match="No space left on device"):
        out.commit()
    assert (len(open_store(tmp_path / "t.zarr")), writer.leftovers(tmp_path / "t.zarr")) == (0, [])


def test_a_file_system_without_links_makes_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    storage = storage_for(tmp_path / "s")
    assert storage.create("zarr.json", b"mine")
    assert not storage.create("zarr.json", b"theirs")
    assert storage.sizes() == {"zarr.json": 4}


@pytest.mark.parametrize(
    ("place", "url"),
    [
        ("runs/t.zarr", "runs/t.zarr"),
        (Path("/runs/t.zarr"), "/runs/t.zarr"),
        ("s3://bucket/t.zarr", "s3://bucket/t.zarr"),
        (Path("s3://bucket/t.zarr"), "s3://bucket/t.zarr"),
        ("S3://bucket/T.zarr", "s3://bucket/T.zarr"),
        (Path("memory://t"), "memory://t"),
        ("file:///runs/t", "file:///runs/t"),
        (Path("file:///runs/t"), "file:///runs/t"),
        ("C:\\runs\\t", "C:\\runs\\t"),
        ("a:b/t", "a:b/t"),
        ("at/10:/00", "at/10:/00"),
    ],
)
def test_urls_survive_being_paths(place: str | Path, url: str) -> None:
    assert place_url(place) == url


def test_places_that_can_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"nonsense://x: .*give a path, or a URL that fsspec knows"):
        storage_for("nonsense://x")
    with pytest.raises(ValueError, match=r"chains file systems.*give the last URL alone"):
        storage_for("simplecache::s3://bucket/x")
    with pytest.raises(ValueError, match="needs a path or a URL, got an empty text"):
        storage_for("")
    for name in ("run*", "run?", "run[12]"):  # a merge into these that failed took run1 along
        with pytest.raises(ValueError, match="would name many places: choose one without"):
            storage_for(f"memory://{name}.zarr")
        assert isinstance(storage_for(f"{name}.zarr"), LocalStorage)

    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("lede.buffers.fsspec_storage.url_to_fs", missing)
    with pytest.raises(ValueError, match=r"Install s3fs to access S3.*pip install 'lede-rl\[s3\]'"):
        storage_for("s3://bucket/x")
    assert isinstance(storage_for("file:///x"), LocalStorage)
    assert storage_for(storage := LocalStorage("x")) is storage
