"""A stopping criterion for tests that go by token ids."""

from __future__ import annotations

from typing import Any

import torch
from transformers import StoppingCriteria


class StopAt(StoppingCriteria):
    """Ends the text at a token id, and remembers at which lengths it was asked."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.asked: list[int] = []

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.asked.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token  # type: ignore[return-value]  # typed for bool tensors
