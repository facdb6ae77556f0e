"""What writing the texts of a batch costs without the teacher, and a forward pass over them, by lede and transformers.

Every part writes as many tokens behind the same prompts, and every pass goes over the same finished texts, padded to
the same width, for the logits of the same positions.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence

import torch

from lede.collectors.head_table import positions_at_once
from lede.generation import generate
from lede.models import EarlyExitModel


class Baselines:
    """The parts that the teacher is held against.

    Args:
        model: The model; its generation config must name no end of a text.
        prompts: Token ids of the batch.
        texts: The same with the new tokens behind them.
    """

    def __init__(self, model: EarlyExitModel, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> None:
        self._model = model
        self._prompts = [list(ids) for ids in prompts]
        self.n_new = sum(map(len, texts)) - sum(map(len, prompts))
        """New tokens of all texts."""
        self._budget = max(len(text) - len(ids) for text, ids in zip(texts, prompts, strict=True))
        width = max(map(len, texts))
        rows = [[*text, *[text[-1]] * (width - len(text))] for text in texts]  # nothing looks at what is behind it
        self._padded = torch.tensor(rows, device=model.device)
        self._first = min(map(len, prompts))
        self._heads_at_once = positions_at_once(model) * model.n_layers

    def generate(self) -> int:
        """Write the texts by lede's engine and nothing else; returns new tokens."""
        outputs = generate(self._model, input_ids=self._prompts, max_new_tokens=self._budget, eos_token_id=())
        return sum(out.sequences.shape[1] - len(ids) for out, ids in zip(outputs, self._prompts, strict=True))

    @torch.inference_mode()
    def forward(self, every_layer: bool) -> int:
        """One pass by lede's engine; logits of the new tokens at the last layer, or at every layer.

        As many heads at once as the teacher reads.
        """
        model, (n_rows, width) = self._model, self._padded.shape
        block = model.block(model.new_cache(width, n_rows), 0, width)
        hidden = model.embed(self._padded, block)
        for layer in range(model.n_layers):
            hidden = model.run_layers(hidden, layer, layer + 1, block)
            if every_layer or layer == model.n_layers - 1:
                for part in torch.split(hidden[:, self._first :].flatten(0, 1), self._heads_at_once):
                    model.head(part[None])
        return self.n_new

    @torch.inference_mode()
    def transformers_generate(self) -> int:
        """Write as many tokens by transformers' batched greedy `generate`, padded on the left; returns new tokens."""
        width, device = max(map(len, self._prompts)), self._model.device
        gaps = [width - len(ids) for ids in self._prompts]
        rows = [[0] * gap + ids for gap, ids in zip(gaps, self._prompts, strict=True)]
        mask = [[0] * gap + [1] * (width - gap) for gap in gaps]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = self._model.hf_model.generate(
                torch.tensor(rows, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=self._budget,
                do_sample=False,
                pad_token_id=0,
            )
        return int(out[:, width:].numel())

    @torch.inference_mode()
    def transformers_forward(self) -> int:
        """One pass by transformers, without a cache; logits of the new tokens, of all where it knows no others."""
        hf_model = self._model.hf_model
        keeps = "logits_to_keep" in inspect.signature(hf_model.forward).parameters
        some = {"logits_to_keep": self._padded.shape[1] - self._first} if keeps else {}
        hf_model(self._padded, use_cache=False, **some)
        return self.n_new
