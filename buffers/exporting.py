"""`lede buffer export`: a store of transitions in the files of others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import tyro

from lede.buffers.new_path import new_path
from lede.buffers.store import Episodes, TransitionStore, open_store

Target = Literal["d3rlpy-h5", "minari"]


@dataclass(frozen=True)
class ExportConfig:
    """Settings of `lede buffer export`."""

    store: tyro.conf.Positional[str]
    """Folder or URL of a store of transitions."""
    to: Target
    """`d3rlpy-h5`: one file for d3rlpy's `ReplayBuffer.load`; `minari`: the folder of a Minari data set."""
    out: Path
    """The file or folder to write, on this machine; must not exist. A Minari folder is called like code-v0."""
    episode: Episodes | None = None
    """What an episode is, a generated `token` or a whole `prompt`; without it, token for d3rlpy, prompt for Minari."""


def export_store(store: TransitionStore, out: Path, to: Target, episode: Episodes | None = None) -> int:
    """Write a store in the files of d3rlpy or Minari; `import_store` gives it back value by value.

    A prompt that EOS ended is a terminated episode, any other a truncated one; a prompt without a decision is none.

    Args:
        store: The store, on disk or in memory.
        out: The file (d3rlpy) or folder (Minari) to write; appears whole or not at all.
        to: Whose files.
        episode: What an episode is; None: `token` for d3rlpy, as in the paper, and `prompt` for Minari.

    Returns:
        Number of episodes.

    Raises:
        ImportError: h5py or minari is not installed.
        ValueError: The store is one of traces, or `out` exists or can't be written.
    """
    if to not in get_args(Target):
        raise ValueError(f"to must be one of {', '.join(get_args(Target))}, got '{to}'")
    if episode is not None and episode not in get_args(Episodes):
        raise ValueError(f"episode must be one of {', '.join(get_args(Episodes))}, got '{episode}'")
    if not isinstance(store, TransitionStore):
        raise ValueError(
            f"{store.path or 'the store'} holds traces, in which nobody decided anything. `lede.buffers.synthesize` "
            "makes transitions of them"
        )
    if to == "minari":
        from lede.buffers.minari_folder import check_name, write_minari_folder

        check_name(out)
        with new_path(out) as folder:
            folder.mkdir()
            return write_minari_folder(folder, out.name, store.settings, store, episode or "prompt")
    from lede.buffers.d3rlpy_file import write_d3rlpy_file

    with new_path(out) as file:
        return write_d3rlpy_file(file, store.settings, store, episode or "token")


def export_buffer(config: ExportConfig) -> None:
    """Export a store and say what was written.

    Raises:
        ValueError: See `export_store`.
    """
    store = open_store(config.store)
    n = export_store(store, config.out, config.to, config.episode)  # type: ignore[arg-type]  # refuses traces itself
    print(f"{n:,} episodes with {store.n_rows:,} decisions written to {config.out}")
