"""Copies of transformers models whose sublayers are really gone, for comparison with drafts that leave them out."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from lede.families import FAMILIES
from lede.models import EarlyExitModel
from lede.policies import SkipSublayers


class _Nothing(nn.Module):
    """Adds nothing in place of a sublayer of a copied model."""

    def __init__(self, instead_of: nn.Module, pair: bool) -> None:
        super().__init__()
        self.pair = pair
        self.attention_type = getattr(instead_of, "attention_type", None)  # some models ask for it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        zeros = 0 * (args[0] if args else kwargs["hidden_states"])
        return (zeros, None) if self.pair else zeros


def without(hf_model: Any, gaps: SkipSublayers) -> Any:
    """A copy of a transformers model without some sublayers; norms behind them must turn 0 into 0."""
    model = copy.deepcopy(hf_model)
    family = FAMILIES[model.config.model_type]
    layers = model.get_submodule(family.decoder).get_submodule(family.layers)
    for part, left_out, pair in ((family.attention, gaps.attention, True), (family.mlp, gaps.mlp, family.mlp_pair)):
        for layer in left_out:
            assert part is not None
            old = layers[layer - 1].get_submodule(part.module)
            setattr(layers[layer - 1], part.module, _Nothing(old, pair))
    return model


def run_skipping(model: EarlyExitModel, ids: list[int], gaps: SkipSublayers) -> torch.Tensor:
    """Logits `(token, vocabulary)` of a text drafted at once."""
    with torch.inference_mode():
        block = model.block(model.new_cache(len(ids)), 0, len(ids))
        hidden = model.run_layers(model.embed(torch.tensor([ids]), block), 0, gaps.prefix, block)
        return model.head(model.run_skipping(hidden, gaps, block))[0]
