"""A prompt prefilled once and decoded many times: what comes out is what a prefill of its own would give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from lede.cache import KVCache
from lede.decoding import Decoder, Prefill
from lede.generation import generate, prefill
from lede.models import EarlyExitModel, load_model
from lede.policies import Policy, RandomPolicy, StaticPolicy
from lede.verification import Chooser, TorchSource, Warp
from tests.tiny_models import FAMILY_NAMES, plain_generate, prompt, tiny_hf_model, tiny_model

POLICIES: dict[str, Callable[[], Policy | None]] = {
    "plain": lambda: None,
    "static": lambda: StaticPolicy(exit_layer=2, draft_length=3),
    "random": lambda: RandomPolicy(seed=2, gap_probability=0.3),
}


def contents(cache: KVCache) -> list[torch.Tensor]:
    """Copies of all buffers."""
    with torch.inference_mode():
        return [buffer.clone() for buffer in (*cache.keys, *cache.values) if buffer is not None]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_and_rounds_are_the_same(family: str, policy: str, temperature: float) -> None:
    """Also in float32, where another kernel would show, and the second time, when a decoding went before."""
    model, ids, make = tiny_model(family, torch.float32), prompt(0, 17), POLICIES[policy]
    settings: dict[str, Any] = {"max_new_tokens": 30, "temperature": temperature, "seed": 3}
    wanted = generate(model, input_ids=ids, policy=make(), **settings)
    ready = prefill(model, ids)
    for _ in range(2):
        found = generate(model, input_ids=ids, policy=make(), prefilled=ready, **settings)
        assert torch.equal(found.sequences, wanted.sequences)
        assert found.rounds == wanted.rounds
        assert found.stats.head_reads == wanted.stats.head_reads


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_keys_and_values_are_bit_equal_and_the_prefill_stays_as_it_is(family: str) -> None:
    model, ids = tiny_model(family, torch.float32), prompt(1, 17)
    ready = prefill(model, torch.tensor([ids]))
    before = contents(ready.cache)
    assert ready.cache.capacity == 17
    caches = []
    for prefilled in (ready, None, ready):
        decoder = Decoder(model, StaticPolicy(exit_layer=3), Chooser(Warp(), TorchSource(torch.Generator())))
        decoder.policy.check_model(model)  # type: ignore[union-attr]
        for _ in decoder.decode(ids, 20, prefilled):
            pass
        caches.append(decoder.cache)
    assert len({id(cache) for cache in caches}) == 3
    assert equal(contents(caches[0]), contents(caches[1]))
    assert equal(contents(caches[1]), contents(caches[2]))
    assert equal(contents(ready.cache), before)
    assert ready.cache.lengths == [17] * model.n_layers


def test_nothing_of_the_prompt_runs_again() -> None:
    hf_model = tiny_hf_model("llama")
    model, ids = load_model((hf_model, None)), prompt(0, 17)
    widths: list[int] = []
    hf_model.model.layers[0].register_forward_hook(lambda _, args, __: widths.append(args[0].shape[1]))
    ready = prefill(model, ids)
    assert widths == [17]
    widths.clear()
    out = generate(model, input_ids=ids, prefilled=ready, max_new_tokens=9)
    assert widths == [1] * 8
    assert out.sequences[0, 17:].tolist() == plain_generate(model, ids, 9)


def test_a_prefill_of_a_decoder_is_the_same() -> None:
    model, ids = tiny_model("gpt2"), prompt(0, 7)
    decoder = Decoder(model, None, Chooser(Warp(), TorchSource(torch.Generator())))
    one, other = decoder.prefill(ids), prefill(model, ids)
    assert equal(contents(one.cache), contents(other.cache))
    assert torch.equal(one.logits, other.logits)
    assert one.ids == other.ids == tuple(ids)


def another_model(model: EarlyExitModel) -> Prefill:
    return prefill(load_model((copy.deepcopy(model.hf_model), None)), prompt(0, 7))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model: prefill(model, prompt(1, 7)),
            r"another prompt \(7 tokens\) than the one to decode \(7 tokens\)",
        ),
        (lambda model: prefill(model, prompt(0, 6)), r"another prompt \(6 tokens\)"),
        (another_model, "the prefill was made by EarlyExitModel"),
    ],
    ids=["other ids", "shorter", "other model"],
)
def test_a_prefill_of_something_else_is_refused(make: Callable[[EarlyExitModel], Prefill], message: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=message):
        generate(model, input_ids=prompt(0, 7), prefilled=make(model), max_new_tokens=4)


def test_an_unusable_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        prefill(tiny_model("llama"), [])
    with pytest.raises(ValueError, match="the vocabulary has 128 ids"):
        prefill(tiny_model("llama"), [128])


def test_what_is_no_model_no_prefill_or_too_long_is_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"model must come from lede\.load_model, got LlamaForCausalLM"):
        prefill(cast(EarlyExitModel, model.hf_model), prompt(0, 5))
    with pytest.raises(ValueError, match=f"more than the model's {model.max_positions} positions"):
        prefill(model, [1] * (model.max_positions + 1))
    with pytest.raises(ValueError, match=r"prefilled must come from lede\.generation\.prefill, got dict"):
        generate(model, input_ids=prompt(0, 5), prefilled=cast(Prefill, {}), max_new_tokens=2)


def test_clones_are_independent_and_refuse_what_does_not_fit() -> None:
    model = tiny_model("mistral")
    cache = prefill(model, prompt(0, 11)).cache
    clone = cache.clone(20)
    assert (clone.capacity, clone.lengths, clone.windows) == (20, cache.lengths, cache.windows)
    before = contents(cache)
    with torch.inference_mode():
        for buffer in (*clone.keys, *clone.values):
            assert buffer is not None
            assert not buffer[:, :, 11:].any()
            buffer.fill_(9.0)
    assert equal(contents(cache), before)
    with pytest.raises(ValueError, match="the cache holds 11 tokens, a clone of capacity 10 can't"):
        cache.clone(10)
    model.ragged_block(cache, torch.tensor([[3]]), torch.tensor([0]))
    cache.place_ragged(torch.tensor([[3]]), torch.tensor([0]), 4)
    with pytest.raises(ValueError, match="can't be cloned"):
        cache.clone(20)


def test_only_slots_in_use_are_cloned() -> None:
    """What a rewind forgot is not carried over."""
    cache = prefill(tiny_model("llama"), prompt(0, 11)).cache
    cache.rewind(6)
    clone = cache.clone(8)
    assert clone.lengths == [6] * cache.n_layers
    for mine, others in zip((*cache.keys, *cache.values), (*clone.keys, *clone.values), strict=True):
        assert mine is not None
        assert others is not None
        assert torch.equal(mine[:, :, :6], others[:, :, :6])
        assert not others[:, :, 6:].any()
