"""What the files of d3rlpy and Minari have no place for, kept beside their episodes so that nothing is lost.

d3rlpy and Minari hold observations, actions, rewards and ends. The rest of a store (settings, texts, prompts without a
decision, layers, matches) lies in an HDF5 group of its own as the columns of `lede.buffers.columns`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np
import numpy.typing as npt

from lede.buffers.columns import LENGTHS, Columns, prompt_columns, row_columns, stack, unstack
from lede.buffers.episode_cut import Cut, cut_episodes
from lede.buffers.records import PromptRollout, StoreError
from lede.buffers.settings import StoreSettings
from lede.buffers.store import Episodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import h5py

GROUP = "lede"
"""Name of the group."""

BLOCK_PROMPTS = 256
"""Prompts that are in memory at a time."""

_IN_EPISODES = ("observations", "actions", "rewards")
_CHUNK_ROWS = 16384


@dataclass(frozen=True)
class ForeignEpisode:
    """An episode as d3rlpy or Minari hold it."""

    observations: npt.NDArray[np.float32]  # (decision, feature)
    """State before each decision."""
    actions: npt.NDArray[np.int8]  # (decision,)
    """0 = continue, 1 = exit."""
    rewards: npt.NDArray[np.float32]  # (decision,)
    """What each decision earned."""
    terminated: bool
    """Whether it ended for good; otherwise it was truncated."""
    closing: npt.NDArray[np.float32] | None  # (feature,)
    """State after the last decision, where the file holds it."""


def blocks(rollouts: Iterable[PromptRollout]) -> Iterator[list[PromptRollout]]:
    """Lists of up to `BLOCK_PROMPTS` rollouts, in order."""
    source = iter(rollouts)
    while block := list(islice(source, BLOCK_PROMPTS)):
        yield block


class CompanionWriter:
    """Writes the group.

    Args:
        file: The open HDF5 file; must not have the group.
        settings: Settings of the store.
        episode: How the episodes are cut.
    """

    def __init__(self, file: h5py.File, settings: StoreSettings, episode: Episodes) -> None:
        self._settings = settings
        self._group = file.create_group(GROUP)
        self._group.create_dataset("settings", data=json.dumps(settings.to_json()))
        self._group.create_dataset("episode", data=episode)
        for name, values in stack([], settings).items():  # also of a store without prompts
            if name not in _IN_EPISODES:
                shape = values.shape[1:]
                chunk = (_CHUNK_ROWS, *shape)
                self._group.create_dataset(name, values.shape, values.dtype, maxshape=(None, *shape), chunks=chunk)

    def add(self, rollouts: Sequence[PromptRollout]) -> None:
        """Append prompts."""
        for name, values in stack(rollouts, self._settings).items():
            if name in _IN_EPISODES:
                continue
            dataset = self._group[name]
            start = len(dataset)
            dataset.resize(start + len(values), axis=0)
            dataset[start:] = values


class CompanionReader:
    """Reads the group, and puts its prompts together with the episodes.

    Args:
        file: The open HDF5 file.
        where: Its path, for messages.

    Raises:
        StoreError: The group is missing, damaged, or from a newer lede.
    """

    def __init__(self, file: h5py.File, where: str) -> None:
        self.where = where
        group = file.get(GROUP)
        if group is None:
            raise StoreError(
                f"{where} holds no group '{GROUP}', so it was not written by `lede buffer export`: which model, "
                "layers and texts its rows belong to is not known, and a store can't be made of it"
            )
        try:
            settings = json.loads(group["settings"][()])
            episode = group["episode"][()].decode()
        except (KeyError, ValueError, AttributeError) as error:
            raise StoreError(f"{where}: group '{GROUP}' is damaged: {error}") from error
        if episode not in get_args(Episodes):
            raise StoreError(f"{where}: group '{GROUP}' is damaged: episodes of kind '{episode}'")
        self.settings = StoreSettings.from_json(settings, where)
        self.episode = cast("Episodes", episode)
        if self.settings.kind != "transitions":
            raise StoreError(f"{where}: group '{GROUP}' is damaged: a store of {self.settings.kind} has no episodes")
        self._of_prompts = tuple(prompt_columns(self.settings))
        names = [*self._of_prompts, "prompt_ids", "token_ids", *row_columns(self.settings)]
        self._columns: dict[str, Any] = {name: group.get(name) for name in names if name not in _IN_EPISODES}
        missing = [name for name, column in self._columns.items() if column is None]
        if missing:
            raise StoreError(f"{where}: group '{GROUP}' lacks {', '.join(missing)}")

    def rollouts(self, episodes: Iterator[ForeignEpisode]) -> Iterator[PromptRollout]:
        """The prompts, in the order in which they were written.

        Args:
            episodes: The file's episodes in order.

        Raises:
            StoreError: The episodes are not those that were exported: other counts, lengths or ends.
        """
        numbered = enumerate(episodes)
        place = dict.fromkeys(self._columns, 0)
        for _ in range(0, len(self._columns["prompt_index"]), BLOCK_PROMPTS):
            columns: Columns = {}
            for name in (*self._of_prompts, *(name for name in self._columns if name not in self._of_prompts)):
                lengths = LENGTHS.get(name, LENGTHS["rows"])
                n = BLOCK_PROMPTS if name in self._of_prompts else int(columns[lengths].sum())
                columns[name] = self._columns[name][place[name] : place[name] + n]
                place[name] += n
            self._fill(columns, numbered)
            for record in unstack(columns, self.settings, self.where):
                assert isinstance(record, PromptRollout)
                yield record
        more = next(numbered, None)
        if more is not None:
            raise StoreError(f"{self.where} holds more than the {more[0]} episodes that were exported: it was changed")

    def _fill(self, columns: Columns, numbered: Iterator[tuple[int, ForeignEpisode]]) -> None:
        """Add what the episodes hold to the columns of some prompts."""
        taken: list[ForeignEpisode] = []
        ends = np.cumsum(columns["row_count"], dtype=np.int64).tolist()
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            for cut in cut_episodes(columns["token_end"][start:end], bool(columns["ended_by_eos"][i]), self.episode):
                taken.append(self._take(cut, numbered))
                if self.episode == "prompt" and taken[-1].closing is not None:
                    columns["final_observation"][i] = taken[-1].closing
        for name in _IN_EPISODES:
            dtype, shape = row_columns(self.settings)[name]
            parts = [np.asarray(getattr(episode, name), dtype=dtype).reshape(-1, *shape) for episode in taken]
            columns[name] = np.concatenate(parts) if parts else np.zeros((0, *shape), dtype=dtype)

    def _take(self, cut: Cut, numbered: Iterator[tuple[int, ForeignEpisode]]) -> ForeignEpisode:
        number, episode = next(numbered, (0, None))
        if episode is None:
            raise StoreError(f"{self.where} holds fewer episodes than were exported: it was changed")
        got, wanted = len(episode.rewards), cut.end - cut.start
        if (got, episode.terminated) != (wanted, cut.terminated):
            ends = {True: "terminated", False: "truncated"}
            raise StoreError(
                f"{self.where}: episode {number} has {got} decisions and is {ends[episode.terminated]}, exported were "
                f"{wanted} and {ends[cut.terminated]}: it was changed"
            )
        return episode
