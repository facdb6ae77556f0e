"""Tiny models that end their greedy text early: one of the tokens that they write is declared to be EOS."""

from __future__ import annotations

from typing import Any

import torch

from lede.models import EarlyExitModel, load_model
from tests.tiny_models import plain_generate, tiny_hf_model, tiny_model


def ending_model(eos: int, family: str = "llama") -> EarlyExitModel:
    """The tiny model of a family with this EOS id."""
    hf_model = tiny_hf_model(family)
    hf_model.generation_config.eos_token_id = eos
    return load_model((hf_model, None))


def model_that_ends(ids: list[int], at_least: int, family: str = "llama") -> tuple[EarlyExitModel, int]:
    """A model that ends the greedy text of a prompt, and after how many new tokens, EOS included."""
    text = plain_generate(tiny_model(family), ids, 40)
    n_tokens = next(n for n in range(at_least, 41) if text[n - 1] not in text[: n - 1])
    return ending_model(text[n_tokens - 1], family), n_tokens


def layer_logits(model: EarlyExitModel, ids: list[int]) -> torch.Tensor:
    """Logits `(layer, position, vocabulary)` of layers 1..L, from transformers' own forward and nothing of ours.

    Its last hidden state comes normed already.
    """
    hf_model: Any = model.hf_model
    with torch.no_grad():
        hidden = hf_model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[1:]
        normed = [*(hf_model.model.norm(state) for state in hidden[:-1]), hidden[-1]]
        return torch.stack([hf_model.lm_head(state)[0] for state in normed])
