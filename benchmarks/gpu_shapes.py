"""The shapes that the GPU benchmark decodes, built from configs alone, and how much of everything it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.planted_model import Plan

_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True)
class Shape:
    """A Llama to build."""

    config: LlamaConfig
    """Its shape. The head is apart from the embedding in all of them, which a pass does not notice."""
    plan: Plan
    """What is planted."""

    def n_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights, but for norms."""
        c = self.config
        heads, grouped = c.num_attention_heads, c.num_key_value_heads or c.num_attention_heads
        attention = 2 * c.hidden_size * (c.head_dim or c.hidden_size // heads) * (heads + grouped)
        layer = attention + 3 * c.hidden_size * c.intermediate_size
        return (c.num_hidden_layers * layer + 2 * c.vocab_size * c.hidden_size) * dtype.itemsize


@dataclass(frozen=True)
class Effort:
    """How much is decoded, and how much is learned on the bundled model."""

    prompts: int
    """Prompts that are timed in bfloat16."""
    tokens: int
    """New tokens of each."""
    checked_prompts: int
    """Prompts that are decoded in float32."""
    checked_tokens: int
    """New tokens of each."""
    tuning_prompts: int
    """Further prompts that the policies are tuned on, with as many tokens as the timed ones."""
    prompt_tokens: int
    """Tokens of a prompt of a planted model."""
    train_prompts: int
    """Prompts of the bundled model that traces are collected on; a quarter as many are validated on."""
    rollout_prompts: int
    """Prompts that the environment is played on."""
    learned_tokens: int
    """New tokens of each of them."""
    repeats: int
    """Times that an operation is measured for the cost profile."""
    steps: int
    """Updates of a Q-network."""


FULL = Effort(4, 96, 2, 64, 3, 32, 24, 8, 48, 2, 600)
TINY = Effort(1, 16, 1, 16, 1, 8, 4, 2, 12, 1, 10)


def llama_3_2_1b() -> Shape:
    """16 layers, width 2,048, grouped queries, a vocabulary of 128,256: a head read weighs 4.3 layers."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=False,
        **_IDS,
    )
    return Shape(config, Plan(exit_layer=4, flip_layer=15, agreement=0.85))


def llama_2_7b() -> Shape:
    """32 layers, width 4,096, a vocabulary of 32,000: a head read weighs 0.65 of a layer."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        **_IDS,
    )
    return Shape(config, Plan(exit_layer=8, flip_layer=31, agreement=0.9))


def tiny_llama() -> Shape:
    """8 layers, width 256, grouped queries, a vocabulary of 512: for a look at the steps on a CPU."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        **_IDS,
    )
    return Shape(config, Plan(exit_layer=2, flip_layer=7, agreement=0.8))


SHAPES = {"llama-3.2-1b": llama_3_2_1b, "llama-2-7b": llama_2_7b, "tiny": tiny_llama}
"""Every shape by name."""
