"""Columns as the files of zarr arrays, and back; in memory, so that a store's files are read and written as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import numpy as np
import zarr
from zarr.abc.buffer import Buffer
from zarr.buffer import cpu
from zarr.codecs import ZstdCodec
from zarr.storage import MemoryStore

from lede.buffers.columns import Columns

CHUNK_ROWS = 16384
"""Most rows of a chunk, in every array."""


def encode(columns: Columns) -> dict[str, bytes]:
    """The files of a zarr v3 group with one array a column, by name.

    Every array is written once, with all its rows, in chunks of `CHUNK_ROWS` rows (of all its rows, if they are fewer);
    chunks of zeros are written like others.
    """
    files: dict[str, Buffer] = {}
    group = zarr.create_group(MemoryStore(files), zarr_format=3)
    for column, values in columns.items():
        group.create_array(
            column,
            data=values,
            chunks=(max(1, min(CHUNK_ROWS, len(values))), *values.shape[1:]),
            compressors=ZstdCodec(level=3, checksum=True),
            chunk_key_encoding={"name": "default", "separator": "."},  # no folders to sync below the array's
            config={"write_empty_chunks": True},
        )
    return {name: files[name].to_bytes() for name in sorted(files)}


def decode(files: Mapping[str, bytes], names: Iterable[str]) -> Columns:
    """Columns out of the files that `encode` gave.

    Args:
        files: Files by name; those of other columns may be left out.
        names: Columns to read.

    Raises:
        ValueError: A column's files are missing or damaged; the message names it.
    """
    store = MemoryStore({name: cpu.Buffer.from_bytes(content) for name, content in files.items()}, read_only=True)
    columns: Columns = {}
    for name in names:
        try:
            array = zarr.open_array(store, path=name, mode="r", zarr_format=3)
            wanted = prod(-(-rows // chunk) for rows, chunk in zip(array.shape, array.chunks, strict=True))
            got = sum(file.startswith(f"{name}/c") for file in files)
            if got != wanted:  # zarr reads a missing chunk as zeros
                raise ValueError(f"{got} chunks of {wanted} are there")
            columns[name] = np.asarray(array[...])
        except Exception as error:  # whatever a codec or zarr raises on damaged bytes
            raise ValueError(f"array '{name}' can't be read: {error}") from error
    return columns
