"""What policies see while many prompts are played at once: recorded primitives and the history of each lane."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lede.features import DRAFT, MAX_SINCE_DRAFT, MEMORY_FEATURES, PRE_SCAN, RECENT_ROUNDS, SCAN, FeatureConfig
from lede.lookup_table import LookupTable
from lede.trace_table import Ints, TraceTable

Array = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


class LaneFeatures:
    """Observations of lanes.

    Args:
        table: Traces.
        candidates: Candidate layers, `(candidate,)`.
        features: What is observed.
        lookup: What the text's own drafts would be; None where nobody looks.
    """

    def __init__(
        self, table: TraceTable, candidates: Ints, features: FeatureConfig, lookup: LookupTable | None = None
    ) -> None:
        self.table, self.features, self.lookup = table, features, lookup
        if not candidates.size:  # nobody looks at a layer, but arrays want one
            candidates = np.ones(1, dtype=np.int64)
        columns = candidates - 1
        self._depth = (candidates / table.n_layers).astype(np.float32)
        names = set(features.names)
        # (row, candidate) and, for drafts that went wrong, (branch, position)
        self._primitives: dict[str, tuple[Array, Array | None]] = {}
        branches = table.branches
        top1 = table.top1[:, columns]
        self._left = (-top1, None if branches is None else -branches.top1)
        if "confidence" in names:
            self._primitives["confidence"] = (
                table.confidence[:, columns], None if branches is None else branches.confidence
            )  # fmt: skip
        if "entropy" in names:
            self._primitives["entropy"] = (table.entropy[:, columns], None if branches is None else branches.entropy)
        if "surprisal" in names:
            self._primitives["surprisal"] = self._left
        margin = (top1 - table.top2[:, columns], None if branches is None else branches.top1 - branches.top2)
        if "margin" in names:
            self._primitives["margin"] = margin
        self._forecast = features.fitted
        if self._forecast is not None:
            self._forecast.check_candidates(candidates.tolist())
        self._layers = candidates
        self._margin = margin if "certainty" in names or self._forecast is not None else None
        self._agreement = _agreement(table.token[:, columns]) if "agreement" in names else None
        self._columns = columns
        self._last_surprisal = -table.top1[:, -1].astype(np.float64)
        self._branch_length = None if branches is None else branches.length
        self._room = table.max_new_tokens + 65  # what a draft pushes beyond the text is dropped again

    def start(self, n_lanes: int) -> None:
        """Make room for lanes."""
        self._anchor = np.zeros(n_lanes)
        self._sums = np.zeros((n_lanes, self._room))  # running sums of what entered the confidence trace
        self._pushed = np.zeros(n_lanes, dtype=np.int64)
        self._drafted = np.zeros((n_lanes, RECENT_ROUNDS), dtype=np.int64)
        self._accepted = np.zeros((n_lanes, RECENT_ROUNDS), dtype=np.int64)
        self._since = np.zeros(n_lanes, dtype=np.int64)
        self._copied = np.zeros((n_lanes, RECENT_ROUNDS), dtype=np.int64)  # by lookup
        self._copies_accepted = np.zeros((n_lanes, RECENT_ROUNDS), dtype=np.int64)
        self._since_lookup = np.zeros(n_lanes, dtype=np.int64)
        self._survival, self._certainty = np.zeros(n_lanes), np.zeros(n_lanes)  # their negative logarithms
        self._log_outlook = np.zeros(n_lanes)  # of what is drafted
        self._left_before = np.zeros(n_lanes, dtype=np.int64)  # in this round

    def restart(self, lanes: Ints, anchor: npt.NDArray[np.float64]) -> None:
        """Forget the history of lanes."""
        self._anchor[lanes] = anchor
        self._sums[lanes, 0] = 0
        self._pushed[lanes] = self._since[lanes] = self._since_lookup[lanes] = 0
        self._drafted[lanes] = self._accepted[lanes] = 0
        self._copied[lanes] = self._copies_accepted[lanes] = 0

    def begin_round(self, lanes: Ints) -> None:
        """Nothing is drafted yet."""
        self._survival[lanes] = self._certainty[lanes] = self._log_outlook[lanes] = 0
        self._left_before[lanes] = 0

    def left(self, lanes: Ints, candidate: Ints, row: Ints, branch: Ints, offset: Ints) -> None:
        """Positions are drafted and left at their candidate."""
        surprisal = self._value(self._left, candidate, row, branch, offset).astype(np.float64)
        self._survival[lanes] += surprisal
        if self._margin is not None:
            margin = self._value(self._margin, candidate, row, branch, offset)
            self._certainty[lanes] += np.exp(-margin)
            if self._forecast is not None:
                layer, before = self._layers[candidate], self._left_before[lanes]
                self._log_outlook[lanes] += self._forecast.log_chances(layer, surprisal, margin, before)
        self._left_before[lanes] += 1
        self._push(lanes, surprisal)

    def verified(self, lanes: Ints, drafted: Ints, accepted: Ints, bonus: bool, rows: Ints, unseen: Bools) -> None:
        """Drafts are verified; `rows` are those of the positions after what was accepted.

        Of drafts that were `unseen`, fixed ones, nothing was `left`: that position alone enters the trace.
        """
        kept = accepted == drafted
        self._pushed[lanes] -= np.where(kept | unseen, 0, drafted - accepted - 1)
        if bonus:
            read = kept | unseen
            self._push(lanes[read], self._last_surprisal[rows[read]])
        self._since[lanes] = 0
        self._since_lookup[lanes] += 1
        _remember(lanes, (self._drafted, drafted), (self._accepted, accepted))

    def looked_up(self, lanes: Ints, drafted: Ints, accepted: Ints, tokens: Ints, rows: list[Ints]) -> None:
        """Drafts from the text are verified; `rows` has the row of each of `tokens` committed, by place."""
        for i, row in enumerate(rows):
            more = tokens > i
            self._push(lanes[more], self._last_surprisal[row[more]])
        self._since[lanes] += 1
        self._since_lookup[lanes] = 0
        _remember(lanes, (self._copied, drafted), (self._copies_accepted, accepted))

    def passed(self, lanes: Ints, rows: Ints) -> None:
        """Positions went through all layers."""
        self._push(lanes, self._last_surprisal[rows])
        self._since[lanes] += 1
        self._since_lookup[lanes] += 1

    def observe(
        self, stage: npt.NDArray[np.int8], candidate: Ints, row: Ints, branch: Ints, offset: Ints, drafted: Ints
    ) -> Array:
        """Observations `(lane, feature)`."""
        looks = (stage == SCAN) | (stage == DRAFT)
        drafting = stage == DRAFT
        values: dict[str, npt.NDArray[np.floating] | npt.NDArray[np.integer] | Bools] = {
            name: np.where(looks, self._value(pair, candidate, row, branch, offset), 0)
            for name, pair in self._primitives.items()
        }
        chance, outlook = self._calibrated(looks, drafting, candidate, row, branch, offset, drafted)
        for name in self.features.names:
            if name == "chance":
                values[name] = chance
            elif name == "outlook":
                values[name] = outlook
            elif name == "depth":
                values[name] = np.where(looks, self._depth[candidate], 0)
            elif name == "trace":
                values[name] = self._trace(np.arange(stage.size))
            elif name == "agreement":
                values[name] = self._agreeing(stage, candidate, row, branch, offset)
            elif name == "acceptance":
                values[name] = (self._accepted.sum(axis=1) + 1) / (self._drafted.sum(axis=1) + 2)
            elif name == "since_draft":
                values[name] = np.minimum(self._since, MAX_SINCE_DRAFT)
            elif name == "drafted":
                values[name] = np.where(drafting, drafted, 0)
            elif name == "survival":
                values[name] = np.where(looks, np.exp(-self._survival), 0)
            elif name == "certainty":
                values[name] = np.where(looks, np.exp(-self._certainty), 0)
            elif name == "in_scan":
                values[name] = stage == SCAN
            elif name == "in_draft":
                values[name] = drafting
            elif name in MEMORY_FEATURES:
                values[name] = np.where(stage == PRE_SCAN, self._of_lookup(name, row), 0)
        return self.features.observe(values, self.table.n_layers, self.table.vocab_size)

    def history(self, lane: int) -> tuple[float, float | None, int]:
        """Confidence trace in nats, acceptance of the recent rounds that drafted, rounds since the last of them."""
        drafted = int(self._drafted[lane].sum())
        acceptance = float(self._accepted[lane].sum() / drafted) if drafted else None
        return float(self._trace(np.asarray([lane]))[0]), acceptance, int(self._since[lane])

    def _of_lookup(self, name: str, row: Ints) -> npt.NDArray[np.floating] | npt.NDArray[np.integer]:
        if name == "lookup_acceptance":
            return np.asarray((self._copies_accepted.sum(axis=1) + 1) / (self._copied.sum(axis=1) + 2))
        if name == "since_lookup":
            return np.minimum(self._since_lookup, MAX_SINCE_DRAFT)
        if self.lookup is None:
            return np.zeros(row.size)
        if name == "match_length":
            return self.lookup.length[row]
        if name == "match_count":
            return np.log1p(self.lookup.occurrences[row])
        if name == "match_remembered":
            return self.lookup.remembered[row].astype(np.float32)
        return (self.lookup.agreement if name == "match_agreement" else self.lookup.hits)[row]

    def _value(self, pair: tuple[Array, Array | None], candidate: Ints, row: Ints, branch: Ints, offset: Ints) -> Array:
        on_text, on_branch = pair
        value = on_text[row, candidate]
        if on_branch is not None:
            astray = np.flatnonzero(branch >= 0)
            if astray.size:
                value[astray] = on_branch[branch[astray], self._place(branch[astray], offset[astray])]
        return value

    def _calibrated(
        self, looks: Bools, drafting: Bools, candidate: Ints, row: Ints, branch: Ints, offset: Ints, drafted: Ints
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Of the position alone, and with those drafted before it; 0 where nobody looks or nothing is calibrated."""
        nothing = np.zeros(looks.size)
        if self._forecast is None or self._margin is None:
            return nothing, nothing
        surprisal, margin = (self._value(pair, candidate, row, branch, offset) for pair in (self._left, self._margin))
        here = self._forecast.log_chances(self._layers[candidate], surprisal, margin, np.where(drafting, drafted, 0))
        whole = here + np.where(drafting, self._log_outlook, 0.0)
        return np.where(looks, np.exp(here), 0.0), np.where(looks, np.exp(whole), 0.0)

    def _place(self, branch: Ints, offset: Ints) -> Ints:
        """Position within a branch, the last one where it was not followed further."""
        assert self._branch_length is not None
        return np.minimum(offset, self._branch_length[branch] - 1)

    def _agreeing(self, stage: npt.NDArray[np.int8], candidate: Ints, row: Ints, branch: Ints, offset: Ints) -> Array:
        assert self._agreement is not None
        known = stage == SCAN
        if self.features.draft_agreement:
            known = known | (stage == DRAFT)
        value = np.where(known, self._agreement[row, candidate], np.float32(0))
        branches = self.table.branches
        if self.features.draft_agreement and branches is not None:
            astray = np.flatnonzero((branch >= 0) & (candidate > 0) & (stage == DRAFT))
            if astray.size:
                tokens = branches.token[branch[astray], self._place(branch[astray], offset[astray])]
                here, k = np.arange(astray.size), candidate[astray]
                same = tokens[here, self._columns[k]] == tokens[here, self._columns[k - 1]]
                value[astray] = np.where(same, np.float32(1), np.float32(-1))
        return value

    def _trace(self, lanes: Ints) -> npt.NDArray[np.float64]:
        end = self._pushed[lanes]
        start = np.maximum(end - self.features.window, 0)
        mean = (self._sums[lanes, end] - self._sums[lanes, start]) / np.maximum(end - start, 1)
        return np.where(end > 0, mean, self._anchor[lanes])

    def _push(self, lanes: Ints, surprisal: npt.NDArray[np.float64]) -> None:
        at = self._pushed[lanes]
        self._sums[lanes, at + 1] = self._sums[lanes, at] + surprisal
        self._pushed[lanes] += 1


def _remember(lanes: Ints, *counts: tuple[Ints, Ints]) -> None:
    """Put each count of a round behind those of the rounds before."""
    for ring, new in counts:
        ring[lanes, :-1] = ring[lanes, 1:]
        ring[lanes, -1] = new


def _agreement(tokens: npt.NDArray[np.int32]) -> Array:
    """+1 or -1 where a candidate's token is that of the candidate before or not, `(row, candidate)`; 0 at the first."""
    agreement = np.where(tokens[:, 1:] == tokens[:, :-1], np.float32(1), np.float32(-1))
    return np.concatenate((np.zeros((len(tokens), 1), dtype=np.float32), agreement), axis=1)
