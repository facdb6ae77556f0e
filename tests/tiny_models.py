"""Tiny random models of every family, built from configs, whose early layers are right about half of the time.

A plain random model agrees with itself at every layer or at none. Scaling the first two layers up more than the others
makes the exits informative but fallible, which is what the exactness suites need.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from lede.models import EarlyExitModel, load_model

N_LAYERS = 6
VOCAB_SIZE = 128
WINDOW = 8
FAMILY_NAMES = ("llama", "mistral", "qwen3", "gemma3_text", "gpt2", "gpt_neox")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}


def tiny_config(family: str) -> Any:
    """A transformers config of the family: 6 layers, width 32, vocabulary 128, windows of 8 where it slides."""
    configs: dict[str, Any] = {
        "llama": lambda: LlamaConfig(**_SIZES, **_GROUPED, **_IDS),
        "mistral": lambda: MistralConfig(**_SIZES, **_GROUPED, **_IDS, sliding_window=WINDOW),
        "qwen3": lambda: Qwen3Config(**_SIZES, **_GROUPED, **_IDS, head_dim=8),
        "gemma3_text": lambda: Gemma3TextConfig(
            **_SIZES,
            **_GROUPED,
            **_IDS,
            head_dim=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        ),
        "gpt2": lambda: GPT2Config(
            vocab_size=VOCAB_SIZE, n_embd=32, n_layer=N_LAYERS, n_head=4, n_positions=256, **_IDS
        ),
        "gpt_neox": lambda: GPTNeoXConfig(**_SIZES, **_IDS),
    }
    return configs[family]()


def tiny_hf_model(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A random transformers model of the family, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    layers = (
        model.transformer.h
        if family == "gpt2"
        else model.gpt_neox.layers
        if family == "gpt_neox"
        else model.model.layers
    )
    with torch.no_grad():
        for i, layer in enumerate(layers):
            for parameter in layer.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(8 if i < 2 else 3)
            if family == "gemma3_text" and i >= 2:  # its post norms would undo the scaling
                layer.post_attention_layernorm.weight.fill_(-0.7)
                layer.post_feedforward_layernorm.weight.fill_(-0.7)
    return model.to(dtype).eval()


@cache
def tiny_model(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> EarlyExitModel:
    """The same as an EarlyExitModel without tokenizer; one object for each set of arguments, do not change it."""
    return load_model((tiny_hf_model(family, dtype, seed), None))


def prompt(seed: int, length: int) -> list[int]:
    """Random prompt ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()


def plain_generate(model: EarlyExitModel, ids: list[int], max_new_tokens: int, **kwargs: Any) -> list[int]:
    """New tokens of transformers' own greedy `generate`."""
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
    return [int(token) for token in out[0, len(ids) :]]
