"""The demo model's recipe: which tokens of a text are taken for a loop."""

from __future__ import annotations

import pytest
import torch

from lede.demo.evaluate_model import repetition

# torch's compiler, which the recipe's module asks for, defines a scripted class of its own when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def repeats(texts: torch.Tensor, n: int) -> torch.Tensor:
    from lede.demo.break_loops import repeats as marked

    return marked(texts, n)


def test_repeats_marks_the_last_token_of_every_gram_seen_before() -> None:
    texts = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8]])
    # 1 2 3 | 2 3 1 | 3 1 2 are new, then each comes again
    assert repeats(texts, n=3).tolist() == [[False] * 5 + [True] * 3, [False] * 8]


def test_repeats_are_those_that_repetition_counts() -> None:
    texts = torch.randint(0, 3, (20, 40), generator=torch.Generator().manual_seed(0))
    for row, marked in zip(texts, repeats(texts, n=4), strict=True):
        assert int(marked.sum()) / (len(row) - 3) == pytest.approx(repetition(row.tolist()))
        assert marked.any()
