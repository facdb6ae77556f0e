"""Fingerprints: one model in another dtype passes, another model does not."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import lede.checkpoint
from lede.checkpoint import check_fingerprint, compare_fingerprints, fingerprint
from lede.generation import generate
from lede.models import EarlyExitModel
from lede.policies import StaticPolicy
from tests.tiny_models import FAMILY_NAMES, tiny_hf_model, tiny_model

torch.set_num_threads(1)


def tokenizer(*merges: tuple[str, str], extra: tuple[str, ...] = ()) -> Any:
    words = ["a", "b", "c", "ab", "bc", "abc", *extra]
    model = BPE({word: i for i, word in enumerate(words)}, list(merges))
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


def test_it_holds_what_json_keeps() -> None:
    found = fingerprint(tiny_model("llama"))
    assert json.loads(json.dumps(found)) == found
    assert list(found) == ["name", "architecture", "tokenizer", "logits", "dtype"]
    assert found["architecture"] == {
        "n_layers": 6,
        "model_type": "llama",
        "hidden_size": 32,
        "vocab_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    assert found["tokenizer"] is None
    assert found["dtype"] == "float64"
    assert len(found["logits"]) == len(set(found["logits"])) == 64


def test_the_logits_are_the_models_own() -> None:
    model = tiny_model("gpt_neox")
    ids = torch.tensor([[14, 28, 42, 56, 71, 85, 99, 113]])
    with torch.no_grad():
        logits = model.hf_model(ids).logits[0].flatten()
    assert fingerprint(model)["logits"] == pytest.approx(logits[8::16].tolist(), abs=1e-12)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_dtype_changes_nothing_and_a_seed_does(family: str) -> None:
    recorded = fingerprint(tiny_model(family))
    for dtype in (torch.float32, torch.bfloat16):
        assert compare_fingerprints(recorded, fingerprint(tiny_model(family, dtype))) == []
    for dtype in (torch.float64, torch.bfloat16):
        differences = compare_fingerprints(recorded, fingerprint(tiny_model(family, dtype, seed=1)))
        assert len(differences) == 1
        assert differences[0].startswith("logits ")


def test_a_little_more_training_is_another_model() -> None:
    hf_model = tiny_hf_model("llama", torch.float32)
    recorded = fingerprint(EarlyExitModel(hf_model))
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    assert compare_fingerprints(recorded, fingerprint(EarlyExitModel(hf_model)))[0].startswith("logits ")


def test_logits_that_are_not_numbers_never_match() -> None:
    recorded = fingerprint(tiny_model("llama"))
    broken = {**recorded, "logits": [math.nan] * 64}
    assert compare_fingerprints(recorded, broken) != []
    assert compare_fingerprints(recorded, {**recorded, "logits": recorded["logits"][:32]}) != []
    hf_model = tiny_hf_model("llama")
    with torch.no_grad():
        hf_model.lm_head.weight.fill_(math.inf)
    with pytest.raises(ValueError, match="gives logits that are not finite"):
        fingerprint(EarlyExitModel(hf_model))


def test_tokenizers_differ_by_vocabulary_and_merges_alone() -> None:
    hf_model = tiny_hf_model("llama")

    def of(own: Any) -> dict[str, Any]:
        return fingerprint(EarlyExitModel(hf_model, own))

    recorded = of(tokenizer(("a", "b"), ("ab", "c")))
    assert compare_fingerprints(recorded, of(tokenizer(("a", "b"), ("ab", "c")))) == []
    assert compare_fingerprints(recorded, of(None)) == []
    assert compare_fingerprints(of(None), recorded) == []
    for other in (tokenizer(("b", "c"), ("a", "bc")), tokenizer(("a", "b"), ("ab", "c"), extra=("ca",))):
        assert compare_fingerprints(recorded, of(other))[0].startswith("tokenizer ")


def test_every_difference_of_architecture_is_named() -> None:
    recorded = fingerprint(tiny_model("llama"))
    differences = compare_fingerprints(recorded, fingerprint(tiny_model("gpt2")))
    assert differences == ["model_type llama and gpt2", "num_key_value_heads 2 and None"]


def test_a_bound_policy_runs_on_its_model_alone() -> None:
    model = EarlyExitModel(tiny_hf_model("llama"), name="ours")
    unbound = StaticPolicy(exit_layer=2)
    policy = unbound.bind(model)
    assert policy.bound
    assert policy.config.candidates == (1, 2, 3)
    assert not unbound.bound
    assert unbound.config.candidates is None
    other = EarlyExitModel(tiny_hf_model("llama", seed=1), name="theirs")
    for check in (policy, copy.deepcopy(policy)):
        with pytest.raises(ValueError, match="this static policy belongs to model 'ours', not to 'theirs': logits "):
            generate(other, input_ids=[1, 2, 3], policy=check, max_new_tokens=2)
    check_fingerprint(unbound, other)
    check_fingerprint(policy, EarlyExitModel(tiny_hf_model("llama", torch.float32), name="a copy"))


def test_a_pair_that_fitted_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = tiny_model("llama"), tiny_model("llama", torch.float32)
    policy = StaticPolicy(exit_layer=2).bind(model)
    seen: list[EarlyExitModel] = []

    def counted(of: EarlyExitModel) -> dict[str, Any]:
        seen.append(of)
        return fingerprint(of)

    monkeypatch.setattr(lede.checkpoint, "fingerprint", counted)
    for run_on in (model, model, other, other, model):
        check_fingerprint(policy, run_on)
    assert seen == [model, other, model]
    policy.fingerprint = fingerprint(tiny_model("gpt2"))
    with pytest.raises(ValueError, match="belongs to model 'GPT2LMHeadModel', not to 'LlamaForCausalLM'"):
        check_fingerprint(policy, model)
