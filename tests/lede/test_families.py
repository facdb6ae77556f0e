"""Every supported family, tiny and random: bit-equal to transformers at the last layer, exact under any policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import lede
from lede.families import FAMILIES, UnsupportedModelError
from lede.generation import GenerateOutput
from lede.models import EarlyExitModel, load_model
from lede.policies import Policy, RandomPolicy, SkipSublayers, StaticPolicy
from tests.cut_models import run_skipping, without
from tests.exactness import is_exact
from tests.tiny_models import (
    ALL_FAMILY_NAMES,
    N_LAYERS,
    WINDOW,
    plain_generate,
    prompt,
    tiny_config,
    tiny_hf_model,
    tiny_model,
)

SEED = 2
"""Of the weights: no family falls into one token for ever."""
TOLERANCE = 1e-6
"""Families that route, rotate or take softmax in float32 inside a float64 model aren't closer than that."""


@pytest.fixture(params=ALL_FAMILY_NAMES)
def model(request: pytest.FixtureRequest) -> EarlyExitModel:
    if request.param not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {request.param}")
    return tiny_model(request.param, seed=SEED)


def in_parts(model: EarlyExitModel) -> bool:
    family = model.family
    return family.attention is not None and family.mlp is not None


def run(model: EarlyExitModel, ids: list[int], policy: Policy, budget: int) -> tuple[GenerateOutput, list[int]]:
    out = lede.generate(model, input_ids=ids, policy=policy, max_new_tokens=budget)
    return out, out.sequences[0, len(ids) :].tolist()


def last_layer(model: EarlyExitModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        block = model.block(model.new_cache(len(ids)), 0, len(ids))
        hidden = model.embed(torch.tensor([ids]), block)
        return model.head(model.run_layers(hidden, 0, model.n_layers, block))


def test_every_family_has_a_tiny_model() -> None:
    assert set(ALL_FAMILY_NAMES) == set(FAMILIES)


def test_a1_11_the_last_layer_is_bit_equal_to_the_model(model: EarlyExitModel) -> None:
    ids = prompt(0, 20)
    with torch.inference_mode():
        assert torch.equal(last_layer(model, ids), model.hf_model(torch.tensor([ids])).logits)


def test_greedy_text_is_the_plain_text(model: EarlyExitModel) -> None:
    """In float64, without tolerance, across the windows; the drafts are partly wrong."""
    policies: list[Policy] = [StaticPolicy(exit_layer=1, draft_length=3), RandomPolicy(seed=1)]
    if in_parts(model):
        policies.append(RandomPolicy(seed=2, skip_probability=0.0, blind_probability=0.0, gap_probability=0.8))
    drafted = accepted = gaps = 0
    for seed, length in ((5, 12), (6, 2)):
        ids = prompt(seed, length)
        wanted = plain_generate(model, ids, 16)
        for policy in policies:
            out, found = run(model, ids, policy, 16)
            assert found == wanted
            drafted += sum(r.drafted for r in out.rounds)
            accepted += sum(r.accepted for r in out.rounds)
            gaps += sum(r.drafted > 0 and r.exit_layer is None for r in out.rounds)
    assert 0 < accepted < drafted
    assert bool(gaps) == in_parts(model)


def test_float32_text_is_the_plain_text_by_the_margin_rule(model: EarlyExitModel) -> None:
    """With the experts in the way that transformers runs them by default."""
    narrow = load_model((tiny_hf_model(model.config.model_type, torch.float32, SEED), None))
    ids = prompt(7, 9)
    wanted = plain_generate(narrow, ids, 12)
    is_exact(narrow, ids, run(narrow, ids, RandomPolicy(seed=1, skip_probability=0.0), 12)[1], wanted)


def test_ragged_rows_equal_single_runs(model: EarlyExitModel) -> None:
    """Two rows of unequal length, and then both at unequal positions."""
    rows = [prompt(10, 10), prompt(11, 6)]
    more = torch.tensor([[5, 9, 3], [3, 4, 8]])
    with torch.inference_mode():
        cache, every = model.new_cache(16, batch_size=2), torch.arange(2)
        block = model.ragged_block(cache, torch.arange(10)[None].expand(2, 10), every)
        padded = torch.tensor([rows[0], rows[1] + [1] * 4])
        first = model.head(model.run_layers(model.embed(padded, block), 0, N_LAYERS, block))
        block = model.ragged_block(cache, torch.tensor([[10, 11, 12], [6, 7, 8]]), every)
        hidden = model.run_layers(model.embed(more, block), 0, 3, block)
        second = model.head(model.run_layers(hidden, 3, N_LAYERS, block))
        for i, row in enumerate(rows):
            wanted = model.hf_model(torch.tensor([row + more[i].tolist()])).logits[0]
            found = torch.cat([first[i, : len(row)], second[i]])
            torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


def test_a_draft_with_gaps_is_what_a_model_without_the_sublayers_says(model: EarlyExitModel) -> None:
    gaps = SkipSublayers(frozenset({3, 4}), frozenset({4, 5}))
    ids = prompt(0, 12)
    if not in_parts(model):
        with pytest.raises(UnsupportedModelError, match=r"can't be left out of a \w+: its attention or its MLP"):
            lede.generate(model, input_ids=ids, policy=RandomPolicy(gap_probability=0.5), max_new_tokens=4)
        return
    with torch.inference_mode():
        wanted = without(model.hf_model, gaps)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(run_skipping(model, ids, gaps), wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gemma2", {"tie_word_embeddings": False, "final_logit_softcapping": 0.05}),
        ("nanochat", {"final_logit_softcapping": 0.05}),
        ("cohere", {"tie_word_embeddings": False}),
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
        ("opt", {"_remove_final_layer_norm": True, "tie_word_embeddings": False}),
        ("stablelm", {"use_parallel_residual": True}),
        ("granite", {"tie_word_embeddings": True}),
        ("gpt_bigcode", {"multi_query": False}),
        ("phi", {"qk_layernorm": True}),
    ],
    ids=str,
)
def test_settings_that_change_the_ends_of_a_family(family: str, settings: dict[str, Any]) -> None:
    """Tied and untied heads, caps, and norms elsewhere or nowhere."""
    model = load_model((tiny_hf_model(family, seed=SEED, **settings), None))
    ids = prompt(0, 11)
    with torch.inference_mode():
        assert torch.equal(last_layer(model, ids), model.hf_model(torch.tensor([ids])).logits)
    assert run(model, ids, RandomPolicy(seed=3), 12)[1] == plain_generate(model, ids, 12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["gemma", "gemma2", "granite", "cohere", "opt", "biogpt", "mixtral", "gpt_oss"])
def test_scales_are_rounded_as_the_model_rounds_them(family: str, dtype: torch.dtype) -> None:
    model, ids = tiny_model(family, dtype, SEED), prompt(0, 11)
    with torch.inference_mode():
        assert torch.equal(last_layer(model, ids), model.hf_model(torch.tensor([ids])).logits)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "gemma3_text", "phi3", "cohere2", "gpt_oss"])
def test_a2_2_a2_5_bursts_over_the_edge_of_the_window(family: str, attention: str) -> None:
    """The first burst starts three tokens before the window is full, up to one past it, and so do its rewinds."""
    hf_model = tiny_hf_model(family, seed=SEED)
    if attention != hf_model.config._attn_implementation:
        if not hf_model._supports_sdpa:
            pytest.skip(f"{family} has no {attention} attention")
        hf_model.set_attn_implementation(attention)
    model = load_model((hf_model, None))
    assert WINDOW in model.windows
    rejected = 0
    for length in range(WINDOW - 3, WINDOW + 2):
        ids = prompt(20 + length, length)
        out, found = run(model, ids, StaticPolicy(exit_layer=1, draft_length=4), WINDOW + 2)
        assert found == plain_generate(model, ids, WINDOW + 2)
        rejected += sum(r.accepted < r.drafted for r in out.rounds)
    assert rejected


def test_a1_2_positions_of_drafted_tokens_are_those_of_plain_decoding() -> None:
    """Of every layer, with the static policy's own exit layer and more than three rounds."""
    model, ids = load_model((tiny_hf_model("llama", seed=SEED), None)), prompt(3, 6)
    hf_model: Any = model.hf_model
    seen: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def note(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cosine, _ = kwargs["position_embeddings"]
        positions = kwargs["position_ids"][0].tolist()
        assert cosine.shape[1] == len(positions)
        seen.setdefault(layer.self_attn.layer_idx, []).extend(zip(positions, cosine[0], strict=True))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in hf_model.model.layers]
    out, found = run(model, ids, StaticPolicy(), 16)
    drafted = {layer: dict(places) for layer, places in seen.items()}
    seen.clear()
    assert found == plain_generate(model, ids, 16)
    plain = {layer: dict(places) for layer, places in seen.items()}
    for hook in hooks:
        hook.remove()
    assert sum(r.drafted > 0 for r in out.rounds) > 3
    for layer in range(N_LAYERS):
        assert set(plain[layer]) <= set(drafted[layer])
        assert all(torch.equal(drafted[layer][position], table) for position, table in plain[layer].items())


class _Broken(RandomPolicy):
    """Fails in the middle of a burst."""

    def draft(self, state: Any) -> bool:
        if state.n_drafted == 2:
            raise RuntimeError("a policy's mistake")
        return True


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt", "gpt_oss"])
def test_an_exception_while_drafting_leaves_the_model_as_it_was(family: str) -> None:
    model, ids = tiny_model(family, seed=SEED), prompt(5, 12)
    wanted, config = plain_generate(model, ids, 12), model.config.to_dict()
    with pytest.raises(RuntimeError, match="a policy's mistake"):
        run(model, ids, _Broken(skip_probability=0.0, exit_probability=1.0), 12)
    assert plain_generate(model, ids, 12) == wanted
    assert run(model, ids, RandomPolicy(), 12)[1] == wanted
    assert model.config.to_dict() == config


@pytest.mark.parametrize("family", ["gpt2", "opt", "mixtral"])
@pytest.mark.parametrize("layer", [0, -1, N_LAYERS, N_LAYERS + 1])
def test_a1_6_exit_layers_outside_the_range_are_refused(family: str, layer: int) -> None:
    wanted = "exit_layer must be at least 1" if layer < 1 else rf"exit layer {layer} is outside 1\.\.{N_LAYERS - 1}"
    with pytest.raises(ValueError, match=wanted):
        run(tiny_model(family, seed=SEED), prompt(0, 4), StaticPolicy(exit_layer=layer), 4)


def test_a_config_is_enough_to_know_a_family() -> None:
    """No weights are needed to accept one, as none are to refuse one."""
    for name in ALL_FAMILY_NAMES:
        if name in CONFIG_MAPPING:
            assert lede.models.check_supported(tiny_config(name)) is FAMILIES[name]


def test_the_readme_lists_them_all() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    listed = text.split("by hub id or folder: ")[1].split(" (`lede.models.FAMILIES`)")[0]
    assert listed.split(", ") == sorted(FAMILIES)
