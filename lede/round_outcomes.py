"""What a round would bring that begins at any row of a table and exits at any layer, for every length of the draft.

Where forecasts depend on the text alone and not on what was decided before, all rounds there are can be laid out in
tables, and a policy of thresholds is played by following them from round to round: hundreds of times faster than
stepping through `DraftRounds`, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lede.acceptance import AcceptanceModel
from lede.cost_model import CostModel
from lede.cost_tables import CostTables
from lede.features import FOLLOWED, FeatureConfig
from lede.trace_table import TraceTable

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Played:
    """Sums over a table, by prompt."""

    tokens: Ints  # (prompt,)
    """Committed."""
    seconds: Array  # (prompt,)
    """Spent."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return float(self.tokens.sum() / self.seconds.sum())


class RoundOutcomes:
    """All rounds of a table under forecasts.

    Args:
        table: Traces, with branches or without.
        costs: What operations cost.
        layers: Layers that may draft, ascending.
        model: Forecasts at each of them, on features out of `lede.features.FOLLOWED`.
        max_draft: Most tokens drafted in a round.
        seed: Of the acceptance of sampled drafts.
        asked: What the policy observes in all, which it is charged for; None for what the forecasts look at.

    Raises:
        ValueError: A feature depends on what was decided before.
    """

    def __init__(
        self,
        table: TraceTable,
        costs: CostModel,
        layers: Sequence[int],
        model: AcceptanceModel,
        max_draft: int = 12,
        seed: int = 0,
        asked: FeatureConfig | None = None,
    ) -> None:
        odd = [name for name in model.features.names if name not in FOLLOWED]
        if odd:
            raise ValueError(f"{', '.join(odd)} depend on decisions before; forecasts here see {', '.join(FOLLOWED)}")
        self.table, self.costs, self.layers, self.max_draft = table, costs, tuple(layers), max_draft
        self.features = model.features
        self.asked = model.features if asked is None else asked
        columns = np.asarray(layers, dtype=np.int64) - 1
        matches = table.matches(columns, seed)
        prompt = np.repeat(np.arange(table.n_prompts), table.n_decided)
        self._decision = np.arange(len(matches)) - table.first_row[prompt] + 1
        self._context = table.prompt_length[prompt] + self._decision - 1
        self._cap = np.minimum(max_draft, table.max_new_tokens - self._decision - 1)
        to_end = table.n_decided[prompt] - self._decision + 1
        run = np.zeros(matches.shape, dtype=np.int64)
        follow = np.zeros(matches.shape[1], dtype=np.int64)
        for row in range(len(matches) - 1, -1, -1):
            if to_end[row] == 1:
                follow = np.zeros_like(follow)
            follow = np.where(matches[row], follow + 1, 0)
            run[row] = follow
        self._run = run
        # an accepted end of sequence ends the draft
        ends = table.ended_by_eos[prompt][:, None] & (run >= to_end[:, None])
        self._eos_at = np.where(ends, to_end[:, None], np.iinfo(np.int64).max)
        self._last_row = np.arange(len(matches)) + to_end - 1
        self.scanned = np.empty(matches.shape)
        """Probability of acceptance as the scan sees it, `(row, layer)`."""
        self._falls = np.empty((max_draft - 1, *matches.shape), dtype=np.float32)  # log-chance of positions 1, 2, ...
        self._blind = -np.logaddexp(0, -model.blind)
        for k, layer in enumerate(layers):
            self._follow(model, k, layer)
        self._tables = CostTables(costs, layers, table.max_context, max_draft)
        self._made: dict[tuple[float, bool], tuple[Ints, Array]] = {}
        self._scans: dict[tuple[int, ...], CostTables] = {}

    def drafts(self, survival: float, blind: bool = False) -> tuple[Ints, Array]:
        """Tokens committed and seconds after the exit of rounds that exit anywhere, `(row, layer)` each; kept.

        Args:
            survival: Least survival to draft on.
            blind: Whether the first position is drafted unseen; the seconds are of the whole round then.
        """
        if (survival, blind) not in self._made:
            self._made[survival, blind] = self._drafts(survival, blind)
        return self._made[survival, blind]

    def play(self, drafts: tuple[Ints, Array], candidates: Sequence[int], thresholds: Sequence[float]) -> Played:
        """Follow the rounds of a policy that scans; arguments as of `scans`."""
        return self._chase(*self.scans(drafts, candidates, thresholds))

    def scans(
        self, drafts: tuple[Ints, Array], candidates: Sequence[int], thresholds: Sequence[float]
    ) -> tuple[Ints, Array]:
        """Tokens committed and seconds of rounds that scan, wherever they begin, `(row,)` each.

        Args:
            drafts: As `drafts` gives them.
            candidates: Layers inspected, ascending, out of `layers`.
            thresholds: Least probability to exit with at each.
        """
        places = [self.layers.index(layer) for layer in candidates]
        key = tuple(candidates)
        if key not in self._scans:
            self._scans[key] = CostTables(self.costs, key, self.table.max_context, 1)
        scan = self._scans[key]
        ask, draw = scan.decision(self.asked), scan.choice(self.asked)
        rows = np.arange(len(self._run))
        tokens, seconds = np.ones(rows.size, dtype=np.int64), np.zeros(rows.size)
        looking = rows
        for k, place in enumerate(places):
            seconds[looking] += scan.scan[k, self._context[looking]] + ask
            exits = self.scanned[looking, place] >= thresholds[k]
            leaving, looking = looking[exits], looking[~exits]
            tokens[leaving] = drafts[0][leaving, place]
            seconds[leaving] += drafts[1][leaving, place] + draw
        seconds[looking] += scan.verify[-1, 1, self._context[looking]]
        return tokens, seconds

    def play_blind(self, drafts: tuple[Ints, Array], layer: int) -> Played:
        """Follow the rounds of a policy that drafts blind at one layer."""
        place = self.layers.index(layer)
        return self._chase(drafts[0][:, place].copy(), drafts[1][:, place].copy())

    def _follow(self, model: AcceptanceModel, k: int, layer: int) -> None:
        """Forecasts of the layer at every row, and along every draft that begins there."""
        table, n_rows = self.table, len(self._run)
        rows = np.arange(n_rows)
        self._keep(model, k, 0, self._observe(rows, layer, None, None, 0))
        branch_of, branches = table.branch_of(layer), table.branches
        for i in range(1, self.max_draft):
            row = np.minimum(rows + i, self._last_row)
            wrong = rows + self._run[:, k]  # row of the first wrong draft
            astray = np.flatnonzero((self._run[:, k] < i) & (branch_of[np.minimum(wrong, self._last_row)] >= 0))
            branch = branch_of[np.minimum(wrong, self._last_row)[astray]]
            seen = self._observe(row, layer, None, None, i)
            if branches is not None and astray.size:
                place = np.minimum(i - self._run[astray, k] - 1, branches.length[branch] - 1)
                seen[astray] = self._observe(branch, layer, place, branches, i)
            self._keep(model, k, i, seen)

    def _keep(self, model: AcceptanceModel, k: int, i: int, seen: npt.NDArray[np.float32]) -> None:
        """Keep what is made of what a layer sees `i` positions into drafts, `(row, feature)`; 0 is the scan."""
        drafting, here = np.full(len(seen), i > 0), np.full(len(seen), k)
        if i == 0:
            self.scanned[:, k] = model.probability(seen, drafting, here)
        else:
            self._falls[i - 1, :, k] = -np.logaddexp(0, -model.log_odds(seen, drafting, here))

    def _observe(
        self, rows: Ints, layer: int, place: Ints | None, source: object, drafted: int
    ) -> npt.NDArray[np.float32]:
        def of(name: str) -> npt.NDArray[np.float32]:
            if place is None:
                return np.asarray(getattr(self.table, name)[rows, layer - 1])
            return np.asarray(getattr(source, name)[rows, place])

        top1 = of("top1")
        values: dict[str, npt.ArrayLike] = {
            "surprisal": -top1,
            "drafted": drafted,
            "depth": layer / self.table.n_layers,
        }
        if "margin" in self.features.names:
            values["margin"] = top1 - of("top2")
        for name in {"entropy", "confidence"} & set(self.features.names):
            values[name] = of(name)
        return self.features.observe(values, self.table.n_layers, self.table.vocab_size)

    def _drafts(self, survival: float, blind: bool) -> tuple[Ints, Array]:
        least = np.log(max(survival, 1e-300))
        first = self._blind[None, :] if blind else np.log(np.maximum(self.scanned, 1e-300))
        so_far = np.broadcast_to(first, self._run.shape).copy()
        going, length = np.ones(self._run.shape, dtype=np.bool_), np.ones(self._run.shape, dtype=np.int64)
        for falls in self._falls:
            so_far += falls
            going &= so_far >= least
            length += going
        return self._brought(length, blind)

    def _brought(self, length: Ints, blind: bool) -> tuple[Ints, Array]:
        """Tokens and seconds of drafts that the policy would end at these lengths, `(row, layer)` each."""
        length = np.minimum(length, np.maximum(self._cap, 1)[:, None])
        ends = length >= self._eos_at
        length = np.where(ends, self._eos_at, length)
        capped = length == self._cap[:, None]
        tokens = np.minimum(length, self._run) + ~ends
        return tokens, self._seconds(length, ends, capped & ~ends, blind)

    def _seconds(self, length: Ints, ends: Bools, capped: Bools, blind: bool) -> Array:
        """Seconds of rounds from the first drafted token on."""
        tables, context = self._tables, self._context[:, None]
        k = np.arange(len(self.layers))[None, :]
        ask = tables.decision(self.asked)
        summed = np.concatenate((np.zeros((len(self.layers), 1)), np.cumsum(tables.again, axis=1)), axis=1)
        positions = length - ends  # beyond the first
        seconds = summed[k, context + 1 + positions] - summed[k, context + 1]
        seconds += (length - ends - capped) * ask + (length - 1) * tables.choice(self.asked)
        seconds += tables.verify[k, length + ~ends, context]
        if blind:
            seconds += tables.draft[k, context] + self.costs.blind_seconds(self.asked)
        return np.asarray(seconds)

    def _chase(self, tokens: Ints, seconds: Array) -> Played:
        """From round to round; where the budget leaves no room for a draft, a plain pass that asks nobody."""
        table = self.table
        forced = self._cap < 1
        tokens[forced], seconds[forced] = 1, self._tables.plain[self._context[forced]]
        decoded, spent = np.zeros(table.n_prompts, dtype=np.int64), np.zeros(table.n_prompts)
        prompt = np.flatnonzero(table.n_decided > 0)
        while prompt.size:
            row = table.first_row[prompt] + decoded[prompt]
            decoded[prompt] += tokens[row]
            spent[prompt] += seconds[row]
            prompt = prompt[decoded[prompt] < table.n_decided[prompt]]
        return Played(decoded, spent)
