"""Episodes of d3rlpy that are cut from transitions when somebody asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from lede.quiet_d3rlpy import import_d3rlpy
from lede.transitions import Transitions

import_d3rlpy()  # before its names are imported: without this it prints, and changes torch's settings

from d3rlpy.dataset import Episode  # noqa: E402  # only after import_d3rlpy


class EpisodeRows(Episode):  # type: ignore[misc]  # d3rlpy's own types are not read
    """An episode that knows its rows; a truncated one has a closing row, at which no transition starts.

    Args:
        transitions: Where the rows are.
        first_row: First decision.
        end_row: One past the last decision.
    """

    def __init__(self, transitions: Transitions, first_row: int, end_row: int) -> None:
        terminated = bool(transitions.terminated[end_row - 1])
        observations = transitions.observations[first_row:end_row]
        actions = transitions.actions[first_row:end_row, None].astype(np.int32)
        rewards = transitions.rewards[first_row:end_row, None]
        if not terminated:
            closing = transitions.observations[transitions.next_row[end_row - 1]]
            observations = np.concatenate([observations, closing[None]])
            actions = np.concatenate([actions, np.zeros_like(actions[:1])])
            rewards = np.concatenate([rewards, np.zeros_like(rewards[:1])])
        super().__init__(observations, actions, rewards, terminated)
        object.__setattr__(self, "transitions", transitions)  # d3rlpy's episodes are frozen
        object.__setattr__(self, "first_row", first_row)


class Episodes(Sequence[EpisodeRows]):
    """The episodes of transitions, in order; none is kept.

    Args:
        transitions: Decisions, one below the other.
    """

    def __init__(self, transitions: Transitions) -> None:
        self.transitions = transitions
        self._ends = np.flatnonzero(transitions.episode_end) + 1

    def __len__(self) -> int:
        return self._ends.size

    @overload
    def __getitem__(self, place: int) -> EpisodeRows: ...
    @overload
    def __getitem__(self, place: slice) -> list[EpisodeRows]: ...
    def __getitem__(self, place: int | slice) -> EpisodeRows | list[EpisodeRows]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        i = range(len(self))[place]  # negative places, and IndexError beyond
        return EpisodeRows(self.transitions, int(self._ends[i - 1]) if i else 0, int(self._ends[i]))
