"""What lookups would propose at every row of a table of traces, and how far each proposal is right.

A proposal is a function of the text so far, and the text is recorded: so playing traces back needs no model for this
source, and no branches. Where the text was sampled, a proposed token counts as right if it is the recorded one. That is
the law of verification: a point mass on token x is accepted with p(x), and what follows a rejection has the law p
without x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lede.lookup import LookupConfig, LookupIndex, Match
from lede.trace_table import Floats, Ints, TraceTable

Bools = npt.NDArray[np.bool_]

LOOKUP_LENGTHS = (2, 4, 8, 16)
"""Tokens copied by the plans that training chooses from."""


@dataclass(frozen=True, eq=False)
class LookupTable:
    """Lookups at every row of a `TraceTable`: in the text before decision t, which is the prompt and t new tokens."""

    table: TraceTable
    """The traces."""
    config: LookupConfig
    """How earlier places are found."""
    most: int
    """Tokens proposed at most."""
    start: Ints  # (row,)
    """Place in the text of the first proposed token; -1 where the end of the text is new."""
    length: Ints  # (row,)
    """Tokens before it that are those at the end of the text."""
    occurrences: Ints  # (row,)
    """Earlier places where the suffix that was searched for stands."""
    agreement: Floats  # (row,)
    """Share of them that went on with the proposed token."""
    hits: Floats  # (row,)
    """Share of the last 16 tokens that a lookup at their place proposed."""
    proposed: Ints  # (row,)
    """Proposed tokens, no more than `most`; a proposal is cut behind its first token that ends texts."""
    ends: Bools  # (row,)
    """Whether the last of them ends texts."""
    run: Ints  # (row,)
    """How many of them are right before the first that is not."""
    wrong: Ints  # (row,)
    """The first one that is not right; -1 where there is none."""
    text: Ints  # (row,)
    """The token that the text has there."""
    _kept: dict[int, Ints] = field(default_factory=dict)

    @classmethod
    def from_table(
        cls, table: TraceTable, config: LookupConfig, most: int = max(LOOKUP_LENGTHS), eos: Sequence[int] | None = None
    ) -> LookupTable:
        """Look up at every row.

        Args:
            table: Traces.
            config: How earlier places are found.
            most: Tokens proposed at most.
            eos: Ids that end texts; None for those that end one of the table's.

        Raises:
            ValueError: The table does not know its texts.
        """
        if len(table.token_ids) != table.n_prompts:
            raise ValueError("lookups need the texts of the traces; make the table with TraceTable.from_traces")
        if eos is None:
            eos = [int(ids[-1]) for ids, ended in zip(table.token_ids, table.ended_by_eos, strict=True) if ended]
        last = frozenset(eos)
        rows: list[tuple[int, int, int, float, float, int, bool, int, int, int]] = []
        for prompt, new, n in zip(table.prompt_ids, table.token_ids, table.n_decided.tolist(), strict=True):
            index, text = LookupIndex(config, prompt.tolist()), new.tolist()
            for t in range(1, n + 1):
                index.extend(text[t - 1 : t])
                found, hits = index.match(), index.hits
                if found is None:
                    rows.append((-1, 0, 0, 0.0, hits, 0, False, 0, -1, text[t]))
                    continue
                copied = index.propose(most)
                stop = next((i + 1 for i, token in enumerate(copied) if token in last), most)
                run, room = 0, min(stop, n + 1 - t)
                while run < room and copied[run] == text[t + run]:
                    run += 1
                wrong = copied[run] if run < room else -1
                rows.append((*found, hits, stop, copied[stop - 1] in last, run, wrong, text[t]))
        start, length, occurrences, agreement, hit, proposed, ends, runs, wrongs, texts = zip(*rows, strict=True)

        def whole(column: tuple[int, ...]) -> Ints:
            return np.asarray(column, dtype=np.int64)

        return cls(
            table,
            config,
            most,
            whole(start),
            whole(length),
            whole(occurrences),
            np.asarray(agreement, dtype=np.float32),
            np.asarray(hit, dtype=np.float32),
            whole(proposed),
            np.asarray(ends, dtype=np.bool_),
            whole(runs),
            whole(wrongs),
            whole(texts),
        )

    def match(self, row: int) -> Match | None:
        """Where the end of the text at a row has been before."""
        if self.start[row] < 0:
            return None
        return Match(
            int(self.start[row]), int(self.length[row]), int(self.occurrences[row]), float(self.agreement[row])
        )

    def kept(self, layer: int) -> Ints:
        """Proposed tokens before the first that is not the likeliest of a layer, `(row,)`.

        Behind a wrong token that the layer finds likeliest too, the layer reads a text that no trace holds: there it is
        taken to disagree.
        """
        if layer not in self._kept:
            said = self.table.token[:, layer - 1].astype(np.int64)
            agrees, n_rows = said == self.text, len(said)
            last = self.table.first_row + self.table.n_decided - 1
            follow, run = 0, np.zeros(n_rows, dtype=np.int64)
            ends = np.zeros(n_rows, dtype=np.bool_)
            ends[last[self.table.n_decided > 0]] = True
            for row in range(n_rows - 1, -1, -1):
                follow = 0 if not agrees[row] else 1 if ends[row] else follow + 1
                run[row] = follow
            kept = np.minimum(run, self.run)
            place = np.minimum(np.arange(n_rows) + self.run, n_rows - 1)
            fooled = (run >= self.run) & (self.wrong >= 0) & (said[place] == self.wrong)
            self._kept[layer] = kept + fooled
        return self._kept[layer]


def lookups_of(table: TraceTable, config: LookupConfig, most: int = max(LOOKUP_LENGTHS)) -> LookupTable:
    """The lookups of a table, made once for each configuration.

    Args:
        table: Traces.
        config: How earlier places are found.
        most: Tokens proposed at least as far.
    """
    made: dict[LookupConfig, LookupTable] = table.lookups
    if config not in made or made[config].most < most:
        made[config] = LookupTable.from_table(table, config, max(most, max(LOOKUP_LENGTHS)))
    return made[config]
