"""What a model does before its first layer and after its last one."""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from lede.families import Family


class Embedding:
    """From token ids to the hidden states before the first layer.

    Args:
        hf_model: The causal LM.
        family: What its parts are called.
    """

    def __init__(self, hf_model: Any, family: Family) -> None:
        stack = getattr(hf_model, family.decoder)
        self.tokens: nn.Module = hf_model.get_input_embeddings()
        self._norm = part(stack, family.embedding_norm)
        self._projection = part(stack, family.projections and family.projections[0])
        self._positions = part(stack, family.positions)
        # some take an attention mask first, from which they count positions when given none
        self._named = self._positions is not None and "position_ids" in _arguments(self._positions)
        self._scale: float | None = None
        if family.embedding_scale is not None:
            self._scale = float(getattr(hf_model.config, family.embedding_scale))
        self._root = 0.0
        if family.root_width and not hasattr(self.tokens, "embed_scale"):
            self._root = hf_model.config.hidden_size**0.5

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states `(row, token, width)` of ids `(row, token)` at positions `(1 or row, token)`."""
        hidden: torch.Tensor = self.tokens(token_ids)
        if self._projection is not None:
            hidden = self._projection(hidden)
        if self._scale is not None:
            hidden = hidden * self._scale
        if self._root:
            # rounded to the dtype of the weights before it multiplies, as the models themselves do
            hidden = hidden * torch.tensor(self._root, dtype=hidden.dtype)
        if self._positions is not None:
            named = {"attention_mask": None, "position_ids": positions}
            places = self._positions(**named) if self._named else self._positions(positions)
            hidden = hidden + places.to(hidden.device)
        return hidden if self._norm is None else self._norm(hidden)


class Readout:
    """From hidden states to logits: final norm, head, scaling, soft cap.

    Args:
        hf_model: The causal LM.
        family: What its parts are called.
    """

    def __init__(self, hf_model: Any, family: Family) -> None:
        stack, config = getattr(hf_model, family.decoder), hf_model.config
        self.norm = part(stack, family.norm)
        self.projection = part(stack, family.projections and family.projections[1])
        self.head: nn.Module = hf_model.get_output_embeddings()
        self._times: float | None = getattr(config, family.logits_times) if family.logits_times else None
        self._over: float | None = getattr(config, family.logits_over) if family.logits_over else None
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `(row, token, vocabulary)` of hidden states `(row, token, width)`."""
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.projection is not None:
            hidden = self.projection(hidden)
        logits: torch.Tensor = self.head(hidden)
        if self._times is not None:
            logits = logits * self._times
        if self._over is not None:
            logits = logits / self._over
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits


def part(stack: nn.Module, name: str | None) -> nn.Module | None:
    """The part of a stack by its dotted name; None without a name, and where the stack has None under it."""
    return None if name is None else attrgetter(name)(stack)


def _arguments(module: nn.Module) -> Any:
    return inspect.signature(module.forward).parameters
