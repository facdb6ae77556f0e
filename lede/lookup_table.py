"""What lookups would propose at every row of a table of traces, and how far each proposal is right.

A proposal is a function of the text so far, and of a memory of other texts if there is one, and the text is recorded:
so playing traces back needs no model for this source, and no branches. Where the text was sampled, a proposed token
counts as right if it is the recorded one. That is the law of verification: a point mass on token x is accepted with
p(x), and what follows a rejection has the law p without x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lede.lookup import LookupConfig, LookupIndex, Match
from lede.trace_table import Floats, Ints, TraceTable

if TYPE_CHECKING:
    from lede.phrases import PhraseMemory

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
    """Place of the first proposed token, as a `Match` has it; -1 where the end of the text is new."""
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
    remembered: Bools  # (row,)
    """Whether the proposal is a memory's."""
    _kept: dict[int, Ints] = field(default_factory=dict)

    @classmethod
    def from_table(
        cls,
        table: TraceTable,
        config: LookupConfig,
        most: int = max(LOOKUP_LENGTHS),
        eos: Sequence[int] | None = None,
        memory: PhraseMemory | Sequence[PhraseMemory] | None = None,
    ) -> LookupTable:
        """Look up at every row.

        Args:
            table: Traces.
            config: How earlier places are found.
            most: Tokens proposed at most.
            eos: Ids that end texts; None for those that end one of the table's.
            memory: Of other texts, behind each; or one for each prompt.

        Raises:
            ValueError: The table does not know its texts.
        """
        if len(table.token_ids) != table.n_prompts:
            raise ValueError("lookups need the texts of the traces; make the table with TraceTable.from_traces")
        if eos is None:
            eos = [int(ids[-1]) for ids, ended in zip(table.token_ids, table.ended_by_eos, strict=True) if ended]
        last = frozenset(eos)
        rows: list[tuple[int, int, int, float, bool, float, int, bool, int, int, int]] = []
        memories = memory if isinstance(memory, Sequence) else list(repeat(memory, table.n_prompts))
        for prompt, new, n, behind in zip(
            table.prompt_ids, table.token_ids, table.n_decided.tolist(), memories, strict=True
        ):
            index, text = LookupIndex(config, prompt.tolist(), behind), new.tolist()
            for t in range(1, n + 1):
                index.extend(text[t - 1 : t])
                found, hits = index.match(), index.hits
                if found is None:
                    rows.append((-1, 0, 0, 0.0, False, hits, 0, False, 0, -1, text[t]))
                    continue
                copied = index.propose(most)
                stop = next((i + 1 for i, token in enumerate(copied) if token in last), len(copied))
                run, room = 0, min(stop, n + 1 - t)
                while run < room and copied[run] == text[t + run]:
                    run += 1
                wrong = copied[run] if run < room else -1
                rows.append((*found, hits, stop, copied[stop - 1] in last, run, wrong, text[t]))
        columns = zip(*rows, strict=True)
        start, length, occurrences, agreement, remembered, hit, proposed, ends, runs, wrongs, texts = columns

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
            np.asarray(remembered, dtype=np.bool_),
        )

    def match(self, row: int) -> Match | None:
        """Where the end of the text at a row has been before."""
        if self.start[row] < 0:
            return None
        return Match(
            int(self.start[row]),
            int(self.length[row]),
            int(self.occurrences[row]),
            float(self.agreement[row]),
            bool(self.remembered[row]),
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


def lookups_of(
    table: TraceTable, config: LookupConfig, most: int = max(LOOKUP_LENGTHS), memory: PhraseMemory | None = None
) -> LookupTable:
    """The lookups of a table, made once for each configuration and memory.

    Args:
        table: Traces.
        config: How earlier places are found.
        most: Tokens proposed at least as far.
        memory: Of other texts. Where it was made of the table's own, each text is shown what the table holds ready for
            it instead (`lede.phrase_folds`), as a new text finds nothing of itself in the memory.
    """
    made: dict[tuple[LookupConfig, str | None], LookupTable] = table.lookups
    key = config, None if memory is None else memory.digest
    if key not in made or made[key].most < most:
        behind = None if memory is None else table.unseen.get(memory.digest, memory)
        made[key] = LookupTable.from_table(table, config, max(most, max(LOOKUP_LENGTHS)), memory=behind)
    return made[key]
