"""Spans of layers against transformers' own forward, on every family; refusals by name before any work."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3Config, LlamaConfig, LlamaForCausalLM, MambaConfig

from lede.models import DEMO_FOLDER, FAMILIES, EarlyExitModel, UnsupportedModelError, load_model
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, WINDOW, prompt, tiny_config, tiny_hf_model, tiny_model


def forward(model: EarlyExitModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model.hf_model(torch.tensor([ids])).logits[0]
    return logits


def run(model: EarlyExitModel, cache: Any, ids: list[int], start: int, spans: list[int]) -> torch.Tensor:
    """Logits `(token, vocabulary)` of tokens at `start`, going through the layers in the given spans."""
    with torch.inference_mode():
        block = model.block(cache, start, len(ids))
        hidden = model.embed(torch.tensor([ids]), block)
        for first, last in pairwise(spans):
            hidden = model.run_layers(hidden, first, last, block)
        return model.head(hidden)[0]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_exit_at_the_last_layer_is_bit_equal_to_the_model(family: str) -> None:
    """Norm recomputed, head, logit scaling and soft cap included."""
    model = tiny_model(family)
    ids = prompt(0, 20)
    found = run(model, model.new_cache(20), ids, 0, [0, N_LAYERS])
    assert torch.equal(found, forward(model, ids))


def test_soft_cap_is_applied() -> None:
    config = tiny_config("gemma3_text")
    config.final_logit_softcapping = 0.05
    from transformers import Gemma3ForCausalLM

    model = load_model((Gemma3ForCausalLM(config).double().eval(), None))
    ids = prompt(0, 9)
    found = run(model, model.new_cache(9), ids, 0, [0, N_LAYERS])
    assert torch.equal(found, forward(model, ids))
    assert found.abs().max() <= 0.05


@pytest.mark.parametrize("family", FAMILY_NAMES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_blocks_spans_and_rewinds_give_the_models_logits(family: str, data: st.DataObject) -> None:
    """Blocks of any size through spans of any cut, with wrong tokens written and rewound in between."""
    model = tiny_model(family)
    ids = prompt(3, 30)
    wanted = forward(model, ids)
    cache = model.new_cache(40)
    done = 0
    while done < len(ids):
        size = data.draw(st.integers(1, len(ids) - done if done == 0 else min(WINDOW + 2, len(ids) - done)))
        cuts = sorted(data.draw(st.sets(st.integers(1, N_LAYERS - 1), max_size=3)))
        if data.draw(st.booleans()):  # a rejected draft: some layers get ahead, then everything is forgotten
            junk = data.draw(st.integers(1, 9))
            run(model, cache, [7] * junk, done, [0, *cuts[:1], *([] if cuts else [N_LAYERS])])
            cache.rewind(done)
        found = run(model, cache, ids[done : done + size], done, [0, *cuts, N_LAYERS])
        torch.testing.assert_close(found, wanted[done : done + size], rtol=0, atol=1e-12)
        done += size


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_ragged_rows_equal_single_runs(family: str) -> None:
    """Rows of unequal length, a subset of them at unequal positions: as if each ran alone."""
    model = tiny_model(family)
    lengths = [10, 6, 13]
    rows = [prompt(10 + i, n) for i, n in enumerate(lengths)]
    padded = torch.tensor([row + [1] * (13 - len(row)) for row in rows])
    with torch.inference_mode():
        cache = model.new_cache(20, batch_size=3)
        every = torch.arange(3)
        block = model.ragged_block(cache, torch.arange(13)[None].expand(3, 13), every)
        logits = model.head(model.run_layers(model.embed(padded, block), 0, N_LAYERS, block))
        for i, row in enumerate(rows):
            torch.testing.assert_close(logits[i, : len(row)], forward(model, row), rtol=0, atol=1e-12)
        some = torch.tensor([2, 1])
        more = torch.tensor([[5, 9], [3, 4]])
        positions = torch.tensor([[13, 14], [6, 7]])
        block = model.ragged_block(cache, positions, some)
        hidden = model.embed(more, block)
        for first in range(0, N_LAYERS, 2):
            hidden = model.run_layers(hidden, first, first + 2, block)
        logits = model.head(hidden)
    for i, row in enumerate(some.tolist()):
        wanted = forward(model, [*rows[row], *more[i].tolist()])[-2:]
        torch.testing.assert_close(logits[i], wanted, rtol=0, atol=1e-12)


def test_pair_is_taken_as_it_is() -> None:
    hf_model = tiny_hf_model("llama", torch.bfloat16)
    model = load_model((hf_model, None))
    assert model.hf_model is hf_model
    assert model.dtype == torch.bfloat16
    assert model.tokenizer is None
    with pytest.raises(ValueError, match="taken as it is"):
        load_model((hf_model, None), dtype="float32")


def test_a_model_shows_what_it_is() -> None:
    assert repr(tiny_model("llama")) == "EarlyExitModel(LlamaForCausalLM: llama, 6 layers, torch.float64, cpu)"


def test_training_mode_is_refused_where_it_changes_the_text() -> None:
    dropout = tiny_config("llama")
    dropout.attention_dropout = 0.1  # no module of its own
    checkpointing = tiny_hf_model("llama")
    for module in checkpointing.modules():  # what the method sets, whose name changed inside transformers 5
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
    for hf_model in (tiny_hf_model("gpt2"), LlamaForCausalLM(dropout), checkpointing):
        load_model((hf_model.eval(), None))
        hf_model.train()
        with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
            load_model((hf_model, None))
    load_model((tiny_hf_model("llama").train(), None))  # nothing in it is random


def test_unsupported_architecture_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    MambaConfig(num_hidden_layers=2, hidden_size=8, vocab_size=16).save_pretrained(tmp_path)  # there are no weights
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported: its layers keep a recurrent state"):
        load_model(tmp_path)


def test_decoder_inside_a_larger_model_is_refused_by_the_larger_ones_name(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    Gemma3Config(text_config=tiny_config("gemma3_text").to_dict(), vision_config=vision).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'gemma3' is not supported"):
        load_model(tmp_path)


def test_model_without_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaModel has no LM head"):
        load_model((tiny_hf_model("llama").model, None))


def test_attention_may_be_switched_later() -> None:
    """The masks follow the transformers model, also when it changes after it was taken."""
    hf_model = tiny_hf_model("llama")
    model = load_model((hf_model, None))
    ids = prompt(0, 12)
    for attention in ("eager", "sdpa"):
        hf_model.set_attn_implementation(attention)
        cache = model.new_cache(12)
        run(model, cache, ids[:5], 0, [0, N_LAYERS])
        found = run(model, cache, ids[5:], 5, [0, N_LAYERS])
        torch.testing.assert_close(found, forward(model, ids)[5:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_call_is_refused(rope_type: str) -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    from lede.models import check_supported

    with pytest.raises(UnsupportedModelError, match=rope_type):
        check_supported(config)


def test_missing_folder_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot load model") as raised:
        load_model(tmp_path / "nothing")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nothing", "'./nothing': there is no folder or file of that name"),
        ("runs/of/mine", "'runs/of/mine': there is no folder or file of that name"),
        ("runs/mine", "And there is no folder runs/mine here."),
        (5, "model must be a folder, a hub id, 'demo' or a pair .* got int"),
        (tiny_hf_model("llama"), "got LlamaForCausalLM; a model that is loaded already goes in as a pair"),
    ],
    ids=["path", "deep path", "hub id or folder", "number", "model"],
)
def test_what_is_no_model_is_told_as_that(model: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=message):
        load_model(model)


def test_damaged_folder_and_absent_device_are_told_in_one_line(tmp_path: Path) -> None:
    tiny_hf_model("llama", torch.float32).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    absent = "cuda" if not torch.cuda.is_available() else "cuda:99"
    for arguments in ({"model": tmp_path}, {"model": "demo", "device": absent}, {"model": "demo", "dtype": "load"}):
        with pytest.raises(ValueError, match="cannot load model") as raised:
            load_model(**arguments)
        assert "\n" not in str(raised.value)


def test_folder_and_dtype(tmp_path: Path) -> None:
    hf_model = tiny_hf_model("llama", torch.bfloat16)
    hf_model.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(load_model("demo").hf_model.name_or_path)).save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == torch.float32
    assert load_model(tmp_path, dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="cannot load model"):
        load_model(tmp_path, dtype="float31")


def test_exit_layers_are_checked() -> None:
    model = tiny_model("llama")
    for layer in (0, -1, N_LAYERS, N_LAYERS + 1):
        with pytest.raises(ValueError, match=rf"exit layer {layer} is outside 1\.\.{N_LAYERS - 1}"):
            model.check_exit_layer(layer)


def test_windows_come_from_the_config() -> None:
    assert tiny_model("mistral").windows == [WINDOW] * N_LAYERS
    assert tiny_model("gemma3_text").windows == [WINDOW, WINDOW, None] * 2
    assert tiny_model("llama").windows == [None] * N_LAYERS


def test_bundled_model_is_a_supported_family() -> None:
    model = load_model("demo")
    folder = Path(str(model.hf_model.name_or_path))
    assert json.loads((folder / "config.json").read_text())["model_type"] in FAMILIES
    assert model.eos_token_ids
    assert model.max_positions >= 1024


def test_llama_without_grouped_heads_and_untied() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = load_model((LlamaForCausalLM(config).double().eval(), None))
    ids = [t % 64 for t in prompt(0, 12)]
    assert torch.equal(run(model, model.new_cache(12), ids, 0, [0, 3]), forward(model, ids))
