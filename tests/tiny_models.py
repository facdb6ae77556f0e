"""Tiny random models of every family, built from configs, whose early layers are right about half of the time.

A plain random model agrees with itself at every layer or at none. Scaling the first two layers up more than the others
makes the exits informative but fallible, which is what the exactness suites need.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lede.families import FAMILIES
from lede.models import EarlyExitModel, load_model

N_LAYERS = 6
VOCAB_SIZE = 128
WINDOW = 8
FAMILY_NAMES = ("llama", "mistral", "qwen3", "gemma3_text", "gpt2", "gpt_neox")
"""The families that every suite runs over."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_WIDTH: dict[str, Any] = {**_GROUPED, "head_dim": 8}
_SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
_HALF_SLIDING: dict[str, Any] = {
    **_SLIDING,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
_GPT2: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": N_LAYERS, "n_head": 4, "n_positions": 256}
_GRANITE: dict[str, Any] = {
    **_GROUPED,
    **{"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
}

_SETTINGS: dict[str, dict[str, Any]] = {
    "apertus": _GROUPED,
    "arcee": _GROUPED,
    "biogpt": _SIZES,
    "codegen": {**_GPT2, "rotary_dim": 4},
    "cohere": {**_GROUPED, "logit_scale": 0.5},
    "cohere2": {**_GROUPED, **_HALF_SLIDING, "logit_scale": 0.5},
    "dots1": {**_GROUPED, **_ROUTED, **_HALF_SLIDING},
    "ernie4_5": _WIDTH,
    "ernie4_5_moe": {
        **_GROUPED,
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
        "moe_layer_start_index": 1,
    },
    "exaone4": {**_GROUPED, **_HALF_SLIDING},
    "flex_olmo": {**_GROUPED, **_EXPERTS},
    "gemma": _WIDTH,
    "gemma2": {**_WIDTH, **_HALF_SLIDING, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**_WIDTH, **_HALF_SLIDING},
    "glm": _WIDTH,
    "glm4": _WIDTH,
    "glm4_moe": {**_WIDTH, **_ROUTED},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": _SIZES,
    "gpt_oss": {**_WIDTH, **_HALF_SLIDING, **_LOCAL_EXPERTS},
    "gptj": {**_GPT2, "rotary_dim": 4},
    "granite": _GRANITE,
    "granitemoe": {**_GRANITE, **_LOCAL_EXPERTS},
    "granitemoeshared": {**_GRANITE, **_LOCAL_EXPERTS, "shared_intermediate_size": 32},
    "helium": _WIDTH,
    "llama": _GROUPED,
    "minimax_m2": {**_WIDTH, **_LOCAL_EXPERTS, "rotary_dim": 8},
    "ministral": {**_WIDTH, **_HALF_SLIDING},
    "mistral": {**_GROUPED, **_SLIDING},
    "mixtral": {**_GROUPED, **_LOCAL_EXPERTS, **_SLIDING},
    "nanochat": _GROUPED,
    "nemotron": _WIDTH,
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "olmo3": {**_GROUPED, **_HALF_SLIDING},
    "olmoe": {**_GROUPED, **_EXPERTS},
    "opt": {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 16},
    "persimmon": _SIZES,
    "phi": _GROUPED,
    "phi3": {**_GROUPED, **_SLIDING},
    "phimoe": {**_GROUPED, **_LOCAL_EXPERTS, **_SLIDING},
    "qwen2": {**_GROUPED, **_HALF_SLIDING, "use_sliding_window": True},
    "qwen2_moe": {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": _WIDTH,
    "qwen3_moe": {**_WIDTH, **_EXPERTS},
    "seed_oss": _WIDTH,
    "smollm3": {**_GROUPED, "no_rope_layers": [1, 1, 0] * 2},
    "solar_open": {**_WIDTH, **_ROUTED},
    "stablelm": _GROUPED,
    "starcoder2": {**_GROUPED, **_SLIDING},
}
ALL_FAMILY_NAMES = tuple(_SETTINGS)
"""All families, in the order of their names; `tests/lede/test_families.py` runs over these."""


def tiny_config(family: str, **settings: Any) -> Any:
    """A transformers config of the family: 6 layers, width 32, vocabulary 128, windows of 8 where it slides."""
    return AutoConfig.for_model(family, **{**_SETTINGS[family], **_IDS, **settings})


def tiny_hf_model(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **settings: Any) -> Any:
    """A random transformers model of the family, in evaluation mode.

    Args:
        family: Its name.
        dtype: Of the weights; in float64 experts run one by one, as only that way of theirs takes it.
        seed: Of the weights.
        **settings: Of the config, over the tiny ones.
    """
    config = tiny_config(family, **settings)
    experts = any(hasattr(config, name) for name in ("num_experts_per_tok", "moe_k"))
    one_by_one = {"experts_implementation": "eager"} if experts and dtype == torch.float64 else {}
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, which gpt_bigcode once used
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, **one_by_one)
    parts = FAMILIES[family]
    norms = [s.norm_after for s in (parts.attention, parts.mlp) if s is not None and s.norm_after is not None]
    with torch.no_grad():
        for i, layer in enumerate(model.get_submodule(parts.decoder).get_submodule(parts.layers)):
            for parameter in layer.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(8 if i < 2 else 3)
            if i >= 2:  # norms behind a sublayer would undo the scaling
                for norm in norms:
                    weight = layer.get_submodule(norm).weight
                    weight.fill_(-0.7 if family.startswith("gemma") else 0.3)  # gemma adds 1
    return model.to(dtype).eval()


@cache
def tiny_model(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> EarlyExitModel:
    """The same as an EarlyExitModel without tokenizer; one object for each set of arguments, do not change it."""
    model = load_model((tiny_hf_model(family, dtype, seed), None))
    _PLAIN[id(model)] = {}
    return model


_PLAIN: dict[int, dict[tuple[tuple[int, ...], int], list[int]]] = {}
"""Plain texts of the models that nobody changes, by prompt and budget: many tests compare with the same ones."""


def prompt(seed: int, length: int) -> list[int]:
    """Random prompt ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()


def plain_generate(model: EarlyExitModel, ids: list[int], max_new_tokens: int, **kwargs: Any) -> list[int]:
    """New tokens of transformers' own greedy `generate`."""
    known, key = None if kwargs else _PLAIN.get(id(model)), (tuple(ids), max_new_tokens)
    if known is not None and key in known:
        return list(known[key])
    inputs = torch.tensor([ids])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about flags that its own defaults set
        out = model.hf_model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
            **kwargs,
        )
    text = [int(token) for token in out[0, len(ids) :]]
    if known is not None:
        known[key] = list(text)
    return text
