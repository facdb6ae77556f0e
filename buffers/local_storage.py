"""Stores in folders of this machine."""

from __future__ import annotations

import errno
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from lede.atomic import sync_folder
from lede.buffers.storage import State

T = TypeVar("T")

_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, getattr(errno, "ENOTSUP", errno.EOPNOTSUPP)}
_BINARY = getattr(os, "O_BINARY", 0)  # Windows

SYNC_THREADS = 8
"""Files that are synced at a time. A journal takes them together: on ext4, the 34 files and 19 folders of a shard of
transitions take 250 ms one after another and 30 ms by eight."""

OPEN_FILES = 128
"""Files that are open at a time, all of them written and then all synced. Each written and synced in turn, by as many
threads, they took up to three times as long: a journal takes together what is there when it is asked."""

PARTIAL = ".partial"
"""Ending of files that are being written, or that a crash left half-written. Their names start with a dot."""


class LocalStorage:
    """A folder. What `write` and `publish` have written survives a crash of the machine: files and folders are synced.

    Args:
        root: The folder; made when something is first written.
    """

    is_local = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.url = os.fspath(root)
        self.root = Path(root)

    def state(self) -> State:
        """Whether there is nothing, a file or a folder."""
        if self.root.is_dir():
            return "folder"
        return "file" if self.root.exists() else "absent"

    def names(self, folder: str = "") -> list[str]:
        """Names directly in a folder, hidden ones too."""
        try:
            return sorted(os.listdir(self.root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Sizes of all files below a folder."""
        return dict(sorted(_walk(str(self.root / folder), "")))

    def size(self, name: str) -> int | None:
        """Size of a file."""
        path = self.root / name
        try:
            return path.stat().st_size if path.is_file() else None
        except FileNotFoundError:
            return None

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Contents of files."""
        return {name: (self.root / name).read_bytes() for name in names}

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files under their own names, then sync them and the folders that name them."""
        paths = {self.root / name: content for name, content in files.items()}
        folders = {path.parent for path in paths}
        unsynced = folders.union(*map(self._make_folder, sorted(folders)))
        contents = list(paths.items())
        for start in range(0, len(contents), OPEN_FILES):
            _put(dict(contents[start : start + OPEN_FILES]))
        _together(sync_folder, sorted(unsynced))

    def publish(self, name: str, content: bytes) -> None:
        """Write a hidden file, sync it, rename it, sync its folder."""
        path = self.root / name
        with self._beside(path, content) as temporary:
            os.replace(temporary, path)
        sync_folder(path.parent)

    def create(self, name: str, content: bytes) -> bool:
        """Write a hidden file, sync it, link it to its name unless that is taken, sync its folder."""
        path = self.root / name
        if path.exists():
            return False
        with self._beside(path, content) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:  # a file system without links
                if error.errno not in _NO_LINKS:
                    raise
                if path.exists():
                    return False
                os.replace(temporary, path)
        sync_folder(path.parent)
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, then sync the folders that named them."""
        folders = set()
        for name in names:
            path = self.root / name
            with suppress(FileNotFoundError):
                os.unlink(path)
                folders.add(path.parent)
        for folder in sorted(folders):
            sync_folder(folder)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and all below it."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.root / folder)

    def _make_folder(self, folder: Path) -> set[Path]:
        """Make a folder and those above it; the folders that got a new name."""
        if folder.is_dir():
            return set()
        changed = self._make_folder(folder.parent)
        with suppress(FileExistsError):  # another writer was faster
            os.mkdir(folder)
        return changed | {folder.parent}

    def _beside(self, path: Path, content: bytes) -> _Temporary:
        for folder in sorted(self._make_folder(path.parent), reverse=True):
            sync_folder(folder)
        return _Temporary(path.with_name(f".{path.name}.{uuid4().hex}{PARTIAL}"), content)


class _Temporary:
    """A file that is there within a `with` block, synced, and gone afterwards."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content

    def __enter__(self) -> Path:
        try:
            _put({self._path: self._content})
        except BaseException:
            self.__exit__()
            raise
        return self._path

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # already renamed; or what went wrong before is what counts
            os.unlink(self._path)


def _together(work: Callable[[T], None], items: Sequence[T]) -> None:
    """Do something with several items at a time; raises what one that failed raised, when all threads have ended."""
    n_threads = max(1, min(SYNC_THREADS, len(items)))

    def share(first: int) -> None:
        for item in items[first::n_threads]:
            work(item)

    if n_threads == 1:
        return share(0)
    with ThreadPoolExecutor(n_threads) as pool:
        deque(pool.map(share, range(n_threads)), maxlen=0)


def _put(files: Mapping[Path, bytes]) -> None:
    """Write files, then sync them all."""
    with ExitStack() as closing:
        handles = []
        for path, content in files.items():
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _BINARY, 0o666)
            closing.callback(os.close, handle)
            handles.append(handle)
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(handle, rest) :]
        _together(os.fsync, handles)


def _walk(folder: str, prefix: str) -> Iterator[tuple[str, int]]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        name = prefix + entry.name
        if entry.is_dir():
            yield from _walk(entry.path, f"{name}/")
        else:
            with suppress(FileNotFoundError):  # a temporary file of a writer at work
                yield name, entry.stat().st_size
