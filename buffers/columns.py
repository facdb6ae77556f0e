"""Records as columns: many prompts laid end to end, and taken apart again.

A shard is a set of arrays in tables: one row a prompt (indices, lengths, final states), ragged token ids, the rows
themselves (decisions of rollouts, decided tokens of traces), and the branches of traces. Lengths say where a prompt
begins and ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lede.buffers.records import (
    BRANCH_DTYPES,
    CLOSING_DTYPES,
    PromptRollout,
    PromptTrace,
    Record,
    StoreError,
    branch_shapes,
)
from lede.buffers.settings import Kind, StoreSettings

Columns = dict[str, npt.NDArray[Any]]

RECORD_TYPES: Mapping[Kind, type[PromptTrace] | type[PromptRollout]] = {
    "transitions": PromptRollout,
    "traces": PromptTrace,
}

LENGTHS = {"prompt_ids": "prompt_length", "token_ids": "token_length", "rows": "row_count", "branches": "branch_count"}
"""The column that holds a ragged table's lengths."""

_SHARED: dict[str, npt.DTypeLike] = {
    "prompt_index": np.int64,
    "prompt_length": np.int32,
    "token_length": np.int32,
    "row_count": np.int32,
    "ended_by_eos": np.bool_,
}


def prompt_columns(settings: StoreSettings) -> dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]:
    """Columns with one row a prompt: dtype and shape of a row."""
    columns: dict[str, tuple[npt.DTypeLike, tuple[int, ...]]] = {name: (dtype, ()) for name, dtype in _SHARED.items()}
    if settings.kind == "traces":
        layers = (settings.n_layers,)
        return columns | {
            "anchor": (np.float64, ()),
            "branch_count": (np.int32, ()),
            **{name: (dtype, layers) for name, dtype in CLOSING_DTYPES.items()},
        }
    return columns | {"final_observation": (np.float32, (len(settings.features.names),))}


def row_columns(settings: StoreSettings) -> dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]:
    """Columns with one row a decision (rollouts) or a decided token (traces): dtype and shape of a row."""
    if settings.kind == "traces":
        layers = (settings.n_layers,)
        floats = ("confidence", "entropy", "top1", "top2", "match")
        return {**dict.fromkeys(floats, (np.float32, layers)), "token": (np.int32, layers)}
    return {
        "observations": (np.float32, (len(settings.features.names),)),
        "actions": (np.int8, ()),
        "rewards": (np.float32, ()),
        "layer": (np.int16, ()),
        "exit_layer": (np.int16, ()),
        "token_index": (np.int32, ()),
        "token_end": (np.bool_, ()),
        "match": (np.int8, ()),
    }


def row_bytes(settings: StoreSettings) -> int:
    """Bytes of a row before compression: of a decision (rollouts), or of a decided token at all layers (traces)."""
    return sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in row_columns(settings).values())


def transition_bytes(settings: StoreSettings) -> float:
    """Bytes of a transition before compression; 31 with the default features.

    A row of traces has a transition, exit or not, at every layer.
    """
    return row_bytes(settings) / (settings.n_layers if settings.kind == "traces" else 1)


def branch_columns(settings: StoreSettings) -> dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]:
    """Columns with one row a branch, none for rollouts: dtype and shape of a row."""
    if settings.kind != "traces":
        return {}
    shapes = branch_shapes(0, settings.branch_depth, settings.n_layers)
    return {name: (dtype, shapes[name][1:]) for name, dtype in BRANCH_DTYPES.items()}


def no_branches(settings: StoreSettings, n_prompts: int) -> Columns:
    """What a shard of traces from before there were branches lacks: these, and the closing state's likeliest tokens.

    The latter are zeros, so that the features they give are masked.
    """
    columns: Columns = {
        name: np.zeros((0, *shape), dtype=dtype) for name, (dtype, shape) in branch_columns(settings).items()
    }
    for name in ("closing_top1", "closing_top2", "closing_token"):
        columns[name] = np.zeros((n_prompts, settings.n_layers), dtype=CLOSING_DTYPES[name])
    return columns | {LENGTHS["branches"]: np.zeros(n_prompts, dtype=np.int32)}


def check_record(record: Record, settings: StoreSettings) -> None:
    """Raise ValueError when a record doesn't fit the settings of a store."""
    wanted = RECORD_TYPES[settings.kind]
    if not isinstance(record, wanted):
        raise ValueError(f"a store of {settings.kind} takes {wanted.__name__}, got {type(record).__name__}")
    columns = prompt_columns(settings) | row_columns(settings) | branch_columns(settings)
    for name, (_, shape) in columns.items():
        got = np.shape(getattr(record, name))[-len(shape) :] if shape else ()
        if shape and got != shape:
            raise ValueError(
                f"prompt {record.prompt_index}: `{name}` has rows of shape {got}, the store's settings say {shape}"
            )


def stack(records: Sequence[Record], settings: StoreSettings) -> Columns:
    """Lay records end to end."""
    columns: Columns = {}
    for name, (dtype, shape) in prompt_columns(settings).items():
        values = [_prompt_value(record, name) for record in records]
        columns[name] = np.asarray(values, dtype=dtype).reshape(len(records), *shape)
    for name in ("prompt_ids", "token_ids"):
        columns[name] = _join([getattr(record, name) for record in records], np.int64, ())
    for name, (dtype, shape) in (row_columns(settings) | branch_columns(settings)).items():
        columns[name] = _join([getattr(record, name) for record in records], dtype, shape)
    return columns


def unstack(columns: Columns, settings: StoreSettings, where: str) -> list[Record]:
    """Take columns apart into records, in the order in which they were laid down.

    Args:
        columns: What `stack` gave.
        settings: Settings of the store.
        where: The shard, for messages.

    Raises:
        StoreError: A column has another length than the lengths say.
    """
    prompts = prompt_columns(settings)
    tables = {"prompt_ids": ["prompt_ids"], "token_ids": ["token_ids"], "rows": list(row_columns(settings))}
    if settings.kind == "traces":
        tables["branches"] = list(branch_columns(settings))
    n_prompts = len(columns["prompt_index"])
    bounds: dict[str, list[int]] = {}
    for table, names in tables.items():
        ends = np.concatenate(([0], np.cumsum(columns[LENGTHS[table]], dtype=np.int64)))
        bounds |= dict.fromkeys(names, ends.tolist())
    for name, column in columns.items():
        expected = n_prompts if name in prompts else bounds[name][-1]
        if len(column) != expected:
            raise StoreError(f"{where}: array '{name}' has {len(column)} rows, expected {expected}")
    record_type = RECORD_TYPES[settings.kind]
    names = [name for name in prompts if name not in LENGTHS.values()]
    scalars = {name: columns[name].tolist() for name in names if columns[name].ndim == 1}
    records: list[Record] = []
    for i in range(n_prompts):
        values: dict[str, Any] = {name: column[i] for name, column in scalars.items()}
        values |= {name: columns[name][i] for name in names if name not in scalars}
        values |= {name: columns[name][ends[i] : ends[i + 1]] for name, ends in bounds.items()}
        records.append(record_type(**values))
    return records


def row_arrays(records: Sequence[Record], settings: StoreSettings) -> Columns:
    """Row columns of all records, with `prompt_index` (and, for traces, `token_index`) beside them."""
    columns = {
        name: _join([getattr(record, name) for record in records], dtype, shape)
        for name, (dtype, shape) in row_columns(settings).items()
    }
    counts = [record.n_rows for record in records]
    columns["prompt_index"] = np.repeat(np.asarray([r.prompt_index for r in records], dtype=np.int64), counts)
    if settings.kind == "traces":
        columns["token_index"] = _join([np.arange(1, count + 1) for count in counts], np.int32, ())
    return columns


def _prompt_value(record: Record, name: str) -> Any:
    if name == "prompt_length":
        return record.prompt_ids.size
    if name == "token_length":
        return record.token_ids.size
    return getattr(record, {"row_count": "n_rows", "branch_count": "n_branches"}.get(name, name))


def _join(parts: list[npt.NDArray[Any]], dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if not parts:
        return np.zeros((0, *shape), dtype=dtype)
    return np.concatenate(parts).astype(dtype, copy=False)
