"""A tiny model in a folder, which workers can load, and collections with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from lede.buffers import open_store, same_record
from lede.collectors import CollectConfig
from lede.models import DEMO_FOLDER
from tests.tiny_models import prompt, tiny_model

PROMPTS = [prompt(i, 4 + i % 3) for i in range(12)]

FLOATS = {"observations", "final_observation", "confidence", "entropy", "top1", "top2", "match", "anchor"}
"""Features of a record, which agree to rounding; all else must be equal."""


def save_tiny_model(folder: Path) -> Path:
    """The tiny Llama of the tests as a folder; the tokenizer is only there to be loaded."""
    tiny_model("llama").hf_model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_FOLDER).save_pretrained(folder)
    return folder


def config_of(model: Path, out: Path, **settings: Any) -> CollectConfig:
    """A collection in float64, one prompt a batch unless told otherwise, and so equal to the bit."""
    base = CollectConfig(out, str(model), max_new_tokens=6, candidates="1,2,4", batch_size=1, shard_prompts=2, seed=5)
    return replace(base, dtype="float64", **{"temperature": 0.7, "top_k": 3, **settings})


def assert_equal_content(a: Path, b: Path) -> None:
    """Two stores hold the same bits."""
    first, second = open_store(a, verify=True), open_store(b, verify=True)
    assert first.settings.differences(second.settings) == []
    assert first.prompt_indices == second.prompt_indices
    found: list[Any] = list(first)
    wanted: list[Any] = list(second)
    for x, y in zip(found, wanted, strict=True):
        assert same_record(x, y)


def assert_close_content(a: Path, b: Path) -> None:
    """Two stores hold the same up to the rounding of features."""
    first, second = open_store(a, verify=True), open_store(b, verify=True)
    assert first.prompt_indices == second.prompt_indices
    for x, y in zip(first, second, strict=True):
        for name, value in vars(x).items():
            close = any(part in name for part in FLOATS)
            np.testing.assert_allclose(getattr(y, name), value, atol=1e-4 if close else 0, rtol=0, err_msg=name)
