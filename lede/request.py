"""What one call asks of each of its texts: prompt, budget, how tokens are drawn, where the text ends, what to keep.

It is made once from whatever the caller gave, `lede.generate`'s arguments or what transformers' `generate` prepared,
and both decoding loops, for one text and for many, take everything from it. Rows are the texts of the call, from 0.

A loop does this for each row: take `prompts[row]`, `budgets[row]`, a `chooser` and the `stopping` that goes with it;
commit blocks of tokens until the budget is used up, the last token is in `eos`, or `Stopping.end`, asked after every
block, the first token's included, ends the text (then only the tokens that it keeps count, in rounds and scores alike);
and return `output(row, ...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList

from lede.output import GenerateOutput
from lede.scores import ScoreRecord
from lede.seeding import Purpose, torch_stream
from lede.statistics import DecodingStats, Round
from lede.stopping import FinishReason, Stopping, finish_reason
from lede.verification import Chooser, TorchSource, Warp

if TYPE_CHECKING:
    from lede.models import EarlyExitModel


@dataclass(frozen=True)
class Request:
    """Settings of the texts of one call, resolved; everything refused was refused before."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each row, without padding."""
    budgets: tuple[int, ...]
    """Most new tokens of each row, at least 1."""
    eos: frozenset[int]
    """Ids that end a text."""
    warp: Warp
    """How tokens are drawn from processed logits."""
    seed: int = 0
    """Seed of the tokens drawn."""
    stream: int = 0
    """Stream of row 0; row i draws from stream + i."""
    processors: tuple[LogitsProcessorList | None, ...] = ()
    """Logits processors of each row, None where there are none; empty when no row has any."""
    criteria: tuple[Any, ...] = ()
    """transformers stopping criteria; EOS ids and lengths are not among them."""
    padding: tuple[tuple[int, ...], ...] = ()
    """Ids that stood in front of each prompt, which processors and criteria of padded rows count; empty for none."""
    output_scores: bool = False
    """Whether to keep the scores that tokens were chosen by."""
    output_logits: bool = False
    """Whether to keep raw logits."""

    def chooser(self, row: int, device: torch.device) -> Chooser:
        """A new chooser for a row: its own luck, its processors, and a record of scores where they are kept."""
        index = self.stream + row
        # a draw on a device is the device's; whether a token stays is for the host, which need not wait for its luck
        acceptance = None if device.type == "cpu" else torch_stream(self.seed, Purpose.ACCEPTANCE, index)
        source = TorchSource(torch_stream(self.seed, Purpose.TOKENS, index, device=device), acceptance)
        record = None
        if self.output_scores or self.output_logits:
            record = ScoreRecord(self.output_scores, self.output_logits)
        processors = self.processors[row] if self.processors else None
        return Chooser(self.warp, source, processors, self._padding(row), record)

    def stopping(self, row: int, chooser: Chooser, device: torch.device) -> Stopping | None:
        """Where a row ends besides its budget and EOS ids; None when nothing else ends it."""
        if not self.criteria:
            return None
        return Stopping(self.criteria, self._padding(row), chooser.record, device)

    def output(
        self,
        model: EarlyExitModel,
        row: int,
        new: Sequence[int],
        chooser: Chooser,
        stats: DecodingStats,
        rounds: Sequence[Round],
        stopped: FinishReason | None,
    ) -> GenerateOutput:
        """What the caller gets of a row that is done.

        Args:
            model: The model that decoded.
            row: Which one.
            new: Its new tokens, at least one.
            chooser: The one that chose them.
            stats: Counts and times.
            rounds: Rounds after the prefill.
            stopped: What `Stopping.end` said last; None when it never ended the text.
        """
        tokenizer, record = model.tokenizer, chooser.record
        return GenerateOutput(
            text=None if tokenizer is None else str(tokenizer.decode(list(new), skip_special_tokens=True)),
            sequences=torch.tensor([[*self.prompts[row], *new]], device=model.device),
            stats=stats,
            rounds=tuple(rounds),
            finish_reason=finish_reason(new[-1], self.eos, stopped),
            scores=None if record is None or record.scores is None else tuple(record.scores),
            logits=None if record is None or record.logits is None else tuple(record.logits),
        )

    def _padding(self, row: int) -> tuple[int, ...]:
        return self.padding[row] if self.padding else ()
