"""Columns as the files of zarr arrays, and back; in memory, so that a store's files are read and written as bytes.

Written without zarr, which takes a millisecond for each array, most of a commit; tests hold every byte against it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from numcodecs.zstd import Zstd
from zarr.buffer import cpu
from zarr.storage import MemoryStore

from lede.buffers.columns import Columns

CHUNK_ROWS = 16384
"""Most rows of a chunk, in every array."""

META = "zarr.json"
"""The file that says what a folder of zarr is."""

_ZSTD = {"level": 3, "checksum": True}


def encode(columns: Columns) -> dict[str, bytes]:
    """The files of a zarr v3 group with one array a column, by name.

    Every array is written once, with all its rows, in chunks of `CHUNK_ROWS` rows (of all its rows, if they are fewer);
    chunks of zeros are written like others.
    """
    files = {META: _json({"attributes": {}, "zarr_format": 3, "node_type": "group"})}
    for column, values in columns.items():
        rows = max(1, min(CHUNK_ROWS, len(values)))
        files[f"{column}/{META}"] = _json(_array(values, rows))
        for number, chunk in enumerate(_chunks(values, rows)):
            name = ".".join(map(str, (number, *[0] * (values.ndim - 1))))  # no folders to sync below the array's
            files[f"{column}/c.{name}"] = bytes(Zstd(**_ZSTD).encode(chunk))
    return {name: files[name] for name in sorted(files)}


def _chunks(values: npt.NDArray[Any], rows: int) -> Iterator[npt.NDArray[Any]]:
    """Parts of an array along its first axis, the last filled up with zeros."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    for start in range(0, len(little), rows):
        part = little[start : start + rows]
        missing = np.zeros((rows - len(part), *part.shape[1:]), dtype=part.dtype)
        yield np.concatenate([part, missing]) if len(missing) else part


def _array(values: npt.NDArray[Any], rows: int) -> dict[str, Any]:
    """What zarr says of an array in chunks of so many rows."""
    dtype = values.dtype
    wide = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    return {
        "shape": values.shape,
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": (rows, *values.shape[1:])}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": dtype.type(0).item(),
        "codecs": [{"name": "bytes", **wide}, {"name": "zstd", "configuration": _ZSTD}],
        "attributes": {},
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _json(entries: Mapping[str, Any]) -> bytes:
    return json.dumps(entries, indent=2).encode()


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
