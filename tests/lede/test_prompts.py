from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lede.prompts import DEFAULT_PROMPTS, Prompt, check_lengths, encode_prompts, load_prompts

WORDS = ("<s>", "<user>", "<assistant>", "<unk>", "hello", "world")
TEMPLATE = (
    "<s> {% for m in messages %}<user> {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} <assistant>{% endif %}"
)


def word_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Splits at blanks and puts BOS (id 0) in front, as most models' tokenizers do."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


def write(folder: Path, name: str, *lines: Any) -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_text_file_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "p.txt", "first", "  zweite, größer", "third\u2028still third", "")
    assert load_prompts(path) == [Prompt("first"), Prompt("  zweite, größer"), Prompt("third\u2028still third")]


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("first\nsecond\n", encoding="utf-8-sig")
    (tmp_path / "p.jsonl").write_text('{"prompt": "first"}\n', encoding="utf-8-sig")
    assert load_prompts(tmp_path / "p.txt") == [Prompt("first"), Prompt("second")]
    assert load_prompts(tmp_path / "p.jsonl") == [Prompt("first")]


def test_json_lines_know_three_keys(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "p.jsonl",
        {"prompt": "a", "question": "not this"},
        {"question_id": 7, "turns": ["b", "later"]},
        "",
        {"turns": [{"role": "system", "content": "no"}, {"role": "user", "content": "c"}]},
        {"question": "d"},
    )
    assert load_prompts(str(path)) == [Prompt("a"), Prompt("b", True), Prompt("c", True), Prompt("d")]


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("p.jsonl", ['{"prompt": "a"}', "{oops"], "line 2: not JSON"),
        ("p.jsonl", ['{"prompt": "a"}', "", '["b"]'], "line 3: must be a JSON object, got list"),
        ("p.jsonl", ['{"text": "a"}'], "line 1: needs a key out of prompt, turns, question; it has text"),
        ("p.jsonl", ['{"prompt": 3}'], "line 1: the prompt must be a text, got int"),
        ("p.jsonl", ['{"prompt": " "}'], "line 1: the prompt is empty"),
        ("p.jsonl", [r'{"prompt": "a\ud800"}'], "line 1: the prompt is not valid Unicode: .* at character 1"),
        ("p.jsonl", ['{"turns": []}'], "line 1: turns must be a list"),
        ("p.jsonl", ['{"turns": [{"role": "system", "content": "a"}]}'], "line 1: no turn"),
        ("p.txt", ["a", "", "b"], "line 2: the prompt is empty"),
        ("p.txt", [""], "holds no prompts"),
        ("p.csv", ["a"], r"must be a \.jsonl or \.txt file"),
    ],
)
def test_unusable_files_are_refused_by_line(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(write(tmp_path, name, *lines))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        load_prompts(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes("größer".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        load_prompts(tmp_path / "latin.txt")


def test_texts_get_the_tokenizers_special_tokens_and_chats_the_templates() -> None:
    tokenizer = word_tokenizer()
    prompts: list[str | Prompt] = ["hello world", Prompt("world"), Prompt("hello", from_turns=True)]
    plain, chat = [[0, 4, 5], [0, 5], [0, 4]], [[0, 1, 4, 5, 2], [0, 1, 5, 2], [0, 1, 4, 2]]
    assert encode_prompts(tokenizer, prompts) == [*plain[:2], chat[2]]
    assert encode_prompts(tokenizer, prompts, "off") == plain
    assert encode_prompts(tokenizer, prompts, "on") == chat  # one BOS, the template's


def test_ids_are_taken_as_they_are() -> None:
    assert encode_prompts(None, [[3, 1], (2,)], "on") == [[3, 1], [2]]


@pytest.mark.parametrize(
    ("tokenizer", "prompts", "chat", "message"),
    [
        (None, ["hello"], "off", "prompt 1: the model has no tokenizer"),
        (word_tokenizer(None), [[1], "hello"], "on", "prompt 2: the tokenizer has no chat template; use chat 'off'"),
        (word_tokenizer(None), [Prompt("hello", True)], "auto", "no chat template"),
        (word_tokenizer(), ["hello", ""], "off", "prompt 2: the prompt is empty"),
        (word_tokenizer(), [[]], "off", "prompt 1: it has no tokens"),
        (word_tokenizer(), [3], "off", "must be a text or token ids, got int"),
        (word_tokenizer(), [], "off", "at least one"),
        (word_tokenizer(), "hello", "off", "put it into a list"),
        (word_tokenizer(), ["hello"], "never", "one of auto, on, off, got 'never'"),
    ],
)
def test_unusable_prompts_are_refused(tokenizer: Any, prompts: Any, chat: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_prompts(tokenizer, prompts, chat)


def test_prompt_and_budget_must_fit_the_positions() -> None:
    check_lengths([[1] * 6, [1] * 4], 4, 10)
    with pytest.raises(ValueError, match="prompt 2 has 7 tokens, which with 4 new ones exceeds the model's 10"):
        check_lengths([[1], [1] * 7], 4, 10)


def test_default_prompts_are_texts() -> None:
    assert len(DEFAULT_PROMPTS) == len(set(DEFAULT_PROMPTS)) >= 8
    assert all(text.strip() for text in DEFAULT_PROMPTS)
