"""The supported transformers architectures: a family is a few names, no code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class UnsupportedModelError(ValueError):
    """The model's architecture, or one of its settings, can't be decoded exactly by lede."""


@dataclass(frozen=True)
class Family:
    """Where a transformers architecture keeps its parts, by attribute name."""

    decoder: str = "model"
    """The decoder stack inside the causal LM."""
    layers: str = "layers"
    """The list of decoder layers inside the stack."""
    norm: str = "norm"
    """The final norm inside the stack."""
    rotary: str | None = "rotary_emb"
    """The rotary embedding inside the stack; None for learned positions."""
    positions: str | None = None
    """The learned position embedding inside the stack, added to the token embedding."""
    sliding: bool = False
    """Whether `config.sliding_window` applies to every layer when the config lists no layer types."""
    rotary_by_type: bool = False
    """Whether the rotary embedding takes the layer's type as a third argument."""
    attention: tuple[str, ...] = ("input_layernorm", "self_attn")
    """The norm before a layer's attention, the attention, and a norm after it where there is one.

    What the last of them returns is added to the hidden state; `mlp` likewise."""
    mlp: tuple[str, ...] = ("post_attention_layernorm", "mlp")
    """The norm before a layer's MLP, the MLP, and a norm after it where there is one."""


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(sliding=True),
    "qwen3": Family(),
    "gemma3_text": Family(
        rotary_by_type=True,
        attention=("input_layernorm", "self_attn", "post_attention_layernorm"),
        mlp=("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    ),
    "gpt2": Family(
        decoder="transformer",
        layers="h",
        norm="ln_f",
        rotary=None,
        positions="wpe",
        attention=("ln_1", "attn"),
        mlp=("ln_2", "mlp"),
    ),
    "gpt_neox": Family(decoder="gpt_neox", norm="final_layer_norm", attention=("input_layernorm", "attention")),
}

_ATTENTION_TYPES = {"full_attention", "sliding_attention"}
_STATEFUL_ROPE = {"dynamic", "longrope"}  # their tables depend on the longest position of the call


def check_supported(config: Any) -> Family:
    """Return the family of a transformers config.

    Raises:
        UnsupportedModelError: The architecture, attention type or rope type is not supported; the message names it
            and lists what is.
    """
    model_type = config.model_type
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model type '{model_type}' is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_TYPES)
    if odd:
        raise UnsupportedModelError(f"{model_type} with layers of type {', '.join(odd)} is not supported")
    if getattr(config, "add_cross_attention", False) or getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{model_type} with cross or bidirectional attention is not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    for part in nested:
        if part.get("rope_type") in _STATEFUL_ROPE:
            raise UnsupportedModelError(
                f"{model_type} with rope type '{part['rope_type']}' is not supported: its rotary table depends on the "
                "longest position in a call, so a verified block would differ from single steps"
            )
    return FAMILIES[model_type]
