"""Whether the values of a shard are such as a store can hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lede.buffers.columns import LENGTHS, Columns, branch_columns, prompt_columns, row_columns
from lede.buffers.settings import StoreSettings
from lede.rewards import EXIT

Odd = tuple[str, str]
"""An array and what is wrong with it."""

_ROUNDING = 1e-3  # of sums over a vocabulary in float32, in nats


def odd_values(columns: Columns, settings: StoreSettings) -> Iterator[Odd]:
    """What is wrong with the columns of a shard: an array at most once, with the first prompt where it is.

    Args:
        columns: All columns of the shard, as `lede.buffers.columns.stack` lays them.
        settings: Settings of the store.
    """
    lengths = list(_odd_lengths(columns, settings))
    yield from lengths
    if lengths:
        return  # which prompt a row belongs to is not known
    told: set[str] = set()
    checks = _odd_trace_rows if settings.kind == "traces" else _odd_decisions
    for find in (_odd_numbers, _odd_texts, checks):
        for array, bad, wanted in find(columns, settings):
            if array not in told and bad.any():
                told.add(array)
                yield array, _message(columns, settings, array, bad, wanted)


def _odd_lengths(columns: Columns, settings: StoreSettings) -> Iterator[Odd]:
    tables = {"prompt_ids": ["prompt_ids"], "token_ids": ["token_ids"], "rows": list(row_columns(settings))}
    if settings.kind == "traces":
        tables["branches"] = list(branch_columns(settings))
    for table, names in tables.items():
        lengths = columns[LENGTHS[table]]
        least = 0 if table in ("rows", "branches") else 1
        if (lengths < least).any():
            yield LENGTHS[table], f"holds a length of {lengths.min()}, at least {least} is wanted"
            continue
        for name in names:
            if len(columns[name]) != lengths.sum():
                yield name, f"has {len(columns[name])} rows, the lengths of its prompts add up to {lengths.sum()}"
    indices = columns["prompt_index"]
    if (indices < 0).any() or np.unique(indices).size < indices.size:
        yield "prompt_index", "holds a prompt twice, or a negative one"


_Check = tuple[str, npt.NDArray[np.bool_], str]
"""An array, where it is wrong (its own first axis), and what is wanted."""


def _odd_numbers(columns: Columns, settings: StoreSettings) -> Iterator[_Check]:
    for name, values in columns.items():
        if values.dtype.kind == "f":
            yield name, _any(~np.isfinite(values)), "finite numbers"


def _odd_texts(columns: Columns, settings: StoreSettings) -> Iterator[_Check]:
    vocabulary = f"ids within 0..{settings.vocab_size - 1}"
    for name in ("prompt_ids", "token_ids"):
        yield name, _outside(columns[name], 0, settings.vocab_size - 1), vocabulary
    most = settings.max_new_tokens
    yield "token_length", columns["token_length"] > most, f"at most {most} new tokens"


def _odd_decisions(columns: Columns, settings: StoreSettings) -> Iterator[_Check]:
    low, high = settings.features.bounds(settings.n_layers, settings.vocab_size)
    for name in ("observations", "final_observation"):
        yield name, _outside(columns[name], low, high), "features within their bounds"
    actions, layer, match = columns["actions"], columns["layer"], columns["match"]
    exits = actions == EXIT
    yield "actions", _outside(actions, 0, 1), "0 (continue) or 1 (exit)"
    yield "layer", ~np.isin(layer, settings.candidates), f"candidates out of {list(settings.candidates)}"
    yield "exit_layer", columns["exit_layer"] != np.where(exits, layer, 0), "the layer at an exit, else 0"
    yield "match", np.where(exits, _outside(match, 0, 1), match != -1), "0 or 1 at an exit, else -1"
    token_end, counts = columns["token_end"], columns["row_count"]
    ends = np.cumsum(token_end, dtype=np.int64)
    last_rows = np.cumsum(counts, dtype=np.int64) - 1
    before = np.concatenate([[0], ends])  # ends in the rows before a row
    first = before[last_rows + 1 - counts]  # and before the first row of a prompt
    in_order = before[:-1] - np.repeat(first, counts) + 1
    yield "token_index", columns["token_index"] != in_order, "whole numbers from 1, one more after each token's end"
    ended = before[last_rows + 1] - first
    unended = np.zeros(len(token_end), dtype=np.bool_)
    unended[last_rows[counts > 0]] = ~token_end[last_rows[counts > 0]]
    yield "token_end", unended, "a prompt's last decision ends its token"
    yield "row_count", ended != columns["token_length"] - 1, "decisions about every new token but the first"


def _odd_trace_rows(columns: Columns, settings: StoreSettings) -> Iterator[_Check]:
    last, vocabulary = settings.vocab_size - 1, f"ids within 0..{settings.vocab_size - 1}"
    counts = columns["row_count"]
    yield "row_count", counts != columns["token_length"] - 1, "a row for every new token but the first"
    yield "token", _outside(columns["token"], 0, last), vocabulary
    yield "closing_token", _outside(columns["closing_token"], 0, last), vocabulary
    highest = np.log(settings.vocab_size) + _ROUNDING
    for prefix in ("", "closing_", "branch_"):
        entropy, top1, top2 = (columns[f"{prefix}{name}"] for name in ("entropy", "top1", "top2"))
        yield f"{prefix}confidence", _any(columns[f"{prefix}confidence"] < -_ROUNDING), "0 or more"
        yield f"{prefix}entropy", _outside(entropy, -_ROUNDING, highest), f"0 to ln of the vocabulary, {highest:.3f}"
        yield f"{prefix}top1", _any(top1 > _ROUNDING), "logarithms of probabilities, 0 or less"
        yield f"{prefix}top2", _any(top2 > top1 + _ROUNDING), "no more than top1"
    yield "match", _outside(columns["match"], 0, 1 + _ROUNDING), "0 to 1"
    if settings.temperature == 0:
        yield "match", _any(~np.isin(columns["match"], (0, 1))), "0 or 1, the text is greedy"
    depth, rows = settings.branch_depth, np.repeat(counts, columns["branch_count"])
    row, layer, length = (columns[f"branch_{name}"] for name in ("row", "layer", "length"))
    yield "branch_row", (row < 0) | (row >= rows), "rows of the branch's prompt"
    yield "branch_layer", _outside(layer, 1, settings.n_layers - 1), f"layers within 1..{settings.n_layers - 1}"
    yield "branch_length", _outside(length, 1, depth), f"lengths within 1..{depth}"
    yield "branch_token", _outside(columns["branch_token"], -1, last), f"-1, or {vocabulary}"


def _any(bad: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether any value of a row is bad, `(row,)`."""
    rows: npt.NDArray[np.bool_] = np.any(bad, axis=tuple(range(1, bad.ndim)))
    return rows


def _outside(values: npt.NDArray[Any], low: npt.ArrayLike, high: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    return _any((values < low) | (values > high))


def _message(
    columns: Mapping[str, npt.NDArray[Any]],
    settings: StoreSettings,
    array: str,
    bad: npt.NDArray[np.bool_],
    wanted: str,
) -> str:
    row = int(np.flatnonzero(bad)[0])
    if array in prompt_columns(settings):
        place = row
    else:
        table = "branches" if array in branch_columns(settings) else array if array in LENGTHS else "rows"
        place = int(np.searchsorted(np.cumsum(columns[LENGTHS[table]]), row, side="right"))
    value = columns[array][row]
    got = np.array2string(value.ravel() if value.ndim else value, precision=6, threshold=8, max_line_width=200)
    prompt = columns["prompt_index"][place]
    return f"{int(bad.sum())} rows are wrong, first row {row} (prompt {prompt}): {got}; wanted: {wanted}"
