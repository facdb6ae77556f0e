"""Stores behind fsspec URLs: objects of a bucket, or files of another file system."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import fsspec
from fsspec.core import url_to_fs

from lede.buffers.storage import State

T = TypeVar("T")

_PATTERNS = "*?["  # what fsspec takes for patterns when it reads and removes

_PACKAGES = {"s3": "'lede-rl[s3]'", "s3a": "'lede-rl[s3]'"}


class FsspecStorage:
    """Files below a URL. On an object store every file is one object and `publish` is one PUT of it.

    Options of a file system (endpoints, keys) come from its own environment variables or from fsspec's configuration.

    Args:
        url: The folder's URL.

    Raises:
        ValueError: The scheme is unknown, its package is not installed, or the URL would be taken for a pattern.
    """

    is_local = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if any(sign in self.url for sign in _PATTERNS):  # which removed every place that it matches
            raise ValueError(f"{self.url} would name many places: choose one without {' '.join(_PATTERNS)}")
        try:
            fs, root = url_to_fs(self.url)
        except ImportError as error:
            scheme = self.url.split("://")[0]
            package = _PACKAGES.get(scheme, f"the package of fsspec for {scheme}://")
            raise ValueError(f"{self.url} needs a package that is not here ({error}): pip install {package}") from error
        except ValueError as error:
            raise ValueError(f"{self.url}: {error}; give a path, or a URL that fsspec knows") from error
        self._fs: Any = fs
        self._root = str(root).rstrip("/")

    def state(self) -> State:
        """Whether there is nothing, a file or a folder with files below it."""
        if self.size("") is not None:
            return "file"
        return "folder" if self.names() else "absent"

    def names(self, folder: str = "") -> list[str]:
        """Names directly in a folder."""
        path = self._path(folder)
        found: list[Any] = self._fresh(lambda: self._fs.ls(path, detail=False), default=[])
        names = {str(name).rstrip("/").removeprefix(f"{path}/") for name in found}
        return sorted(name for name in names if name and name != path)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Sizes of all files below a folder."""
        path = self._path(folder)
        found: dict[str, Any] = self._fresh(lambda: self._fs.find(path, detail=True), default={})
        return {
            name.removeprefix(f"{path}/"): int(entry["size"])
            for name, entry in sorted(found.items())
            if entry["type"] == "file"
        }

    def size(self, name: str) -> int | None:
        """Size of a file."""
        entry: dict[str, Any] | None = self._fresh(lambda: self._fs.info(self._path(name)), default=None)
        return int(entry["size"]) if entry is not None and entry["type"] == "file" else None

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Contents of files, fetched at once where the file system can."""
        names = list(names)
        if not names:
            return {}
        contents = self._call(lambda: self._fs.cat([self._path(name) for name in names]))
        return {name: bytes(contents[self._path(name)]) for name in names}

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files, at once where the file system can."""
        if files:
            self._call(lambda: self._fs.pipe({self._path(name): content for name, content in files.items()}))

    def publish(self, name: str, content: bytes) -> None:
        """Put one object."""
        self._call(lambda: self._fs.pipe_file(self._path(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Put one object, on the condition that there is none where the file system knows conditions."""
        if self.size(name) is not None:
            return False
        with suppress(OSError):  # refused, or conditions are unknown there
            self._call(lambda: self._fs.pipe_file(self._path(name), content, mode="create"))
            return True
        if self.size(name) is not None:
            return False
        self.publish(name, content)
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Remove files."""
        for path in map(self._path, names):
            with suppress(FileNotFoundError):
                self._call(partial(self._fs.rm_file, path))

    def remove_folder(self, folder: str) -> None:
        """Remove all files below a folder."""
        with suppress(FileNotFoundError):
            self._call(lambda: self._fs.rm(self._path(folder), recursive=True))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _fresh(self, look: Callable[[], T], default: T) -> T:
        """Look without what was listed before; the default where there is nothing."""
        self._fs.invalidate_cache()
        try:
            return self._call(look)
        except (FileNotFoundError, NotADirectoryError):
            return default

    def _call(self, operation: Callable[[], T]) -> T:
        """Run an operation; whatever the file system raises comes out as OSError."""
        try:
            return operation()
        except OSError:
            raise
        except Exception as error:  # clients of object stores have exception classes of their own
            raise OSError(f"{self.url}: {type(error).__name__}: {error}") from error


def local_path(url: str) -> str:
    """The path that a `file://` URL names."""
    return str(fsspec.filesystem("file")._strip_protocol(url))
