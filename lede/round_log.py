"""The rounds of a simulation, one row each."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

ENDINGS = ("plain", "stop", "cap", "eos")
"""How a round ended: without a draft, by the policy, at the cap, with a drafted EOS."""

SOURCES = ("plain", "exit", "lookup")
"""Where the draft of a round came from: nowhere, from layers of the model, from the text."""

_COLUMNS = (
    "prompt", "decision", "layer", "n_scanned", "n_drafted", "n_accepted", "n_committed", "ending", "source", "seconds",
    "fixed",
)  # fmt: skip


class RoundLog:
    """Rounds as columns, `(round,)`, in order by prompt and decision once `finish` has been called.

    Attributes:
        prompt: Place of the prompt in the table.
        decision: First decision of the round, from 1.
        layer: Exit layer; 0 where no layer drafted: for a plain pass and for a lookup.
        n_scanned: Candidates inspected in the scan.
        n_drafted: Drafted tokens.
        n_accepted: Drafted tokens that verification kept.
        n_committed: Tokens committed.
        ending: Place in `ENDINGS`.
        source: Place in `SOURCES`.
        seconds: Spent.
        fixed: Length of a draft that nobody was asked about; 0 for other rounds.
    """

    prompt: npt.NDArray[np.int64]
    decision: npt.NDArray[np.int64]
    layer: npt.NDArray[np.int64]
    n_scanned: npt.NDArray[np.int64]
    n_drafted: npt.NDArray[np.int64]
    n_accepted: npt.NDArray[np.int64]
    n_committed: npt.NDArray[np.int64]
    ending: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    fixed: npt.NDArray[np.int64]

    def __init__(self) -> None:
        self._parts: list[tuple[npt.NDArray[Any], ...]] = []

    def write(
        self,
        prompt: npt.NDArray[np.int64],
        decision: npt.NDArray[np.int64],
        layer: npt.NDArray[np.int64],
        n_scanned: npt.NDArray[np.int64],
        n_drafted: npt.NDArray[np.int64],
        n_accepted: npt.NDArray[np.int64],
        n_committed: npt.NDArray[np.int64],
        ending: str,
        seconds: npt.NDArray[np.float64],
        lookup: bool = False,
        fixed: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Add rounds that ended alike; all of them drafted by `lookup`, or none."""
        which = np.full(prompt.size, ENDINGS.index(ending))
        source = np.full(prompt.size, SOURCES.index("lookup")) if lookup else (layer > 0).astype(np.int64)
        fixed = np.zeros_like(prompt) if fixed is None else fixed
        self._parts.append(
            (prompt, decision, layer, n_scanned, n_drafted, n_accepted, n_committed, which, source, seconds, fixed)
        )

    def finish(self) -> None:
        """Put the rounds in order."""
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        columns = columns or [np.zeros(0, dtype=np.int64)] * len(_COLUMNS)
        order = np.lexsort((columns[1], columns[0]))
        for name, column in zip(_COLUMNS, columns, strict=True):
            setattr(self, name, column[order])
        self._parts = []

    def __len__(self) -> int:
        return self.prompt.size
