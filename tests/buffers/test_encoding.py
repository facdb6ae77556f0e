"""Arrays as files: byte for byte what zarr makes of them, and read by zarr as they were."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from zarr.buffer import cpu
from zarr.codecs import ZstdCodec
from zarr.storage import MemoryStore

from lede.buffers import encoding
from lede.buffers.columns import Columns
from lede.buffers.encoding import META, decode, encode

LUCK = np.random.default_rng(0)
COLUMNS: Columns = {
    "empty": np.zeros((0, 3), dtype=np.float32),
    "flags": LUCK.random(21) < 0.5,
    "bytes": LUCK.integers(-9, 9, 20).astype(np.int8),
    "whole": LUCK.integers(-9, 9, (10, 2)).astype(np.int32),
    "ids": LUCK.integers(0, 2**40, 7),
    "short": np.arange(11, dtype=np.int16),
    "floats": LUCK.normal(size=(23, 3, 2)).astype(np.float32),
    "wide": np.array([np.nan, -0.0, np.inf]),
    "turned": np.asfortranarray(LUCK.normal(size=(13, 4))),
    "zeros": np.zeros(30, dtype=np.int64),
}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "CHUNK_ROWS", 10)


def by_zarr(columns: Columns) -> dict[str, bytes]:
    files: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(files), zarr_format=3)
    for name, values in columns.items():
        group.create_array(
            name,
            data=values,
            chunks=(max(1, min(10, len(values))), *values.shape[1:]),
            compressors=ZstdCodec(level=3, checksum=True),
            chunk_key_encoding={"name": "default", "separator": "."},
            config={"write_empty_chunks": True},
        )
    return {name: files[name].to_bytes() for name in sorted(files)}


def zarr_says(files: dict[str, bytes], name: str) -> Any:
    """What zarr reads of an array's settings."""
    store = MemoryStore({file: cpu.Buffer.from_bytes(content) for file, content in files.items()})
    return zarr.open_array(store, path=name, mode="r", zarr_format=3).metadata.to_dict()


@pytest.mark.parametrize("name", COLUMNS)
def test_files_are_those_that_zarr_writes(name: str) -> None:
    columns = {name: COLUMNS[name]}
    found, wanted = encode(columns), by_zarr(columns)
    assert list(found) == list(wanted)
    for file in found:
        if file.endswith(META):  # versions of zarr may write the same in another order
            assert json.loads(found[file]).items() <= json.loads(wanted[file]).items()
        else:
            assert found[file] == wanted[file]
    assert zarr_says(found, name) == zarr_says(wanted, name)


def test_columns_come_back_bit_by_bit() -> None:
    found = decode(encode(COLUMNS), list(COLUMNS))
    for name, values in COLUMNS.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape)
        assert found[name].tobytes() == values.tobytes()


def test_the_order_of_bytes_is_that_of_the_file_on_every_machine() -> None:
    values: npt.NDArray[Any] = np.arange(5, dtype=">i4")
    assert encode({"big": values}) == encode({"big": values.astype("<i4")})
