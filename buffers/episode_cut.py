"""Where the episodes of a rollout begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from lede.buffers.store import Episodes


@dataclass(frozen=True)
class Cut:
    """One episode: a range of a rollout's decisions, never empty."""

    start: int
    """Row of the first decision."""
    end: int
    """Row after the last."""
    terminated: bool
    """Whether there is no next state; otherwise the budget ended the text, and the episode is truncated."""

    @property
    def rows(self) -> slice:
        """The decisions."""
        return slice(self.start, self.end)


def cut_episodes(token_end: npt.NDArray[np.bool_], ended_by_eos: bool, episode: Episodes) -> list[Cut]:
    """The episodes of one prompt; none of a prompt without a decision.

    Args:
        token_end: Whether a decision is the last of its token, `(decision,)`.
        ended_by_eos: Whether EOS ended the text. A prompt episode that it didn't end is truncated, whatever ended it.
        episode: `token`: a decided token is an episode, terminated; `prompt`: all of the prompt.
    """
    if episode == "prompt":
        return [Cut(0, token_end.size, ended_by_eos)] if token_end.size else []
    ends = (np.flatnonzero(token_end) + 1).tolist()
    return [Cut(start, end, True) for start, end in zip([0, *ends], ends, strict=False)]
