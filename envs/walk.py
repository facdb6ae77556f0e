"""Rows of text walking through the layers: the machinery under the environments and the collectors.

Every row is one prompt whose text the target (the whole model) writes. A row stands either at a candidate layer of its
newest token, waiting for a decision, or between tokens. Rows that cross the same layers do so in one forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from lede.devices import numbers_on, sent
from lede.envs.rows import BETWEEN_TOKENS, Decision, Row, Rules
from lede.features import ConfidenceTrace, primitives
from lede.models import Block, EarlyExitModel
from lede.rewards import CONTINUE, EXIT
from lede.seeding import Purpose, numpy_stream, torch_stream


class LayerWalk:
    """A batch of rows of one model, each at its own prompt, token and layer.

    Args:
        model: The model; its text is what the rows write.
        rules: Candidates, budget, features, reward, warp.
        n_rows: Rows.
        capacity: Most tokens of a row, prompt and budget.
        seed: Of the target's draws and of the matches, one stream a prompt, so that content does not depend on which
            rows walk together.
    """

    def __init__(self, model: EarlyExitModel, rules: Rules, n_rows: int, capacity: int, seed: int = 0) -> None:
        self.model = model
        self.rules = rules
        self.seed = seed
        self._rows: list[Row | None] = [None] * n_rows
        self._cache = model.new_cache(capacity, n_rows)
        self._eos = frozenset(model.eos_token_ids)

    @property
    def n_rows(self) -> int:
        """Rows of the batch."""
        return len(self._rows)

    def row(self, index: int) -> Row:
        """The row at `index`, which must have been prefilled."""
        row = self._rows[index]
        assert row is not None, f"row {index} has no prompt"
        return row

    def layer(self, index: int) -> int:
        """The layer where a row stands: its candidate, or 0 between tokens."""
        row = self.row(index)
        return 0 if row.candidate == BETWEEN_TOKENS else self.rules.candidates[row.candidate]

    def observe(self, rows: Sequence[int]) -> npt.NDArray[np.float32]:
        """Observations `(row, feature)` of rows that stand at a candidate."""
        told = [{**self.row(r).values(), "depth": self.layer(r) / self.model.n_layers} for r in rows]
        values = {name: [row[name] for row in told] for name in self.rules.features.names}
        return self.rules.features.observe(values, self.model.n_layers, self.model.vocab_size)

    @torch.no_grad()
    def prefill(self, prompts: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        """Give rows new prompts and run those through all layers, which writes the first new token of each.

        Args:
            prompts: Prompt index and token ids, by row. These rows then stand between tokens, or are done when the
                first token was EOS.
        """
        if not prompts:
            return
        rows, ids = list(prompts), [list(prompt) for _, prompt in prompts.values()]
        width = max(map(len, ids))
        padded = numbers_on(self.model.device, [[*row, *[row[-1]] * (width - len(row))] for row in ids])
        if self.n_rows == 1:
            self._cache.rewind(0)
        block = self._block(rows, [0] * len(ids), width)
        hidden = self.model.run_layers(self.model.embed(padded, block), 0, self.model.n_layers, block)
        last = torch.stack([hidden[i, len(row) - 1 :][:1] for i, row in enumerate(ids)])
        logits = self.model.head(last)[:, 0]
        read = _Reading(logits, self.rules.features.top_k)
        for i, (r, (prompt_index, _)) in enumerate(prompts.items()):
            greedy = self.rules.warp.greedy
            luck = None if greedy else torch_stream(self.seed, Purpose.TOKENS, prompt_index)
            trace = ConfidenceTrace(read.surprisal[i], self.rules.features.window)
            self._rows[r] = Row(prompt_index, ids[i], trace, luck)
        for r, token in zip(rows, self._draw(rows, logits, read.token), strict=True):
            self._write(r, token)

    @torch.no_grad()
    def enter(self, rows: Iterable[int]) -> None:
        """Take rows that stand between tokens to the first candidate of their newest token."""
        spans = dict.fromkeys(rows, (0, self.rules.candidates[0]))
        if spans:
            logits, read = self._cross(spans)
            self._stand(dict.fromkeys(spans, 0), range(len(spans)), logits, read)

    @torch.no_grad()
    def decide(self, actions: Mapping[int, int]) -> dict[int, Decision]:
        """Act on rows that stand at a candidate.

        Args:
            actions: CONTINUE or EXIT, by row. A row that exits, or continues at its last candidate, runs through the
                rest of the layers, writes the target's next token and then stands between tokens, or is done.
        """
        if not actions:
            return {}
        candidates, n_layers = self.rules.candidates, self.model.n_layers
        goals = (*candidates[1:], n_layers)
        spans = {
            r: (self.layer(r), n_layers if action == EXIT else goals[self.row(r).candidate])
            for r, action in actions.items()
        }
        logits, read = self._cross(spans)
        order = list(spans)
        leaving = [i for i, r in enumerate(order) if spans[r][1] == n_layers]
        arriving = [i for i, r in enumerate(order) if spans[r][1] != n_layers]
        decisions = {order[i]: self._decision(order[i], CONTINUE) for i in arriving}
        if arriving:
            self._stand({order[i]: self.row(order[i]).candidate + 1 for i in arriving}, arriving, logits, read)
        if leaving:
            rows = [order[i] for i in leaving]
            tokens = self._draw(rows, _some(logits, leaving), [read.token[i] for i in leaving])
            targets = dict(zip(rows, tokens, strict=True))
            exits = {r: i for r, i in zip(rows, leaving, strict=True) if actions[r] == EXIT}
            matches = self._matches(exits, targets, logits)
            for r, i in zip(rows, leaving, strict=True):
                row = self.row(r)
                row.trace.push(row.surprisal if r in exits else read.surprisal[i])
                decisions[r] = self._decision(r, actions[r], matches.get(r, -1), targets[r])
                self._write(r, targets[r])
        return decisions

    @torch.no_grad()
    def skip(self, rows: Iterable[int]) -> None:
        """Take rows through the rest of the layers without an exit; each writes the target's next token."""
        spans = {r: (self.layer(r), self.model.n_layers) for r in rows}
        if not spans:
            return
        logits, read = self._cross(spans)
        for r, surprisal, token in zip(spans, read.surprisal, self._draw(list(spans), logits, read.token), strict=True):
            self.row(r).trace.push(surprisal)
            self._write(r, token)

    def _cross(self, spans: Mapping[int, tuple[int, int]]) -> tuple[torch.Tensor, _Reading]:
        """Run rows from layer `first` to layer `last` each; logits `(row, vocabulary)` at their last layers.

        One sweep upwards: between two layers where some row starts or stops, all rows on their way go together.
        """
        edges = sorted({edge for span in spans.values() for edge in span})
        for a, b in pairwise(edges):
            rows = [r for r, (first, last) in spans.items() if first <= a and b <= last]
            if not rows:
                continue
            block = self._block(rows, [self.row(r).position for r in rows], 1)
            if a == 0:
                newest = numbers_on(self.model.device, [[self.row(r).token_ids[-1]] for r in rows])
                hidden = self.model.embed(newest, block)
            else:
                hidden = torch.stack([self._state(r) for r in rows])
            for r, state in zip(rows, self.model.run_layers(hidden, a, b, block), strict=True):
                self.row(r).hidden = state
        # rows may have stopped on different devices
        logits = self.model.head(torch.stack([self._state(r).to(self.model.device) for r in spans]))[:, 0]
        return logits, _Reading(logits, self.rules.features.top_k)

    def _state(self, index: int) -> torch.Tensor:
        hidden = self.row(index).hidden
        assert hidden is not None
        return hidden

    def _block(self, rows: list[int], starts: list[int], width: int) -> Block:
        """Place `width` tokens from position `starts` of the given rows."""
        if self.n_rows == 1:  # attention then looks at views of the cache instead of gathered copies
            return self.model.block(self._cache, starts[0], width)
        return self.model.rows_block(self._cache, rows, starts, [width] * len(rows))

    def _stand(
        self, candidates: Mapping[int, int], places: Sequence[int], logits: torch.Tensor, read: _Reading
    ) -> None:
        """Note what rows see at the candidates, by row, where they have arrived; `places` are theirs in the reading."""
        warp = self.rules.warp
        chances = None if warp.greedy else warp.probabilities(_some(logits, places))
        for i, (place, (r, candidate)) in enumerate(zip(places, candidates.items(), strict=True)):
            row = self.row(r)
            row.candidate = candidate
            row.confidence, row.entropy = read.confidence[place], read.entropy[place]
            row.surprisal, row.margin = read.surprisal[place], read.margin[place]
            row.agreement = 0.0 if candidate == 0 else 1.0 if read.token[place] == row.token else -1.0
            row.token = read.token[place]
            row.probabilities = None if chances is None else chances[i]

    def _draw(self, rows: list[int], logits: torch.Tensor, likeliest: list[int]) -> list[int]:
        """The target's next tokens from logits `(row, vocabulary)`.

        Each row's uniform number comes from its own stream on the CPU and is looked up in the cumulated distribution,
        so that neither the batch nor the device changes the text.
        """
        if self.rules.warp.greedy:
            return likeliest
        sums = self.rules.warp.probabilities(logits).double().cumsum(-1)
        numbers = [torch.rand((), generator=self.row(r).luck, dtype=torch.float64) for r in rows]
        total = sums[:, -1:]
        # strictly below the total, where no token is left to be found
        wanted = torch.minimum(sent(torch.stack(numbers), sums.device)[:, None] * total, torch.nextafter(total, -total))
        drawn: list[int] = torch.searchsorted(sums, wanted, right=True)[:, 0].tolist()
        return drawn

    def _matches(self, exits: Mapping[int, int], targets: Mapping[int, int], logits: torch.Tensor) -> dict[int, int]:
        """Whether the target agrees with rows' exits; with sampling, drawn with probability sum_v min(p, q).

        Args:
            exits: Where the rows stand in the logits, by row.
            targets: The target's tokens, by row.
            logits: The whole model's, `(place, vocabulary)`.
        """
        if self.rules.warp.greedy or not exits:
            return {r: int(self.row(r).token == targets[r]) for r in exits}
        shares = []
        for r, place in exits.items():
            p, q = self.rules.warp.probabilities(logits[place]), self.row(r).probabilities
            assert q is not None
            shares.append(torch.minimum(p, q.to(p.device)).sum())
        found = {}
        for r, beta in zip(exits, torch.stack(shares).tolist(), strict=True):  # one transfer from a device
            luck = numpy_stream(self.seed, Purpose.MATCHES, self.row(r).prompt_index, self.row(r).token_index)
            found[r] = int(luck.random() < beta)
        return found

    def _decision(self, r: int, action: int, match: int = -1, target: int | None = None) -> Decision:
        layer, rewards = self.layer(r), self.rules.reward
        exits = action == EXIT
        reward = rewards.exit(layer, self.model.n_layers, match) if exits else rewards.going_on(target is not None)
        return Decision(layer, action, float(reward), self.row(r).token_index, match, target)

    def _write(self, r: int, token: int) -> None:
        """Append the target's token; the row then stands between tokens, or is done."""
        row = self.row(r)
        row.token_ids.append(token)
        row.candidate, row.hidden, row.probabilities = BETWEEN_TOKENS, None, None
        row.ended_by_eos = token in self._eos
        row.done = row.ended_by_eos or len(row.token_ids) == self.rules.max_new_tokens


def _some(logits: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Rows of `(row, vocabulary)` at ascending places; a device is sent their numbers where it has to choose."""
    return logits if len(places) == len(logits) else logits[numbers_on(logits.device, places)]


class _Reading:
    """Primitives of head reads as Python numbers, fetched from the device at once."""

    def __init__(self, logits: torch.Tensor, top_k: int) -> None:
        read = primitives(logits, top_k)
        told = [read.confidence, read.entropy, -read.top1, read.top1 - read.top2]
        # float64 holds every float32 and every id exactly
        packed = torch.cat([torch.stack(told).double(), read.token.double()[None]])
        self.confidence, self.entropy, self.surprisal, self.margin, token = packed.tolist()
        self.token = [int(each) for each in token]
