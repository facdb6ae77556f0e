"""ROUGE on worked pairs."""

from __future__ import annotations

import pytest

from lede.text_overlap import Rouge, mean_rouge, rouge


def test_a_worked_pair() -> None:
    """`the cat sat` against `the cat lay down`: 2 of 3 and 2 of 4 words, 1 of 2 and 1 of 3 pairs, a run of 2 words."""
    found = rouge("The cat sat.", "the cat lay down")
    assert found is not None
    f_words = 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)
    f_pairs = 2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)
    assert (found.rouge1, found.rouge2, found.rougeL) == pytest.approx((f_words, f_pairs, f_words))


def test_order_counts_in_the_longest_subsequence_alone() -> None:
    found = rouge("c b a", "a b c")
    assert found is not None
    assert (found.rouge1, found.rouge2, found.rougeL) == pytest.approx((1, 0, 1 / 3))


@pytest.mark.parametrize("text", ["a b c", "", "{}();", "日本語"])
def test_equal_texts_overlap_wholly(text: str) -> None:
    assert rouge(text, text) == Rouge(1, 1, 1)


def test_no_word_in_common() -> None:
    assert rouge("", "a b") == rouge("x", "a b") == Rouge(0, 0, 0)


def test_words_are_not_stemmed() -> None:
    found = rouge("running", "runs")
    assert found is not None
    assert found.rouge1 == 0


def test_a_missing_text_has_no_overlap() -> None:
    assert rouge(None, "a") is None
    assert rouge("a", None) is None


def test_means() -> None:
    assert mean_rouge([]) is None
    assert mean_rouge([Rouge(1, 0.5, 0), Rouge(0, 0.25, 1)]) == Rouge(0.5, 0.375, 0.5)
