"""Batches as callers pass them: lists, left padding; right padding refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lede.generation import generate
from lede.prompt_rows import is_batch, rows_of
from tests.deciding_policies import policy_of
from tests.tiny_models import prompt, tiny_model

ROWS = [prompt(0, 4), prompt(1, 9), prompt(2, 6)]


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows as a tensor with its mask; the padding is a token of the vocabulary like any other."""
    longest = max(map(len, ROWS))
    ids, mask = [], []
    for row in ROWS:
        gap = longest - len(row)
        left = gap if side == "left" else gap // 2 if side == "inside" else 0
        ids.append([1] * left + row + [1] * (gap - left))
        mask.append([0] * left + [1] * len(row) + [0] * (gap - left))
    return torch.tensor(ids), torch.tensor(mask)


def test_left_padding_is_taken_off() -> None:
    assert rows_of(*padded("left")) == ROWS
    assert rows_of(ROWS) == ROWS
    ids, mask = padded("left")
    assert rows_of(ids.tolist(), mask.bool().tolist()) == ROWS


def test_a4_8_right_padding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row 0 is padded on the right.*padding_side='left'"):
        rows_of(*padded("right"))
    with pytest.raises(ValueError, match="row 1 is padded inside"):
        rows_of([[1, 2], [1, 2, 3]], [[1, 1], [1, 0, 1]])


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[1, 2], []], None, "row 1 of input_ids is empty"),
        (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 1], [0, 0]]), "row 1 of input_ids is empty"),
        ([[1, 2]], [[1, 1, 1]], "attention_mask must have the shape of input_ids"),
        (torch.zeros(2, 2, 2, dtype=torch.long), None, r"must be \(row, token\)"),
        ([], None, "there are no prompts"),
    ],
)
def test_odd_batches_are_refused(ids: Any, mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(ids, mask)


def test_what_counts_as_a_batch() -> None:
    assert is_batch([[1], [2, 3]])
    assert is_batch([[1]])
    assert is_batch(torch.ones(2, 3))
    assert not is_batch(torch.ones(1, 3))
    assert not is_batch([1, 2])
    assert not is_batch(torch.ones(3))


def texts(**arguments: Any) -> list[list[int]]:
    return [
        out.sequences[0].tolist()
        for out in generate(tiny_model("llama"), max_new_tokens=8, policy=policy_of("static"), **arguments)
    ]


def test_batches_in_every_form_give_the_texts_of_single_calls() -> None:
    one = [
        generate(tiny_model("llama"), input_ids=row, policy=policy_of("static"), max_new_tokens=8).sequences[0].tolist()
        for row in ROWS
    ]
    ids, mask = padded("left")
    assert texts(input_ids=ROWS) == texts(input_ids=ids, attention_mask=mask) == one
    assert texts(input_ids=[ROWS[0]]) == one[:1]
    assert texts(input_ids=torch.tensor([ROWS[1], ROWS[1]])) == [one[1], one[1]]


def test_a_single_padded_row_is_single() -> None:
    out = generate(
        tiny_model("llama"),
        input_ids=torch.tensor([[1, 1, *ROWS[0]]]),
        attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]),
        max_new_tokens=4,
    )
    alone = generate(tiny_model("llama"), input_ids=ROWS[0], max_new_tokens=4)
    assert torch.equal(out.sequences, alone.sequences)


def test_lengths_are_each_rows_own() -> None:
    """max_length, min_length and the like count a row's tokens, not its neighbours'."""
    for out, row in zip(generate(tiny_model("llama"), input_ids=ROWS, max_length=12), ROWS, strict=True):
        assert out.sequences.shape[1] == 12
        assert out.stats.tokens == 12 - len(row)


def test_what_is_for_one_prompt_is_refused_for_many() -> None:
    class Quiet:
        def put(self, value: torch.Tensor) -> None: ...

        def end(self) -> None: ...

    with pytest.raises(ValueError, match="streamer is for one prompt, got a batch of 3"):
        generate(tiny_model("llama"), input_ids=ROWS, streamer=Quiet())
    with pytest.raises(ValueError, match="attention_mask goes with input_ids"):
        generate(tiny_model("llama"), "text", attention_mask=torch.ones(1, 1))


def test_numpy_arrays_are_rows_too() -> None:
    ids, mask = np.array([[0, 5, 6], [7, 8, 9]]), np.array([[0, 1, 1], [1, 1, 1]])
    assert is_batch(ids)
    assert not is_batch(ids[:1])
    assert rows_of(ids, mask) == [[5, 6], [7, 8, 9]]
    arrays = [np.array(row) for row in ROWS]
    assert is_batch(arrays)
    assert is_batch(arrays[:1])
    assert rows_of(arrays) == rows_of(arrays, [np.ones(len(row)) for row in ROWS]) == ROWS
