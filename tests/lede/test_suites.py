"""Suites: what each format says, how prompts are split, and what errors tell."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from lede.suites import FORMATS, LM_REFERENCE_WORDS, Suite, check_spec, load_suite


class Words:
    """A tokenizer of one id a word, with a chat template that marks its turn."""

    chat_template = "yes"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [2 + crc32(word.encode()) for word in text.split()]}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        return f"<user> {messages[0]['content']} <assistant>"


def written(path: Path, entries: list[dict[str, Any]]) -> Path:
    content = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def spec_bench(path: Path, counts: dict[str, int]) -> Path:
    entries = [
        {"question_id": 81 + n, "category": name, "turns": [f"{name} question {n}", "again"], "reference": ["a", "b"]}
        for name, count in counts.items()
        for n in range(count)
    ]
    return written(path, entries)


def indices(suite: Suite) -> tuple[list[int], list[int]]:
    return [item.prompt_index for item in suite.test], [item.prompt_index for item in suite.validation]


@pytest.mark.parametrize(
    ("kind", "entry", "prompt", "reference", "category"),
    [
        ("humaneval", {"prompt": "def f():", "canonical_solution": " return 1"}, "def f():", " return 1", ""),
        ("gsm8k", {"question": "How many?", "answer": "#### 3"}, "How many?", "#### 3", ""),
        ("cnn-dm", {"article": "Long ago.", "highlights": "Short."}, "Long ago.", "Short.", ""),
        ("xsum", {"document": "Long ago.", "summary": "Short.", "id": "1"}, "Long ago.", "Short.", ""),
        ("jsonl", {"prompt": "One two", "category": "x", "reference": "three"}, "One two", "three", "x"),
        ("jsonl", {"question": "One two"}, "One two", None, ""),
        ("spec-bench", {"category": "qa", "turns": ["Who?"]}, "<user> Who? <assistant>", None, "qa"),
        (
            "spec-bench",
            {"category": "math", "turns": ["Sum?", "And?"], "reference": ["3", "4"]},
            "<user> Sum? <assistant>",
            "3",
            "math",
        ),
        (
            "spec-bench",
            {"category": "rag", "turns": ["Q"], "reference": [["a"]]},
            "<user> Q <assistant>",
            "['a']",
            "rag",
        ),
    ],
)
def test_formats(
    tmp_path: Path, kind: str, entry: dict[str, Any], prompt: str, reference: str | None, category: str
) -> None:
    path = written(tmp_path / "file.jsonl.gz", [entry])
    suite = load_suite(f"{kind}:{path}", Words(), validation_prompts=0)
    (item,) = suite.test
    assert list(item.ids) == Words()(prompt, add_special_tokens="<user>" not in prompt)["input_ids"]
    assert (item.reference, item.category, item.prompt_index) == (reference, category, 0)
    assert suite.name == ("file" if kind == "jsonl" else kind)


def test_language_modelling_continues_the_first_hundred_words(tmp_path: Path) -> None:
    words = [f"w{n}" for n in range(900)]
    text = "  " + "\n".join(words[:50]) + " \n\n " + " ".join(words[50:])
    path = written(tmp_path / "books.jsonl", [{"text": text}])
    (item,) = load_suite(f"lm:{path}", Words(), validation_prompts=0).test
    assert list(item.ids) == Words()(" ".join(words[:100]))["input_ids"]
    assert item.reference == " ".join(words[100 : 100 + LM_REFERENCE_WORDS])
    written(path, [{"text": "too short"}, {"text": text}, {"text": " ".join(words[:100])}])
    suite = load_suite(f"lm:{path}", Words(), validation_prompts=0)
    assert (len(suite.test), suite.too_short, suite.too_long) == (1, 2, 0)
    assert suite.test[0].ids == item.ids
    written(path, [{"text": "too short"}])
    with pytest.raises(ValueError, match=r"no prompt for test: 0 in all, 1 documents of at most 100 words beside"):
        load_suite(f"lm:{path}", Words())
    written(path, [{"text": text}, {"text": 3}])
    with pytest.raises(ValueError, match=r"books.jsonl, line 2: text must be a text, got int"):
        load_suite(f"lm:{path}", Words())


def test_a_split_by_lot_is_stratified_disjoint_and_repeatable(tmp_path: Path) -> None:
    path = spec_bench(tmp_path / "spec.jsonl", {"writing": 10, "qa": 40, "math": 40})
    spec = f"spec-bench:{path}"
    whole = load_suite(spec, Words(), validation_prompts=7)
    test, validation = indices(whole)
    assert not set(test) & set(validation)
    assert sorted(test + validation) == list(range(90))
    assert sorted(Counter(item.category for item in whole.validation).values()) == [2, 2, 3]
    few = load_suite(spec, Words(), n_prompts=8, validation_prompts=7)
    assert indices(few)[1] == validation
    assert set(indices(few)[0]) <= set(test)
    assert sorted(Counter(item.category for item in few.test).values()) == [2, 3, 3]
    assert indices(load_suite(spec, Words(), n_prompts=8, validation_prompts=7)) == indices(few)
    assert indices(load_suite(spec, Words(), n_prompts=8, validation_prompts=7, seed=1)) != indices(few)


def test_a_prompt_that_stands_twice_is_not_in_both_parts(tmp_path: Path) -> None:
    path = written(tmp_path / "twice.jsonl", [{"prompt": f"prompt {n % 5}"} for n in range(10)])
    suite = load_suite(f"jsonl:{path}", Words(), validation_prompts=2)
    assert suite.test
    assert not {item.ids for item in suite.test} & {item.ids for item in suite.validation}


def test_a_files_own_split_is_kept(tmp_path: Path) -> None:
    splits = ["train", "validation", "test", "test", "validation"]
    path = written(tmp_path / "own.jsonl", [{"prompt": f"p {i}", "split": s} for i, s in enumerate(splits)])
    assert indices(load_suite(f"jsonl:{path}", Words())) == ([2, 3], [1, 4])
    assert indices(load_suite(f"jsonl:{path}", Words(), validation_prompts=1, n_prompts=1))[1] in ([1], [4])


def test_the_demo_has_a_split_of_its_own() -> None:
    suite = load_suite("demo", Words(), n_prompts=5)
    assert (len(suite.test), len(suite.validation), suite.name) == (5, 16, "demo")


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "long.jsonl", [{"prompt": "w " * n} for n in range(1, 9)])
    suite = load_suite(f"jsonl:{path}", Words(), validation_prompts=2, max_prompt_tokens=6)  # BOS counts
    assert suite.too_long == 3
    assert max(len(item.ids) for item in (*suite.test, *suite.validation)) <= 6
    with pytest.raises(ValueError, match=r"leaves no prompt for test: 8 in all, 7 longer than 2 tokens, 1 for"):
        load_suite(f"jsonl:{path}", Words(), validation_prompts=2, max_prompt_tokens=2)


def test_humaneval_prompts_end_before_the_line_break() -> None:
    entry = FORMATS["humaneval"]({"prompt": 'def f():\n    """One."""\n', "canonical_solution": "    return 1"})
    assert entry is not None
    assert entry.prompt.text == 'def f():\n    """One."""'


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        ("humaneval", '{"prompt": "x"}', "line 2: needs the key canonical_solution; it has prompt"),
        ("gsm8k", '{"question": 3, "answer": "x"}', "line 2: question must be a text, got int"),
        ("jsonl", '{"prompt": "x"', "line 2: not JSON: .* at column"),
        ("jsonl", '["x"]', "line 2: must be a JSON object, got list"),
        ("jsonl", '{"prompt": "  "}', "line 2: the prompt is empty"),
        ("jsonl", '{"text": "x"}', "line 2: needs a key out of prompt, turns, question"),
        ("spec-bench", '{"category": "qa", "turns": []}', "line 2: turns must be a list with at least one turn"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, kind: str, line: str, message: str) -> None:
    good = {"prompt": "a", "canonical_solution": "b", "question": "c", "answer": "d", "category": "e", "turns": ["f"]}
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(good) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"bad.jsonl, {message}"):
        load_suite(f"{kind}:{path}", Words(), chat="off")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 5000)[:-20])
    with pytest.raises(ValueError, match=r"torn.jsonl.gz, after line \d+: damaged gzip file"):
        load_suite(f"jsonl:{path}", Words())
    path.write_bytes(b"no gzip at all")
    with pytest.raises(ValueError, match=r"torn.jsonl.gz, after line 0: damaged gzip file"):
        load_suite(f"jsonl:{path}", Words())
    bare = tmp_path / "latin.jsonl"
    bare.write_bytes(b'{"prompt": "x"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"latin.jsonl, after line \d: not UTF-8"):
        load_suite(f"jsonl:{bare}", Words())
    with pytest.raises(ValueError, match=r"cannot read .*nowhere.jsonl: No such file"):
        load_suite(f"jsonl:{tmp_path / 'nowhere.jsonl'}", Words())
    bare.write_bytes(b"\n")
    with pytest.raises(ValueError, match=r"latin.jsonl holds no prompts"):
        load_suite(f"jsonl:{bare}", Words())


def test_a_suite_is_known_by_name() -> None:
    with pytest.raises(ValueError, match="there is no suite 'mt-bench:x'; suites are demo, spec-bench:FILE"):
        check_spec("mt-bench:x")
    with pytest.raises(ValueError, match="suite 'gsm8k' needs a file, as in gsm8k:FILE"):
        check_spec("gsm8k")
    assert {check_spec(f"{name}:a/b.jsonl.gz")[0] for name in FORMATS} == {*FORMATS, "b"} - {"jsonl", "lm"}
