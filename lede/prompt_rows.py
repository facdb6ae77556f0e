"""Prompts as rows of token ids: what callers pass as `input_ids`, padded or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def ids_of(input_ids: Any) -> list[int]:
    """The ids of one prompt, `(1, prompt)` or `(prompt,)`.

    Raises:
        ValueError: They are no ids, or of more than one prompt.
    """
    try:
        tensor = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"input_ids must be token ids, (1, prompt) or (prompt,), got {type(input_ids).__name__} that is none"
        ) from None
    if tensor.dim() == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != 1:
        raise ValueError(f"input_ids must be one sequence, (1, prompt) or (prompt,), got {tuple(tensor.shape)}")
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        if tensor.numel():
            raise ValueError(f"input_ids must be whole numbers, got {tensor.dtype}")
        tensor = tensor.long()
    return [int(i) for i in tensor.tolist()]


def is_batch(input_ids: Any) -> bool:
    """Whether ids are of several prompts: a list of rows of ids, however many, or a tensor of more than one row."""
    if isinstance(input_ids, (torch.Tensor, np.ndarray)):
        return input_ids.ndim == 2 and input_ids.shape[0] != 1
    if isinstance(input_ids, (list, tuple)) and input_ids:
        return all(isinstance(row, (list, tuple)) or getattr(row, "ndim", 0) > 0 for row in input_ids)
    return False


def rows_of(input_ids: Any, attention_mask: Any = None) -> list[list[int]]:
    """The rows of a batch of prompts without their padding.

    Args:
        input_ids: Id lists, tensors or arrays of any lengths, or a tensor `(row, token)` padded on the left.
        attention_mask: 1 where a token counts and 0 at padding, of the same shape; without it every token counts.

    Raises:
        ValueError: There is no row, a row is empty, the mask is of another shape, or it pads on the right or inside.
    """
    if isinstance(input_ids, (torch.Tensor, np.ndarray)):
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids of several prompts must be (row, token), got {tuple(input_ids.shape)}")
        rows = [ids_of(row) for row in input_ids]
    else:
        rows = [ids_of(row) for row in input_ids]
    if not rows:
        raise ValueError("there are no prompts; give at least one")
    if attention_mask is not None:
        rows = [row[n:] for row, n in zip(rows, padding_of(rows, attention_mask), strict=True)]
    for number, row in enumerate(rows):
        if not row:
            raise ValueError(f"row {number} of input_ids is empty; a prompt needs at least one token")
    return rows


def padding_of(rows: Sequence[Sequence[int]], attention_mask: Any) -> list[int]:
    """How many tokens of each row are padding on its left.

    Raises:
        ValueError: The mask is of another shape, or a row is padded anywhere else.
    """
    shapes = [len(row) for row in rows]
    mask = attention_mask.tolist() if isinstance(attention_mask, (torch.Tensor, np.ndarray)) else attention_mask
    if not isinstance(mask, (list, tuple)):
        raise ValueError(f"attention_mask must have the shape of input_ids, got {type(attention_mask).__name__}")
    if mask and not isinstance(mask[0], (list, tuple)) and not getattr(mask[0], "ndim", 0):
        mask = [mask]
    kept = [[bool(value) for value in row] for row in mask]
    found = [len(row) for row in kept]
    if found != shapes:
        raise ValueError(f"attention_mask must have the shape of input_ids, got rows of {found} for rows of {shapes}")
    padding = []
    for number, row in enumerate(kept):
        n = row.index(True) if True in row else len(row)
        if not all(row[n:]):
            where = "on the right" if not row[-1] else "inside"
            raise ValueError(
                f"row {number} is padded {where}, which gives wrong positions; pad on the left (padding_side='left'), "
                "or pass a list of id lists"
            )
        padding.append(n)
    return padding
