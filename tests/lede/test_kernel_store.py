"""Kernels on disk: code and note together, whoever writes, and nothing half-written."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from lede.kernel_store import (
    CODE,
    FOLDER_VARIABLE,
    NOTE,
    RUBBISH_AGE,
    KernelNote,
    code_digest,
    kernel_key,
    make_folder,
    maker,
    makers_of,
    new_kernel,
    note_of,
    package_of,
    put_in_place,
    source_digest,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def write(partial: Path, key: str, code: bytes, seconds: float = 1.5, made_by: str = "") -> KernelNote:
    """Put a kernel with such code in place."""
    (partial / CODE).write_bytes(code)
    digest = code_digest(partial / CODE)
    note = KernelNote("a layer", True, seconds, digest, source_digest("source"), made_by or maker())
    put_in_place(partial, key, note)
    return note


def test_a_kernel_appears_whole(folder: Path) -> None:
    key = kernel_key("source", "inputs")
    assert key != kernel_key("source", "other inputs")
    with new_kernel(key) as partial:
        (partial / CODE).write_bytes(b"code")
        assert note_of(key) is None
        note = write(partial, key, b"code")
    assert note_of(key) == note
    assert [file.name for file in folder.iterdir()] == [key]
    with contextlib.suppress(KeyboardInterrupt), new_kernel(kernel_key("another")) as partial:
        (partial / CODE).write_bytes(b"half")
        raise KeyboardInterrupt
    assert [file.name for file in folder.iterdir()] == [key]


def test_what_is_damaged_is_not_there_and_made_again() -> None:
    key = kernel_key("source")
    with new_kernel(key) as partial:
        write(partial, key, b"code")
    package_of(key).write_bytes(b"coda")
    assert note_of(key) is None, "torch would load what is damaged"
    with new_kernel(key) as partial:
        write(partial, key, b"code")
    assert note_of(key) is not None
    package_of(key).unlink()
    assert note_of(key) is None
    (package_of(key).parent / NOTE).write_text("{")
    assert note_of(key) is None
    with new_kernel(key) as partial:
        assert write(partial, key, b"code") == note_of(key)


def test_of_two_that_compile_the_same_the_first_stays(folder: Path) -> None:
    """Their code may differ by a few bytes; a note never stands beside another's."""
    key = kernel_key("source")
    with new_kernel(key) as one, new_kernel(key) as other:
        first = write(one, key, b"one", seconds=1.0)
        assert note_of(key) == first
        write(other, key, b"other", seconds=2.0)
        assert note_of(key) == first
        assert package_of(key).read_bytes() == b"one"
    assert [file.name for file in folder.iterdir()] == [key]


@pytest.mark.parametrize("is_file", [True, False])
def test_what_is_in_the_way_is_put_aside(folder: Path, is_file: bool) -> None:
    key = kernel_key("source")
    if is_file:
        (folder / key).write_text("no kernel")
    else:
        (folder / key).mkdir()
        (folder / key / "anything").touch()
    with new_kernel(key) as partial:
        assert write(partial, key, b"code") == note_of(key)
    assert [file.name for file in folder.iterdir()] == [key]


def test_a_full_disk_is_told_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = kernel_key("source")

    def full(self: Path, *args: object, **settings: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"), new_kernel(key) as partial:
        write(partial, key, b"code")
    assert not list(folder.iterdir())


def test_what_killed_compilers_leave_goes_after_a_day(folder: Path) -> None:
    left, busy, kernel = (folder / name for name in (".a.1.partial", ".b.2.partial", "kernel"))
    for each in (left, busy, kernel):
        each.mkdir()
        (each / CODE).write_bytes(b"half")
    long_ago = busy.stat().st_mtime - RUBBISH_AGE - 60
    for each in (left, kernel):
        os.utime(each, (long_ago, long_ago))
    make_folder()
    assert sorted(folder.iterdir()) == [busy, kernel]


def test_it_is_known_who_made_the_kernels_of_a_source() -> None:
    for number, made_by in enumerate(("torch 2.11, 1 thread", "torch 2.11, 2 threads", "torch 2.11, 1 thread")):
        key = kernel_key("source", str(number))
        with new_kernel(key) as partial:
            write(partial, key, b"code", made_by=made_by)
    (package_of("broken").parent).mkdir()
    assert makers_of({source_digest("source")}) == ["torch 2.11, 1 thread", "torch 2.11, 2 threads"]
    assert makers_of({source_digest("another")}) == []
