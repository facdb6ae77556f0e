"""A memory of the very texts that a policy is trained on, without letting any text find itself in it.

What training plays is recorded answers; a memory that holds them would propose each answer to itself, and the policy
would learn to trust it blindly. So training is cross-fitted: texts are dealt into folds, and each is played with the
memory of the other folds. Deployment and validation have the memory of all, which knows a little more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lede.phrases import MAX_SUFFIX, PhraseMemory
from lede.seeding import Purpose, numpy_stream
from lede.trace_table import TraceTable

FOLDS = 8
"""Folds unless told otherwise: each text misses an eighth of what deployment knows."""

_STREAM = 5  # of Purpose.TRAINING


def remember(
    table: TraceTable, tokenizer: str | None = None, seed: int = 0, folds: int = FOLDS, max_suffix: int = MAX_SUFFIX
) -> PhraseMemory:
    """The memory of a table's texts, for deployment; the table holds ready what each text is shown instead.

    Args:
        table: Traces with their texts.
        tokenizer: Hash of the tokenizer.
        seed: Deals the prompts into folds; a prompt that comes again goes where its first copy goes.
        folds: Number of folds, no more than there are different prompts.
        max_suffix: Tokens of the longest n-grams.

    Raises:
        ValueError: The table does not know its texts, or there are fewer than two folds.
    """
    if len(table.token_ids) != table.n_prompts:
        raise ValueError("a memory needs the texts of the traces; make the table with TraceTable.from_traces")
    if folds < 2:
        raise ValueError(f"cross-fitting takes at least 2 folds, got {folds}")
    texts = list(zip(table.prompt_ids, table.token_ids, strict=True))
    whole = PhraseMemory.from_texts(texts, max_suffix, tokenizer)
    fold_of = deal(table, seed, folds)
    others = [
        PhraseMemory.from_texts(
            (text for text, own in zip(texts, fold_of, strict=True) if own != fold), max_suffix, tokenizer
        )
        for fold in range(max(fold_of) + 1)
    ]
    table.unseen[whole.digest] = [others[fold] for fold in fold_of]
    return whole


def show(table: TraceTable, remembered: TraceTable, memory: PhraseMemory) -> int:
    """Keep the texts of another table from finding themselves in a memory, as far as it was made of them.

    Args:
        table: Traces with their texts; those of prompts that the memory knows are shown what these were shown.
        remembered: What `remember` made the memory of.
        memory: It.

    Returns:
        How many of the table's prompts there are.
    """
    shown = dict(zip(map(_bytes, remembered.prompt_ids), remembered.unseen[memory.digest], strict=True))
    mine = [shown.get(_bytes(prompt)) for prompt in table.prompt_ids]
    n_known = sum(each is not None for each in mine)
    if n_known:
        table.unseen[memory.digest] = [memory if each is None else each for each in mine]
    return n_known


def _bytes(prompt: npt.NDArray[np.int64]) -> bytes:
    return prompt.tobytes()


def deal(table: TraceTable, seed: int, folds: int = FOLDS) -> Sequence[int]:
    """The fold of each prompt, `(prompt,)`."""
    copies: dict[bytes, list[int]] = {}
    for place, prompt in enumerate(table.prompt_ids):
        copies.setdefault(prompt.tobytes(), []).append(place)
    groups = list(copies.values())
    order = numpy_stream(seed, Purpose.TRAINING, _STREAM).permutation(len(groups))
    fold_of = [0] * table.n_prompts
    for turn, group in enumerate(order.tolist()):
        for place in groups[group]:
            fold_of[place] = turn % folds
    return fold_of
