"""Adapters of the peft package: the adapted model is decoded as peft itself decodes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lede
from lede.adapters import adapted
from lede.checkpoint import check_fingerprint
from lede.families import UnsupportedModelError
from lede.fingerprints import compare_fingerprints, fingerprint
from lede.models import EarlyExitModel, load_model
from lede.policies import RandomPolicy, StaticPolicy
from tests.tiny_models import plain_generate, prompt, tiny_hf_model

peft = pytest.importorskip("peft")
# peft 0.21 asks transformers 5.24 for names that it deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def lora(family: str = "llama", target: str | list[str] = "all-linear", **settings: Any) -> Any:
    """A tiny model with a LoRA adapter that does something, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=target, init_lora_weights=False, task_type="CAUSAL_LM", **settings
        )
        return peft.get_peft_model(tiny_hf_model(family), config, autocast_adapter_dtype=False).eval()


def new_tokens(model: EarlyExitModel, ids: list[int], **settings: Any) -> list[int]:
    out = lede.generate(model, input_ids=ids, max_new_tokens=24, **settings)
    return out.sequences[0, len(ids) :].tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "opt"])
@pytest.mark.parametrize("state", ["beside", "merged", "unloaded"])
def test_text_is_what_peft_generates(family: str, state: str) -> None:
    target: Any = ["q_proj", "v_proj", "down_proj"] if family == "gemma3_text" else "all-linear"
    hf_model = lora(family, target, modules_to_save=["lm_head"] if family == "llama" else None)
    ids, base = prompt(0, 9), plain_generate(load_model((tiny_hf_model(family), None)), prompt(0, 9), 24)
    inputs = torch.tensor([ids])
    wanted = hf_model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
    )[0, len(ids) :].tolist()
    assert wanted != base
    if state == "merged":
        hf_model.merge_adapter()
    elif state == "unloaded":
        hf_model = hf_model.merge_and_unload()
    model = load_model((hf_model, None))
    gaps = 0.0 if family == "opt" else 0.4
    for policy in (None, StaticPolicy(exit_layer=2), RandomPolicy(seed=1, gap_probability=gaps)):
        assert new_tokens(model, ids, policy=policy) == wanted


def test_the_last_layer_is_bit_equal_to_peft() -> None:
    hf_model, ids = lora("gemma3_text"), prompt(1, 15)
    model = load_model((hf_model, None))
    assert model.hf_model is hf_model.get_base_model()
    with torch.inference_mode():
        block = model.block(model.new_cache(15), 0, 15)
        found = model.head(model.run_layers(model.embed(torch.tensor([ids]), block), 0, model.n_layers, block))
        assert torch.equal(found, hf_model(torch.tensor([ids])).logits)


def test_the_adapted_model_is_another_model_than_its_base() -> None:
    """By its fingerprint, merged or not; switched off it is the base again."""
    base, hf_model = load_model((tiny_hf_model("llama"), None)), lora()
    model = load_model((hf_model, None))
    with hf_model.disable_adapter():
        assert not compare_fingerprints(fingerprint(base), fingerprint(model))
    theirs = fingerprint(model)
    assert compare_fingerprints(fingerprint(base), theirs)
    merged = load_model((hf_model.merge_and_unload(), None))
    assert not compare_fingerprints(theirs, fingerprint(merged))
    for owner, others in ((base, (model, merged)), (merged, (base,))):
        policy = StaticPolicy()
        policy.fingerprint = fingerprint(owner)
        check_fingerprint(policy, owner)
        for other in others:
            with pytest.raises(ValueError, match="belongs to model"):
                new_tokens(other, prompt(0, 4), policy=policy)


def test_adapters_fresh_from_training_mode_are_refused() -> None:
    """peft adds its dropout in training mode to a model in evaluation mode."""
    config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    hf_model = peft.get_peft_model(tiny_hf_model("llama"), config)
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        load_model((hf_model, None))
    load_model((hf_model.eval(), None))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("PromptTuningConfig", "'default' of type PROMPT_TUNING is not supported: it adds virtual tokens"),
        ("PrefixTuningConfig", "'default' of type PREFIX_TUNING is not supported: it adds virtual tokens"),
        ("AdaptionPromptConfig", "'default' of type ADAPTION_PROMPT is not supported: it adds virtual tokens"),
    ],
)
def test_adapters_that_are_no_part_of_the_layers_are_refused(config: str, message: str) -> None:
    settings = {"adapter_len": 2, "adapter_layers": 2} if config[0] == "A" else {"num_virtual_tokens": 2}
    hf_model = peft.get_peft_model(
        tiny_hf_model("llama", torch.float32), getattr(peft, config)(task_type="CAUSAL_LM", **settings)
    )
    with pytest.raises(UnsupportedModelError, match=message):
        load_model((hf_model.eval(), None))


def test_activated_lora_is_refused() -> None:
    hf_model = lora(alora_invocation_tokens=[3, 4])
    with pytest.raises(UnsupportedModelError, match="switches on at a position"):
        load_model((hf_model, None))


def test_other_models_are_left_alone() -> None:
    hf_model = tiny_hf_model("llama")
    assert adapted(hf_model) is hf_model
