"""HDF5 files on disks that may be full.

The HDF5 library can't close a file that it can't write: it prints pages and takes the process down, so that nothing is
cleared up. Here it never hears of a disk that refuses. From then on what it writes is kept in memory, which is little
as long as whoever fills the file asks now and then whether all is well.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class ForgivingFile(io.RawIOBase):
    """A new file for `h5py.File`, which takes Python's file objects too.

    Args:
        path: The file; made if it isn't there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()
        self._file = path.open("r+b", buffering=0)
        self._at = 0
        self._kept: list[tuple[int, bytes]] = []  # what the disk did not take, with its place
        self._failure: OSError | None = None

    def check(self) -> None:
        """Raise the OSError that the disk refused with, if it did."""
        if self._failure is not None:
            raise OSError(self._failure.errno, self._failure.strerror, str(self._path)) from self._failure

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place from the beginning or from the end."""
        end = 0
        if whence == os.SEEK_END:
            end = max([os.fstat(self._file.fileno()).st_size, *(at + len(part) for at, part in self._kept)])
        self._at = end + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, with zeros where nothing was written."""
        buffer = memoryview(buffer)
        self._file.seek(self._at)
        got = self._file.readinto(buffer)
        buffer[got:] = bytes(len(buffer) - got)
        for at, part in self._kept:
            start, end = max(at, self._at), min(at + len(part), self._at + len(buffer))
            if start < end:
                buffer[start - self._at : end - self._at] = part[start - at : end - at]
        return len(buffer)

    def write(self, content: Any) -> int:
        """Write everything, or keep it."""
        content = memoryview(content)
        if self._failure is None:
            try:
                self._file.seek(self._at)
                rest = content
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError as error:
                self._failure = error
        if self._failure is not None:
            self._kept.append((self._at, bytes(content)))
        self._at += len(content)
        return len(content)

    def truncate(self, size: int | None = None) -> int:
        """Set the file's size."""
        size = self._at if size is None else size
        if self._failure is None:
            try:
                self._file.truncate(size)
            except OSError as error:
                self._failure = error
        return size

    def close(self) -> None:
        """Close the file; every write went to the system at once."""
        self._file.close()
        super().close()


@contextmanager
def forgiving_file(path: Path) -> Iterator[ForgivingFile]:
    """A `ForgivingFile` that is closed behind the block.

    Raises:
        OSError: The disk refused.
    """
    file = ForgivingFile(path)
    try:
        yield file
    finally:
        file.close()
    file.check()
