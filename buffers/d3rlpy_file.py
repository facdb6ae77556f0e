"""A store of transitions as one HDF5 file that `d3rlpy.dataset.ReplayBuffer.load` reads, and back.

The layout is d3rlpy 2.8's (version 2.1): datasets `observations_i`, `actions_i`, `rewards_i`, `terminated_i` of episode
i, their names in `columns`, their number in `num_episodes`. What it has no place for lies in the group of
`lede.buffers.companion`, which d3rlpy passes over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lede.buffers.companion import CompanionReader, CompanionWriter, ForeignEpisode, blocks
from lede.buffers.episode_cut import Cut, cut_episodes
from lede.buffers.hdf5_file import forgiving_file
from lede.buffers.records import PromptRollout, StoreError
from lede.buffers.settings import StoreSettings
from lede.buffers.store import Episodes

if TYPE_CHECKING:
    import h5py

VERSION = "2.1"
"""Version of d3rlpy's layout."""

_COLUMNS = ("observations", "actions", "rewards", "terminated")


def write_d3rlpy_file(path: Path, settings: StoreSettings, rollouts: Iterable[PromptRollout], episode: Episodes) -> int:
    """Write rollouts as a file of d3rlpy.

    A truncated episode ends with a row that holds the state after the last decision, with action and reward 0: d3rlpy
    begins no transition there, and without it the last reward would never count.

    Args:
        path: The file; must not exist.
        settings: Settings of the store.
        rollouts: Its prompts.
        episode: How they are cut.

    Returns:
        Number of episodes.

    Raises:
        OSError: The disk refused.
    """
    import h5py

    n = 0
    with forgiving_file(path) as disk, h5py.File(disk, "w") as file:
        companion = CompanionWriter(file, settings, episode)
        for block in blocks(rollouts):
            disk.check()
            companion.add(block)
            for rollout in block:
                for cut in cut_episodes(rollout.token_end, rollout.ended_by_eos, episode):
                    _write(file, n, rollout, cut)
                    n += 1
        file.create_dataset("columns", data=list(_COLUMNS))
        file.create_dataset("num_episodes", data=n)
        file.create_dataset("version", data=VERSION)
    return n


def read_d3rlpy_file(file: h5py.File, where: str) -> tuple[StoreSettings, Iterator[PromptRollout]]:
    """Settings and rollouts of a file of d3rlpy; the file must stay open while they are read.

    Raises:
        StoreError: The file is no such file, or of another version, or was changed after its export.
    """
    version = file.get("version")
    found = None if version is None else version.asstr()[()]
    if found != VERSION:
        raise StoreError(
            f"{where} is no file of d3rlpy in version {VERSION}, its version is {found}: write it with "
            "`lede buffer export`"
        )
    reader = CompanionReader(file, where)
    return reader.settings, reader.rollouts(_episodes(file, where))


def _write(file: h5py.File, i: int, rollout: PromptRollout, cut: Cut) -> None:
    observations = rollout.observations[cut.rows]
    actions = rollout.actions[cut.rows].astype(np.int32)[:, None]
    rewards = rollout.rewards[cut.rows, None]
    if not cut.terminated:
        observations = np.concatenate([observations, rollout.final_observation[None]])
        actions = np.concatenate([actions, np.zeros((1, 1), dtype=np.int32)])
        rewards = np.concatenate([rewards, np.zeros((1, 1), dtype=np.float32)])
    for name, values in zip(_COLUMNS, (observations, actions, rewards, cut.terminated), strict=True):
        file.create_dataset(f"{name}_{i}", data=values)


def _episodes(file: h5py.File, where: str) -> Iterator[ForeignEpisode]:
    for i in range(int(file["num_episodes"][()])):
        try:
            observations, actions, rewards, terminated = (file[f"{name}_{i}"][()] for name in _COLUMNS)
        except (KeyError, OSError) as error:
            raise StoreError(f"{where}: episode {i} can't be read: {error}") from error
        rows: Any = slice(None) if terminated else slice(-1)
        yield ForeignEpisode(
            observations[rows],
            actions[rows, 0],
            rewards[rows, 0],
            bool(terminated),
            None if terminated else observations[-1],
        )
