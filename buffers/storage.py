"""Where the files of a store lie: a local folder, or anything that fsspec has a URL for.

Everything that reads or writes a store goes through this protocol, so a store behaves alike in every place and one test
can fail every operation there is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Literal, Protocol, runtime_checkable

State = Literal["absent", "file", "folder"]


@runtime_checkable
class Storage(Protocol):
    """The files below one folder. Names are relative to it, with `/` between parts; `""` is the folder itself.

    Every method raises OSError when the place refuses (disk full, no permission, no connection).
    """

    url: str
    """The folder as `storage_for` takes it: a path, or a URL."""
    is_local: bool
    """Whether this is a folder of this machine, where a failed operation has certainly changed nothing later."""

    def state(self) -> State:
        """What is there. An object store has no empty folders: a folder without files is absent."""

    def names(self, folder: str = "") -> list[str]:
        """Names of the files and folders directly in a folder, ascending; none where it is absent."""

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Size in bytes of every file below a folder, by its path within it; none where it is absent."""

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None where it is absent."""

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Contents of files by name.

        Raises:
            FileNotFoundError: One is absent.
        """

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files; durable on return. Until then, or after an error, any part of them may be there."""

    def publish(self, name: str, content: bytes) -> None:
        """Write one file so that everyone, at any moment and after any crash, finds all of it or nothing of it."""

    def create(self, name: str, content: bytes) -> bool:
        """`publish` a file unless there is one already; whether it was this call that made it."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that are absent are passed over."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and all below it, if there."""


Place = str | os.PathLike[str] | Storage
"""A store's place: a path, a URL (`file://`, `memory://`, `s3://`, or another scheme of fsspec), or its storage."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+")  # two letters or more, so that C:\ is no scheme
_LOCAL = ("file", "local")


def storage_for(place: Place) -> Storage:
    """The storage behind a path or a URL; touches nothing.

    A `pathlib.Path` made from a URL, which has lost a slash, is understood as the URL.

    Raises:
        ValueError: The scheme is unknown, its package is not installed, or the URL is a chain.
    """
    if isinstance(place, Storage):
        return place
    from lede.buffers.local_storage import LocalStorage

    url = place_url(place)
    scheme = url.split("://")[0] if "://" in url else ""
    if not scheme:
        return LocalStorage(url)
    from lede.buffers.fsspec_storage import FsspecStorage, local_path

    return LocalStorage(local_path(url)) if scheme in _LOCAL else FsspecStorage(url)


def place_url(place: Place) -> str:
    """A store's place as text that `storage_for` takes.

    Raises:
        ValueError: The URL is a chain such as `simplecache::s3://...`, whose parts keep files at their own times.
    """
    if isinstance(place, Storage):
        return place.url
    text = os.fspath(place)
    if not text:
        raise ValueError("a store needs a path or a URL, got an empty text")
    if "::" in text and "://" in text:
        raise ValueError(f"{text} chains file systems, a store is written to one: give the last URL alone")
    found = _URL.match(text)
    if found is None or (not isinstance(place, PurePath) and "://" not in found.group()):
        return text
    scheme = found.group().split(":")[0].lower()
    rest = text[found.end() :]
    return f"{scheme}:///{rest}" if scheme in _LOCAL or found.group().endswith(":///") else f"{scheme}://{rest}"
