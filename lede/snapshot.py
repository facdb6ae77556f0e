"""What a transformers model is made of, to notice when somebody changes it."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import nn


class Snapshot:
    """A model's modules as they were, with what was hung on them; weights are not looked at, copies share those.

    Args:
        hf_model: The model.
    """

    def __init__(self, hf_model: nn.Module) -> None:
        self._modules = tuple(hf_model.modules())
        self._marks = [_marks(module) for module in self._modules]

    def fits(self, hf_model: nn.Module) -> bool:
        """Whether the model still has these modules, hooks, replaced forwards and training modes."""
        modules = tuple(hf_model.modules())
        if len(modules) != len(self._modules) or not all(map(is_, modules, self._modules)):
            return False
        return all(all(map(is_, _marks(module), marks)) for module, marks in zip(modules, self._marks, strict=True))


def own_forward(module: nn.Module) -> Any:
    """A forward that was put on the object itself; None for the one of its class.

    transformers leaves the class's own behind on modules whose outputs it has collected.
    """
    own = vars(module).get("forward")
    return None if own is not None and getattr(own, "__func__", None) is type(module).forward else own


def trains_otherwise(hf_model: Any) -> bool:
    """Whether training mode changes what the layers do: dropout, or checkpointing, which leaves the cache out.

    A module may be in it alone: peft's adapters are when they were just added.
    """
    rates = ("attention_dropout", "dropout", "embedding_dropout")  # called as functions in most families
    return (hf_model.training and any(getattr(hf_model.config, rate, 0) for rate in rates)) or any(
        (isinstance(module, nn.Dropout) and module.p) or getattr(module, "gradient_checkpointing", False)
        for module in hf_model.modules()
        if module.training
    )


def _marks(module: nn.Module) -> tuple[Any, ...]:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return (
        module._parameters,
        module._buffers,
        own_forward(module),
        vars(module).get("_hf_hook"),
        module.training,
        len(hooks),  # small numbers are one object each
        *hooks[:8],
    )
