"""The script that times the index of lookups: its arithmetic, and a run on short texts."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks.lookup_index import IndexCost, IndexSettings, index_seconds, library_tokens, main, with_room
from lede.lookup import LookupConfig
from lede.models import load_model
from tests.tiny_models import tiny_hf_model, tiny_model


def test_shares_are_of_the_model_and_the_index_together() -> None:
    found = IndexCost(100, build=1.0, index=0.25, propose=0.75, step=9.0, block=15.0, prefill=0.09, megabytes=1.0)
    assert found.share == 1 / 10
    assert found.share_of_block == (17 * 0.25 + 0.75) / (15 + 17 * 0.25 + 0.75) == 0.25
    assert found.share_of_prefill == pytest.approx(0.01 / 0.1)


def test_the_text_is_the_librarys() -> None:
    tokenizer = load_model("demo").tokenizer
    ids = list(islice(library_tokens(tokenizer), 3000))
    assert len(ids) == 3000
    assert len(set(ids)) > 100
    assert ids == list(islice(library_tokens(tokenizer), 3000))
    assert "import" in tokenizer.decode(ids)


def test_the_index_is_built_and_grown() -> None:
    text = [n % 7 for n in range(60)]
    steps: list[int] = []
    built, further, proposal, megabytes = index_seconds(text, 40, LookupConfig(), lambda: steps.append(1))
    assert min(built, further, proposal) > 0
    assert len(steps) == 20
    assert 0 < megabytes < 1


def test_models_are_given_room_where_positions_are_no_weights() -> None:
    model = tiny_model("llama")
    assert with_room(model, model.max_positions) is model
    roomy = with_room(load_model((tiny_hf_model("llama", torch.float32), None)), 5000)
    assert roomy.max_positions == 5000
    with pytest.raises(ValueError, match=r"room for 256 tokens and no more; lower --contexts"):
        with_room(tiny_model("gpt2"), 5000)


def test_a_run_on_short_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "index.json"
    found = main(IndexSettings(out, contexts="32,64", repeats=1))
    assert [each.context for each in found] == [32, 64]
    assert all(0 < each.share < 1 and 0 < each.share_of_block < 1 for each in found)
    written = json.loads(out.read_text())
    assert [each["share"] for each in written] == [each.share for each in found]
    assert "share of a step" in capsys.readouterr().out
