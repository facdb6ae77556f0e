"""Memories of phrases: what they know, what is proposed with one behind a text, and what of them is refused."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from lede.lookup import LookupConfig, LookupIndex
from lede.lookup_table import lookups_of
from lede.phrase_folds import FOLDS, deal, remember, show
from lede.phrases import PhraseMemory
from lede.trace_table import TraceTable
from tests.copied_texts import VOCABULARY, copied_text
from tests.naive_phrases import NaivePhrases, Texts, proposal_with_memory
from tests.tiny_models import tiny_model


def texts_of(seed: int, n: int = 12, vocabulary: int = 5) -> Texts:
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(vocabulary, size=rng.integers(0, 6)).tolist(), rng.integers(vocabulary, size=n).tolist())
        for n in rng.integers(0, 30, n)
    ]


@pytest.mark.parametrize("max_suffix", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_it_knows_what_counting_says(seed: int, max_suffix: int) -> None:
    texts = texts_of(seed)
    memory, naive = PhraseMemory.from_texts(texts, max_suffix), NaivePhrases(texts, max_suffix)
    assert len(memory) == len(naive.followed)
    rng, deep = np.random.default_rng(seed), 0
    for _ in range(300):
        tokens = rng.integers(6, size=rng.integers(0, 7)).tolist()
        for longest, shortest in ((4, 1), (2, 2), (1, 1), (3, 2)):
            found = memory.find(tokens, longest, shortest)
            assert (None if found is None else found[1:]) == naive.find(tokens, longest, shortest)
            assert memory.chain(tokens, 9, longest, shortest) == naive.chain(tokens, 9, longest, shortest)
            deep += found is not None and found.length == max_suffix
    assert deep > 5


def test_what_was_asked_is_context_alone() -> None:
    memory = PhraseMemory.from_texts([([1, 2, 3], [4, 5])])
    assert memory.find([1, 2]) is None
    found = memory.find([1, 2, 3])
    assert found is not None
    assert (found.length, found.token) == (3, 4)
    assert memory.chain([9, 3], 8) == [4, 5]


def test_a_memory_of_nothing_proposes_nothing() -> None:
    nothing: list[Texts] = [[], [([], [])], [([], [7])]]
    for texts in nothing:
        memory = PhraseMemory.from_texts(texts)
        assert (len(memory), memory.find([7]), memory.chain([7], 4)) == (0, None, [])
        assert LookupIndex(LookupConfig(), [1, 2], memory).match() is None


@pytest.mark.parametrize(
    "config", [LookupConfig(), LookupConfig(4, 2), LookupConfig(1), LookupConfig(2, 1, "frequent")]
)
def test_the_text_goes_before_the_memory(config: LookupConfig) -> None:
    rng = np.random.default_rng(7)
    texts = texts_of(1, vocabulary=9)
    memory, naive = PhraseMemory.from_texts(texts), NaivePhrases(texts, 4)
    sources = []
    for _ in range(40):
        text = rng.integers(9, size=25).tolist()
        index, hits = LookupIndex(config, (), memory), []
        for place, token in enumerate(text):
            wanted, remembered = proposal_with_memory(text[:place], config, naive, 7)
            assert index.propose(7) == wanted
            assert index.propose(1) == wanted[:1]
            found = index.match()
            assert (found is not None) == bool(wanted)
            if found is not None:
                assert found.remembered == remembered
                sources.append(remembered)
            hits.append(bool(wanted) and wanted[0] == token)
            index.extend((token,))
            assert index.hits == pytest.approx(sum(hits[-16:]) / 16)
    assert 20 < sum(sources) < len(sources) - 20 or config.max_suffix == 1 or config.min_suffix == 2
    assert any(sources)


def test_it_is_the_same_memory_in_a_file_and_in_another_process(tmp_path: Path) -> None:
    memory = PhraseMemory.from_texts(texts_of(0), 3, "abc")
    memory.save(tmp_path / "memory.safetensors")
    for again in (PhraseMemory.load(tmp_path / "memory.safetensors"), pickle.loads(pickle.dumps(memory))):
        assert (again.digest, again.tokenizer, again.max_suffix) == (memory.digest, "abc", 3)
        assert again.chain([1, 2, 3], 16) == memory.chain([1, 2, 3], 16)
    assert deepcopy(memory) is memory
    assert PhraseMemory.from_texts(texts_of(1), 3, "abc").digest != memory.digest
    assert PhraseMemory.from_texts(texts_of(0), 3, "abc").digest == memory.digest


def damaged(name: str, change: Any) -> bytes:
    found = safetensors.numpy.load(PhraseMemory.from_texts(texts_of(0), 3).to_bytes())
    return safetensors.numpy.save({**found, name: np.ascontiguousarray(change(found[name]))})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no sound memory"),
        (b"not safetensors at all", "no sound memory"),
        (safetensors.numpy.save({"keys": np.zeros(3, dtype=np.int64)}), "format and followed"),
        (damaged("format", lambda a: a + 1), "format is none that this version reads"),
        (damaged("keys", lambda a: a[::-1]), "of 1 tokens are not in order"),
        (damaged("keys", lambda a: a + (9 << 40)), "are not in order"),
        (damaged("keys", lambda a: a.astype(np.int32)), "its keys is none"),
        (damaged("first", lambda a: a[::-1]), "not laid out by length"),
        (damaged("first", lambda a: a[:0]), "not laid out by length"),
        (damaged("count", lambda a: a * 0), "its counts are none"),
        (damaged("count", lambda a: a + 99), "its counts are none"),
        (damaged("followed", lambda a: -a - 1), "its counts are none"),
        (damaged("followed", lambda a: a[:-1]), "its columns have shapes"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_told_in_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        PhraseMemory.load(tmp_path / "m")
    assert str(tmp_path / "m") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_can_t_be_made_or_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read a memory of phrases from .*nothing: No such file"):
        PhraseMemory.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="cannot write a memory of phrases"):
        PhraseMemory.from_texts([]).save(tmp_path / "no" / "folder")
    with pytest.raises(ValueError, match=r"max_suffix must be within 1\.\.32, got 0"):
        PhraseMemory.from_texts([], 0)
    with pytest.raises(ValueError, match="token ids must be within"):
        PhraseMemory.from_texts([((), (-1, 2))])


def test_another_tokenizer_s_memory_is_refused() -> None:
    model = tiny_model("llama")
    PhraseMemory.from_texts([((), (1, 2))], tokenizer="abc").check_model(model)  # the tiny model has no tokenizer
    with pytest.raises(ValueError, match=rf"holds token {model.vocab_size}, the vocabulary of model"):
        PhraseMemory.from_texts([((), (1, model.vocab_size))]).check_model(model)
    with pytest.raises(ValueError, match=r"another tokenizer than that of x \(abc and def\)"):
        PhraseMemory.from_texts([], tokenizer="abc").check_tokenizer("def", 9, "x")
    PhraseMemory.from_texts([], tokenizer=None).check_tokenizer("def", 9, "x")


def traces(n: int, first: int = 0) -> list[Any]:
    """Texts without a token in common."""
    bare = [copied_text(first + i, 20, 3) for i in range(n)]
    return [
        replace(each, prompt_ids=each.prompt_ids + VOCABULARY * i, token_ids=each.token_ids + VOCABULARY * i)
        for i, each in enumerate(bare, first)
    ]


def knows(memory: PhraseMemory, text: Sequence[int]) -> bool:
    return any(memory.find([token]) is not None for token in text[:-1])


def test_no_text_of_training_finds_itself() -> None:
    mine = traces(10)
    table = TraceTable.from_traces([*mine, replace(mine[3], prompt_index=77)], 20, 20 * VOCABULARY)
    whole = remember(table, "abc", seed=1)
    fold_of = deal(table, 1)
    assert sorted(set(fold_of)) == list(range(FOLDS))
    assert fold_of[3] == fold_of[10]  # the same prompt twice
    assert fold_of != deal(table, 2)
    for place, (memory, text) in enumerate(zip(table.unseen[whole.digest], table.token_ids, strict=True)):
        assert knows(whole, text.tolist())
        for other, answer in enumerate(table.token_ids):
            assert knows(memory, answer.tolist()) == (fold_of[other] != fold_of[place])
    # so lookups there find no more than the text itself has, and elsewhere they find the memory
    config = LookupConfig()
    assert not lookups_of(table, config, memory=whole).remembered.any()
    np.testing.assert_array_equal(lookups_of(table, config, memory=whole).proposed, lookups_of(table, config).proposed)
    again = TraceTable.from_traces(mine, 20, 20 * VOCABULARY)
    assert lookups_of(again, config, memory=whole).remembered.any()
    assert whole.known(zip(again.prompt_ids, again.token_ids, strict=True)) == 10
    strange = TraceTable.from_traces(traces(2, 10), 20, 20 * VOCABULARY)
    assert whole.known(zip(strange.prompt_ids, strange.token_ids, strict=True)) == 0


def test_texts_that_are_scored_do_not_find_themselves_either() -> None:
    mine, config = traces(10), LookupConfig()
    table, again = (TraceTable.from_traces(mine, 20, 20 * VOCABULARY) for _ in range(2))
    whole = remember(table)
    assert show(again, table, whole) == 10
    np.testing.assert_array_equal(
        lookups_of(again, config, memory=whole).run, lookups_of(table, config, memory=whole).run
    )
    mixed = TraceTable.from_traces([*traces(2, 10), mine[4]], 20, 20 * VOCABULARY)
    assert show(mixed, table, whole) == 1
    assert mixed.unseen[whole.digest] == [whole, whole, table.unseen[whole.digest][4]]
    strange = TraceTable.from_traces(traces(2, 10), 20, 20 * VOCABULARY)
    assert show(strange, table, whole) == 0
    assert not strange.unseen


def test_folds_need_texts_and_company() -> None:
    table = TraceTable.from_traces(traces(1), 20, VOCABULARY)
    whole = remember(table)
    assert len(table.unseen[whole.digest][0]) == 0
    with pytest.raises(ValueError, match="at least 2 folds, got 1"):
        remember(table, folds=1)
    with pytest.raises(ValueError, match="a memory needs the texts"):
        remember(replace(table, prompt_ids=(), token_ids=()))
