from __future__ import annotations

import numpy as np
import pytest
import torch

from lede.envs import LayerWalk, Rules
from lede.rewards import CONTINUE, EXIT
from lede.verification import Warp
from tests.tiny_models import FAMILY_NAMES, VOCAB_SIZE, plain_generate, prompt, tiny_model

PROMPTS = [prompt(i, 3 + 4 * i) for i in range(4)]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_skipping_writes_the_models_own_text(family: str) -> None:
    model = tiny_model(family)
    walk = LayerWalk(model, Rules((2,), 24), 4, 40)
    walk.prefill(dict(enumerate((i, ids) for i, ids in enumerate(PROMPTS))))
    while not walk.row(0).done:
        walk.skip(range(4))
    assert [walk.row(r).token_ids for r in range(4)] == [plain_generate(model, ids, 24) for ids in PROMPTS]


def test_a_row_can_be_given_a_new_prompt() -> None:
    """What an earlier, longer prompt left in the cache is never seen again."""
    for n_rows in (1, 2):
        walk = LayerWalk(tiny_model("mistral"), Rules((1, 3), 20), n_rows, 40)
        for ids in reversed(PROMPTS):
            walk.prefill({0: (0, ids)})
            rng = np.random.default_rng(0)
            while not walk.row(0).done:
                walk.enter([0])
                while walk.row(0).candidate >= 0:
                    walk.decide({0: EXIT if rng.random() < 0.3 else CONTINUE})
            assert walk.row(0).token_ids == plain_generate(walk.model, ids, 20)


@pytest.mark.parametrize("warp", [Warp(1.0), Warp(0.6, top_k=10), Warp(1.3, top_p=0.8)])
def test_sampled_tokens_have_the_warped_distribution(warp: Warp) -> None:
    model, n_rows = tiny_model("gpt2"), 4000
    walk = LayerWalk(model, Rules((2,), 2, warp=warp), n_rows, 8, seed=1)
    walk.prefill({r: (r, PROMPTS[0]) for r in range(n_rows)})
    counts = np.bincount([walk.row(r).token_ids[0] for r in range(n_rows)], minlength=VOCAB_SIZE)
    with torch.no_grad():
        p = warp.probabilities(model.hf_model(torch.tensor([PROMPTS[0]])).logits[0, -1]).numpy()
    assert counts[p == 0].sum() == 0
    deviation = np.abs(counts / n_rows - p)
    assert (deviation <= 5 * np.sqrt(p * (1 - p) / n_rows) + 1e-9).all()
    assert np.count_nonzero(p) > 3


def test_sampled_text_depends_on_seed_and_prompt_index_alone() -> None:
    def text(seed: int, index: int, n_rows: int, row: int) -> list[int]:
        walk = LayerWalk(tiny_model("llama"), Rules((2,), 12, warp=Warp(1.0)), n_rows, 30, seed)
        walk.prefill({r: (index if r == row else 100 + r, PROMPTS[1]) for r in range(n_rows)})
        while not walk.row(row).done:
            walk.skip(range(n_rows))
        return walk.row(row).token_ids

    assert text(0, 5, 1, 0) == text(0, 5, 3, 2)
    assert text(0, 5, 1, 0) != text(0, 6, 1, 0)
    assert text(0, 5, 1, 0) != text(1, 5, 1, 0)
