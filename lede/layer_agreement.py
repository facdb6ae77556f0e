"""How often each layer's likeliest token is the one that the text has, measured on texts that are known already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lede.models import EarlyExitModel

_CHUNK = 64
"""Positions that are read at once, which bounds the memory of their logits."""


@torch.inference_mode()
def layer_agreement(
    model: EarlyExitModel, texts: Iterable[tuple[Sequence[int], Sequence[int]]]
) -> tuple[float, ...] | None:
    """Share of new tokens after the first that each layer foretells, from layer 1 to the last.

    Args:
        model: The model.
        texts: Prompts and their new tokens. One pass a text with a head read at every layer.

    Returns:
        The shares; None when no text has a second new token.
    """
    hits, n_tokens = [0] * model.n_layers, 0
    for prompt, new in texts:
        ids, first = [*prompt, *new[:-1]], len(prompt)
        if len(new) < 2:
            continue
        wanted = torch.tensor(new[1:], device=model.device)
        block = model.block(model.new_cache(len(ids)), 0, len(ids))
        hidden = model.embed(torch.tensor([ids], device=model.device), block)
        for layer in range(model.n_layers):
            hidden = model.run_layers(hidden, layer, layer + 1, block)
            for start in range(0, len(wanted), _CHUNK):
                found = model.head(hidden[:, first + start : first + start + _CHUNK])[0].argmax(-1)
                hits[layer] += int((found == wanted[start : start + _CHUNK]).sum())
        n_tokens += len(wanted)
    return tuple(hit / n_tokens for hit in hits) if n_tokens else None
