"""Models that the peft package has adapted: the causal LM inside, whose own modules the adapters changed."""

from __future__ import annotations

from typing import Any

from lede.families import UnsupportedModelError


def adapted(hf_model: Any) -> Any:
    """The causal LM inside a peft model, adapters and all; any other model as it is.

    Adapters that replace modules in place (LoRA and its kin) work, merged or not: their output is the model's.

    Raises:
        UnsupportedModelError: An active adapter needs more than the model's own modules.
    """
    configs = getattr(hf_model, "peft_config", None)
    inner = getattr(getattr(hf_model, "base_model", None), "model", None)
    if not configs or not hasattr(hf_model, "active_adapter"):
        return hf_model
    names = hf_model.active_adapter
    for name in [names] if isinstance(names, str) else names:
        config = configs[name]
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        reason = None
        if config.is_prompt_learning or config.is_adaption_prompt:
            reason = "it adds virtual tokens to the prompt, which take positions and cache slots of their own"
        elif kind == "XLORA":
            reason = "it runs the model twice a token to weigh its experts"
        elif getattr(config, "alora_invocation_tokens", None):
            reason = "it switches on at a position that it looks for in the whole prompt"
        if reason is not None:
            raise UnsupportedModelError(f"adapter '{name}' of type {kind} is not supported: {reason}")
    return inner
