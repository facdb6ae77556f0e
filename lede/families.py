"""The supported transformers architectures: a family is a few names, no code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class UnsupportedModelError(ValueError):
    """The model's architecture, or one of its settings, can't be decoded exactly by lede."""


class Sublayer(NamedTuple):
    """A layer's attention or MLP: what the last of its modules returns is added to the hidden state."""

    norm: str | None
    """The norm before it; None when it has none, or shares one that the other sublayer needs too."""
    module: str
    """The attention or the MLP itself."""
    norm_after: str | None = None
    """The norm between it and the sum, where there is one."""


_ATTENTION = Sublayer("input_layernorm", "self_attn")
_MLP = Sublayer("post_attention_layernorm", "mlp")


@dataclass(frozen=True)
class Family:
    """Where a transformers architecture keeps its parts, by attribute name, and what it does around its layers."""

    decoder: str = "model"
    """The decoder stack inside the causal LM."""
    layers: str = "layers"
    """The list of decoder layers inside the stack; this and the next ones may be dotted."""
    norm: str = "norm"
    """The final norm inside the stack; a model where it is None goes without."""
    rotary: str | None = "rotary_emb"
    """The rotary embedding inside the stack; None for learned positions, absent where the attention rotates alone."""
    positions: str | None = None
    """The learned position embedding inside the stack, added to the token embedding."""
    projections: tuple[str, str] | None = None
    """The projections of the stack behind the token embedding and behind the final norm; either may be None."""
    embedding_norm: str | None = None
    """The norm of the stack that the embedding goes through."""
    embedding_scale: str | None = None
    """The setting that embeddings are multiplied by."""
    root_width: bool = False
    """Whether embeddings are multiplied by the root of their width, by the embedding itself or behind it."""
    logits_times: str | None = None
    """The setting that logits are multiplied by."""
    logits_over: str | None = None
    """The setting that logits are divided by."""
    sliding: bool = False
    """Whether `config.sliding_window` applies to every layer when the config lists no layer types."""
    rotary_by_type: bool = False
    """Whether the rotary embedding takes the layer's type as a third argument, where it knows that argument."""
    attention: Sublayer | None = _ATTENTION
    """A layer's attention; None where no draft can leave it out."""
    mlp: Sublayer | None = _MLP
    """A layer's MLP; None where no draft can leave it out."""
    mlp_pair: bool = False
    """Whether the MLP returns something beside what it adds, as a second value."""


_POST_NORMS = Family(
    attention=Sublayer(None, "self_attn", "post_attention_layernorm"),
    mlp=Sublayer(None, "mlp", "post_feedforward_layernorm"),
)
_GEMMA: dict[str, Any] = {
    "attention": Sublayer("input_layernorm", "self_attn", "post_attention_layernorm"),
    "mlp": Sublayer("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
}
# attention and MLP read one norm: neither can do without it
_SHARED_NORM: dict[str, Any] = {"attention": Sublayer(None, "self_attn"), "mlp": Sublayer(None, "mlp")}
_GPT2: dict[str, Any] = {
    "decoder": "transformer",
    "layers": "h",
    "norm": "ln_f",
    "rotary": None,
    "positions": "wpe",
    "attention": Sublayer("ln_1", "attn"),
    "mlp": Sublayer("ln_2", "mlp"),
}
_GPTJ: dict[str, Any] = {
    "decoder": "transformer",
    "layers": "h",
    "norm": "ln_f",
    "attention": Sublayer(None, "attn"),
    "mlp": Sublayer(None, "mlp"),
}
_GRANITE: dict[str, Any] = {"embedding_scale": "embedding_multiplier", "logits_over": "logits_scaling"}
_GRANITE_MOE = {**_GRANITE, "mlp": Sublayer("post_attention_layernorm", "block_sparse_moe")}

FAMILIES: dict[str, Family] = {
    "apertus": Family(
        attention=Sublayer("attention_layernorm", "self_attn"), mlp=Sublayer("feedforward_layernorm", "mlp")
    ),
    "arcee": Family(),
    "biogpt": Family(
        decoder="biogpt",
        norm="layer_norm",
        rotary=None,
        positions="embed_positions",
        attention=Sublayer("self_attn_layer_norm", "self_attn"),
        mlp=None,
    ),
    "codegen": Family(**_GPTJ),
    "cohere": Family(logits_times="logit_scale", **_SHARED_NORM),
    "cohere2": Family(logits_times="logit_scale", **_SHARED_NORM),
    "dots1": Family(),
    "ernie4_5": Family(),
    "ernie4_5_moe": Family(),
    "exaone4": _POST_NORMS,
    "flex_olmo": _POST_NORMS,
    "gemma": Family(root_width=True),
    "gemma2": Family(root_width=True, **_GEMMA),
    "gemma3_text": Family(rotary_by_type=True, root_width=True, **_GEMMA),
    "glm": Family(),
    "glm4": Family(
        attention=Sublayer("input_layernorm", "self_attn", "post_self_attn_layernorm"),
        mlp=Sublayer("post_attention_layernorm", "mlp", "post_mlp_layernorm"),
    ),
    "glm4_moe": Family(),
    "gpt2": Family(**_GPT2),
    "gpt_bigcode": Family(**_GPT2),
    "gpt_neox": Family(decoder="gpt_neox", norm="final_layer_norm", attention=Sublayer("input_layernorm", "attention")),
    "gpt_oss": Family(mlp_pair=True),
    "gptj": Family(**_GPTJ),
    "granite": Family(**_GRANITE),
    "granitemoe": Family(**_GRANITE_MOE),
    "granitemoeshared": Family(**{**_GRANITE, "mlp": None}),  # its MLP is the sum of two modules
    "helium": Family(),
    "llama": Family(),
    "minimax_m2": Family(),
    "ministral": Family(),
    "mistral": Family(sliding=True),
    "mixtral": Family(sliding=True),
    "nanochat": Family(embedding_norm="norm"),
    "nemotron": Family(),
    "olmo": Family(),
    "olmo2": _POST_NORMS,
    "olmo3": Family(rotary_by_type=True, attention=_POST_NORMS.attention, mlp=_POST_NORMS.mlp),
    "olmoe": Family(),
    "opt": Family(
        layers="decoder.layers",
        norm="decoder.final_layer_norm",
        rotary=None,
        positions="decoder.embed_positions",
        projections=("decoder.project_in", "decoder.project_out"),
        attention=None,  # some have the norm behind the sum
        mlp=None,  # no module of its own
    ),
    "persimmon": Family(norm="final_layernorm"),
    "phi": Family(norm="final_layernorm", **_SHARED_NORM),
    "phi3": Family(sliding=True),
    "phimoe": Family(sliding=True),
    "qwen2": Family(),
    "qwen2_moe": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(sliding=True),
    "seed_oss": Family(),
    "smollm3": Family(),
    "solar_open": Family(),
    "stablelm": Family(**_SHARED_NORM),  # shared in its parallel layers
    "starcoder2": Family(sliding=True),
}

_ATTENTION_TYPES = {"full_attention", "sliding_attention"}
_CALL_ROPE = {"dynamic", "longrope"}  # their tables depend on the longest position of the call

_STATE = "its layers keep a recurrent state, which can't go back to what it was before a rejected draft"
_ALIBI = "its attention is biased by distance (ALiBi) in tables that depend on the length of the call"
REASONS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear"),
            *("lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe"),
            *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
        ),
        _STATE,
    ),
    **dict.fromkeys(("bloom", "falcon", "mpt"), _ALIBI),
    "gpt_neo": "its attention draws its local windows itself, by the length of the call",
}
"""Why a known architecture is not supported."""


def check_supported(config: Any) -> Family:
    """Return the family of a transformers config.

    Raises:
        UnsupportedModelError: The architecture, attention type or rope type is not supported; the message names it,
            says why where that is known, and lists what is.
    """
    model_type = config.model_type
    if model_type not in FAMILIES:
        reason = REASONS.get(model_type)
        if reason is None and getattr(config, "is_encoder_decoder", False):
            reason = "it is an encoder-decoder, and lede decodes decoders alone"
        why = f": {reason}" if reason else ""
        raise UnsupportedModelError(
            f"model type '{model_type}' is not supported{why}; supported are {', '.join(sorted(FAMILIES))}"
        )
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_TYPES)
    if odd:
        raise UnsupportedModelError(f"{model_type} with layers of type {', '.join(odd)} is not supported")
    if getattr(config, "add_cross_attention", False) or getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{model_type} with cross or bidirectional attention is not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    for part in nested:
        if part.get("rope_type") in _CALL_ROPE:
            raise UnsupportedModelError(
                f"{model_type} with rope type '{part['rope_type']}' is not supported: its rotary table depends on the "
                "longest position in a call, so a verified block would differ from single steps"
            )
    return FAMILIES[model_type]
