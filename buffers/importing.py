"""`lede buffer import`: a store back from what `lede buffer export` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro

from lede.buffers.records import PromptRollout, StoreError
from lede.buffers.settings import StoreSettings
from lede.buffers.whole_store import write_whole_store


@dataclass(frozen=True)
class ImportConfig:
    """Settings of `lede buffer import`."""

    source: tyro.conf.Positional[Path]
    """File of d3rlpy, or folder of a Minari data set, that `lede buffer export` wrote."""
    out: str
    """Folder or URL of the store to make; must not exist."""


def import_store(source: Path, out: str) -> int:
    """Make a store of an exported file or folder.

    Observations, actions and rewards are taken from the episodes as they are now; the rest is as it was exported.

    Args:
        source: What `export_store` wrote.
        out: Folder or URL of the store; appears whole or not at all.

    Returns:
        Number of prompts.

    Raises:
        ImportError: h5py or minari is not installed.
        StoreError: The source was not exported from a store, was changed since in its episodes' number, lengths or
            ends, or is from a newer lede.
        ValueError: Something is at `out` already.
    """
    with _open(source) as (settings, rollouts):
        return write_whole_store(out, settings, rollouts)


def import_buffer(config: ImportConfig) -> None:
    """Import a store and say what was written.

    Raises:
        ValueError: See `import_store`.
    """
    print(f"{import_store(config.source, config.out):,} prompts written to {config.out}")


@contextmanager
def _open(source: Path) -> Iterator[tuple[StoreSettings, Iterator[PromptRollout]]]:
    import h5py

    if not source.exists():
        raise StoreError(f"there is nothing at {source}")
    if source.is_dir():
        from lede.buffers.minari_folder import open_companion, read_minari_folder

        with open_companion(source) as companion:
            yield read_minari_folder(source, companion)
        return
    from lede.buffers.d3rlpy_file import read_d3rlpy_file

    try:
        file = h5py.File(source, "r")
    except OSError as error:
        raise StoreError(f"{source} is no HDF5 file: {error}") from error
    with file:
        yield read_d3rlpy_file(file, str(source))
