"""Planted Llamas: text, margins and agreement are what was planted, on weights that are otherwise random."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.gpu_measure import smallest_margin
from benchmarks.gpu_policies import Text
from benchmarks.gpu_shapes import SHAPES, tiny_llama
from benchmarks.planted_model import Plan, planted_llama
from lede.benchmark import repetition_share
from lede.exactness import NOISE
from lede.generation import generate
from lede.layer_agreement import layer_agreement
from lede.models import EarlyExitModel, load_model
from lede.policies import RandomPolicy, StaticPolicy

SHAPE = tiny_llama()
EXIT, FLIP = SHAPE.plan.exit_layer, SHAPE.plan.flip_layer


@cache
def planted(agreement: float, dtype: torch.dtype = torch.float32) -> EarlyExitModel:
    return load_model((planted_llama(SHAPE.config, replace(SHAPE.plan, agreement=agreement), dtype=dtype), None))


def batch_texts(model: EarlyExitModel, ids: list[list[int]], n_tokens: int) -> list[Text]:
    """Greedy texts by transformers' generate, all at once."""
    inputs = torch.tensor(ids)
    out = model.hf_model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=n_tokens, do_sample=False, pad_token_id=0
    )
    return [(prompt, row[len(prompt) :].tolist()) for prompt, row in zip(ids, out, strict=True)]


def prompts(count: int, length: int = 8) -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    ids: list[list[int]] = torch.randint(SHAPE.config.vocab_size, (count, length), generator=draw).tolist()
    return ids


@pytest.mark.parametrize("agreement", [0.6, 0.9])
def test_layers_agree_at_the_planted_rate_and_the_text_does_not_loop(agreement: float) -> None:
    model = planted(agreement)
    texts = batch_texts(model, prompts(16), 65)
    found = layer_agreement(model, texts)
    assert found is not None
    assert found[EXIT - 1 : FLIP - 1] == pytest.approx([agreement] * (FLIP - EXIT), abs=0.04)  # of 1,024 tokens
    assert found[0] == pytest.approx(agreement / 2, abs=0.06)
    assert found[FLIP - 1 :] == (1.0,) * (model.n_layers - FLIP + 1)
    assert max(repetition_share(new) for _, new in texts) < 0.3
    assert len({tuple(new) for _, new in texts}) > 12  # two may start at the same place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_margins_are_far_above_the_noise_and_texts_exact(dtype: torch.dtype) -> None:
    model = planted(0.7, dtype)
    texts = batch_texts(model, prompts(4), 32)
    assert smallest_margin(model, texts) > 5 * NOISE[torch.bfloat16]
    assert texts == batch_texts(planted(0.7), prompts(4), 32)
    ids, wanted = texts[0]
    for policy in (None, StaticPolicy(exit_layer=EXIT, draft_length=4), RandomPolicy(seed=0)):
        out = generate(model, input_ids=ids, policy=policy, max_new_tokens=32)
        assert out.sequences[0, 8:].tolist() == wanted
        assert policy is None or 0 < out.stats.accepted < out.stats.drafted


@pytest.mark.parametrize(("back", "layers"), [(1, EXIT), (2, FLIP)])
def test_the_text_depends_on_earlier_tokens_through_the_cache(back: int, layers: int) -> None:
    """Nothing but that token's keys and values can tell: a cache that loses them writes another text."""
    model = planted(0.2)  # every token is hard
    ids = torch.tensor(prompts(32, 12))
    changed = ids.clone()
    changed[:, -1 - back] = (changed[:, -1 - back] + 1) % SHAPE.config.vocab_size
    with torch.inference_mode():
        after = []
        for each in (ids, changed):
            block = model.block(model.new_cache(12, len(each)), 0, 12)
            hidden = model.run_layers(model.embed(each, block), 0, layers, block)
            after.append(model.head(hidden[:, -1:]).argmax(-1))
    differ = (after[0] != after[1]).float().mean()
    assert 0.15 < float(differ) < 0.85  # where the bits of the two tokens differ


def test_weights_are_seeded_and_the_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    first = torch.rand(1)
    torch.manual_seed(0)
    one, same, other = (planted_llama(SHAPE.config, replace(SHAPE.plan, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), first)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert not one.training


def changed(**settings: object) -> LlamaConfig:
    return LlamaConfig(**{**SHAPE.config.to_dict(), **settings})


@pytest.mark.parametrize(
    ("config", "plan", "said"),
    [
        (SHAPE.config, Plan(4, 4), "exit_layer 4 and flip_layer 4 must be ascending within 1..8"),
        (SHAPE.config, Plan(2, 9), "within 1..8"),
        (SHAPE.config, Plan(2, 7, agreement=0.1), "agreement must be within 0.2..1, got 0.1"),
        (changed(tie_word_embeddings=True), SHAPE.plan, "tie_word_embeddings=False"),
        (changed(intermediate_size=64), SHAPE.plan, "got 256 and 64"),
        (changed(num_attention_heads=64, num_key_value_heads=64, head_dim=4), SHAPE.plan, "give wider heads"),
    ],
)
def test_what_does_not_fit_is_refused(config: LlamaConfig, plan: Plan, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        planted_llama(config, plan)


def test_full_shapes_have_the_weights_of_their_models() -> None:
    bytes_of = {name: SHAPES[name]().n_bytes(torch.bfloat16) / 1e9 for name in ("llama-3.2-1b", "llama-2-7b")}
    assert bytes_of == {"llama-3.2-1b": pytest.approx(2.997, abs=1e-3), "llama-2-7b": pytest.approx(13.476, abs=1e-3)}
    for name in SHAPES:
        SHAPES[name]().plan.check(SHAPES[name]().config)
