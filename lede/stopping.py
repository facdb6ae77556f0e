"""Where a text ends besides its budget and its EOS ids: stop strings, transformers' stopping criteria, time.

A block of tokens is committed at once, but the criteria are asked token by token, as plain decoding would ask them: the
text ends with the token that completes a stop string, whatever else was accepted behind it. Time alone is looked at
once a block, all of which is there by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from lede.devices import numbers_on
from lede.scores import ScoreRecord

FinishReason = Literal["eos", "stop", "length", "time"]
"""Why a text ended: an EOS id, a stop string or criterion, the budget, `max_time`."""

REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
"""By precedence where several hold at the same token."""


def finish_reason(last_token: int, eos: frozenset[int], stopped: FinishReason | None) -> FinishReason:
    """Why a text ended.

    Args:
        last_token: Its last token.
        eos: Ids that end it.
        stopped: What `Stopping` said.
    """
    if last_token in eos or stopped == "eos":
        return "eos"
    return stopped or "length"


def split_criteria(criteria: Sequence[Any]) -> tuple[list[Any], frozenset[int], int | None]:
    """Take EOS ids and the greatest length out of criteria, which the decoding loop looks after itself.

    Returns:
        The other criteria, the EOS ids, and the greatest length of prompt and new tokens; None without one.
    """
    others, eos, lengths = [], set(), []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            eos.update(criterion.eos_token_id.tolist())
        elif type(criterion) is MaxLengthCriteria:
            lengths.append(int(criterion.max_length))
        else:
            others.append(criterion)
    return others, frozenset(eos), min(lengths, default=None)


class Stopping:
    """Says of every committed block where in it the text ends.

    Args:
        criteria: transformers stopping criteria; each is asked with ids `(1, token)`, padding included.
        padding: Ids that stood in front of the prompt, which criteria made for padded rows count.
        record: Scores of the text so far, for criteria that look at them.
        device: Where the ids go that the criteria get.
    """

    def __init__(
        self,
        criteria: Sequence[StoppingCriteria],
        padding: Sequence[int] = (),
        record: ScoreRecord | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._timers = StoppingCriteriaList(c for c in criteria if isinstance(c, MaxTimeCriteria))
        self._others = [c for c in criteria if not isinstance(c, MaxTimeCriteria)]
        self._padding = list(padding)
        self._record = record
        self._device = device

    def end(self, ids: Sequence[int], block: Sequence[int], n_prompt: int) -> tuple[int, FinishReason | None]:
        """Where the text ends in a block that was just committed.

        Args:
            ids: Prompt and new tokens before the block.
            block: Tokens of the block, at least one; what is recorded of scores covers them already.
            n_prompt: Tokens of the prompt.

        Returns:
            How many tokens of the block stay, and why the text ends behind them; None when it goes on.
        """
        rows = numbers_on(torch.device(self._device), [[*self._padding, *ids, *block]])
        before = rows.shape[1] - len(block)
        if self._others:
            for n in range(1, len(block) + 1):
                reason = self._asked(rows[:, : before + n], len(ids) - n_prompt + n)
                if reason is not None:
                    return n, reason
        if self._timers and _says_so(self._timers(rows, None)):
            return len(block), "time"
        return len(block), None

    def _asked(self, row: torch.Tensor, n_new: int) -> FinishReason | None:
        """Why the text ends at this token, `(1, token)`; None when it goes on."""
        kept = None if self._record is None else self._record.scores
        scores = None if kept is None else tuple(kept[:n_new])
        found = [_reason(c) for c in self._others if _says_so(c(row, scores))]
        return min(found, key=REASONS.index, default=None)


def _reason(criterion: StoppingCriteria) -> FinishReason:
    if isinstance(criterion, EosTokenCriteria):
        return "eos"
    return "length" if isinstance(criterion, MaxLengthCriteria) else "stop"


def _says_so(answer: Any) -> bool:
    """The answer of a criterion for one row; older ones give a bool instead of a tensor."""
    return bool(answer.all()) if isinstance(answer, torch.Tensor) else bool(answer)
