"""Training with a memory of other texts: made of the buffer without a leak, or read from a file; and the command."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lede.buffers.records import PromptTrace
from lede.buffers.store import TraceStore
from lede.buffers.whole_store import free_storage, write_whole_store
from lede.checkpoint import load_policy
from lede.cli import main
from lede.copy_forecast import COPY_FEATURES
from lede.evaluation import EvaluateConfig, evaluate
from lede.features import MEMORY_FEATURES
from lede.lookup_table import lookups_of
from lede.models import load_model
from lede.phrase_folds import remember
from lede.phrase_making import PhrasesConfig, make_phrases
from lede.phrases import PhraseMemory
from lede.policies import LookupValuePolicy
from lede.simulation import simulate
from lede.sweep import SweepConfig, sweep
from lede.threshold_training import train_thresholds
from lede.trace_table import TraceTable
from lede.training import TrainConfig, train
from lede.training_config import with_defaults
from lede.training_data import load_data
from lede.wall_clock_data import WallClockData
from tests.copied_texts import VOCABULARY, copied_text
from tests.lede.test_training_sources import COSTS, FINGERPRINT, PROFILE, store

N_PROMPTS, BUDGET, N_LAYERS, SAYING = 16, 90, 6, 8


def with_sayings(trace: PromptTrace, seed: int) -> PromptTrace:
    """The text with sayings that other texts have too in it, and none in its prompt."""
    rng = np.random.default_rng((seed, trace.prompt_index))
    sayings = np.random.default_rng(5).integers(24, VOCABULARY, (6, SAYING))
    text = trace.token_ids.copy()
    for start in range(3, BUDGET - SAYING, 2 * SAYING):
        text[start : start + SAYING] = sayings[int(rng.integers(len(sayings)))]
    token = np.where(trace.match > 0, text[1:, None], 0).astype(np.int32)
    return replace(trace, token_ids=text, token=token)


def sayings(seed: int, n: int = N_PROMPTS) -> TraceStore:
    bare = store(1, seed)
    return TraceStore(bare.settings, [with_sayings(copied_text(i, BUDGET, N_LAYERS, seed), seed) for i in range(n)])


def config(tmp_path: Path, name: str = "run", **settings: Any) -> TrainConfig:
    PROFILE.save(tmp_path / "profile.json")
    return TrainConfig(
        buffer="memory", profile=str(tmp_path / "profile.json"), out=str(tmp_path / name), sources="lookup",
        **{"max_suffix": 3, "continuation": "recent", "algo": "thresholds", **settings},
    )  # fmt: skip


def test_a_memory_of_the_buffer_pays_on_new_texts_and_is_saved(tmp_path: Path) -> None:
    traces, others = sayings(0), sayings(1)
    table = TraceTable.from_traces(list(others.prompts), BUDGET, VOCABULARY)
    policy = train_thresholds(config(tmp_path), traces, others, progress=False)
    without = train_thresholds(config(tmp_path, "none", memory="none"), traces, others, progress=False)
    assert isinstance(policy, LookupValuePolicy)
    assert policy.memory is not None
    assert without.memory is None
    assert policy.features.names == (*COPY_FEATURES, "match_remembered")
    assert isinstance(without, LookupValuePolicy)
    assert without.features.names == COPY_FEATURES
    fast, slow = (simulate(each, table, COSTS).speedup for each in (policy, without))
    assert fast > 1.1 * slow
    again = load_policy(tmp_path / "run" / "policy")
    assert again.memory is not None
    assert again.memory.digest == policy.memory.digest
    assert simulate(again, table, COSTS).seconds.tolist() == simulate(policy, table, COSTS).seconds.tolist()
    settled = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settled["memory"] == "train"
    assert settled["resolved"]["memory"]["texts"] == N_PROMPTS
    # the folds told no text its own answer, so training texts were like new ones
    played = TraceTable.from_traces(list(traces.prompts), BUDGET, VOCABULARY)
    assert remember(played, seed=0).digest == policy.memory.digest
    assert simulate(policy, played, COSTS).speedup == pytest.approx(fast, rel=0.1)
    found = evaluate(
        EvaluateConfig(policy=(str(tmp_path / "run" / "policy"),), traces=tmp_path, resamples=10), traces, PROFILE
    )
    assert any("remembers 16 of the 16 texts" in note for note in found.notes)
    fair = evaluate(
        EvaluateConfig(policy=(str(tmp_path / "run" / "policy"),), traces=tmp_path, resamples=10), others, PROFILE
    )
    assert not fair.notes


def test_a_memory_from_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    traces, file = sayings(0), tmp_path / "m.safetensors"
    PhraseMemory.from_texts([(each.prompt_ids, each.token_ids) for each in sayings(1).prompts]).save(file)
    settings = config(tmp_path, algo="dqn", memory=str(file), steps=10, eval_interval=10, lookups=(2, 4))
    policy = train(settings, traces, progress=False)
    assert policy.memory is not None
    assert policy.memory.digest == PhraseMemory.load(file).digest
    assert policy.features.names == ("trace", *MEMORY_FEATURES)
    network = json.loads((tmp_path / "run" / "config.json").read_text())["resolved"]["network"]
    assert network == [len(policy.features.names), *settings.hidden, policy.network.n_outputs]
    assert load_policy(tmp_path / "run" / "policy").memory is not None
    PhraseMemory.from_texts([(each.prompt_ids, each.token_ids) for each in traces.prompts]).save(file)
    with (
        pytest.raises(ValueError, match="was trained on other data"),
        pytest.warns(UserWarning, match="holds (14|2) of the (14|2) (training|validation) texts"),
    ):
        train(replace(settings, steps=20, resume=True), traces, progress=False)


def test_a_sweep_goes_on_with_the_memory_that_it_began_with(tmp_path: Path) -> None:
    traces, file = sayings(0), tmp_path / "m.safetensors"
    texts = [(each.prompt_ids, each.token_ids) for each in sayings(1).prompts]
    PhraseMemory.from_texts(texts).save(file)
    single = config(tmp_path, algo="dqn", memory=str(file), steps=10, eval_interval=10, lookups=(2, 4))
    settings = SweepConfig(**{each.name: getattr(single, each.name) for each in fields(single)}, seeds=2)
    sweep(settings, traces, progress=False)
    PhraseMemory.from_texts(texts[1:]).save(file)
    with pytest.raises(ValueError, match="was trained on other data"):
        sweep(replace(settings, resume=True), traces, progress=False)


def test_what_is_scored_on_all_finds_itself_no_more_than_training_does(tmp_path: Path) -> None:
    traces = sayings(0)
    found = load_data(config(tmp_path, holdout=0.0).settled("traces"), traces, None, PROFILE)
    assert isinstance(found, WallClockData)
    assert found.lookup is not None
    mine, scored = (lookups_of(each, found.lookup, memory=found.memory) for each in (found.training, found.validation))
    np.testing.assert_array_equal(mine.run, scored.run)


def test_what_is_scored_on_may_have_another_budget(tmp_path: Path) -> None:
    traces, bare = sayings(0, 4), store(1, 0)
    short = TraceStore(
        replace(bare.settings, max_new_tokens=30), [copied_text(i, 30, N_LAYERS, 1) for i in range(50, 53)]
    )
    found = load_data(config(tmp_path).settled("traces"), traces, short, PROFILE)
    assert isinstance(found, WallClockData)
    assert (found.training.max_new_tokens, found.validation.max_new_tokens) == (BUDGET, 30)


def test_a_tokenizer_that_is_not_known_of_all_is_not_claimed(tmp_path: Path) -> None:
    known, names = sayings(0, 2), [str(tmp_path / "known.zarr"), str(tmp_path / "unknown.zarr")]
    for name, fingerprint in zip(names, ({**FINGERPRINT, "tokenizer": "abc"}, {}), strict=True):
        settings = replace(known.settings, fingerprint=fingerprint)
        write_whole_store(free_storage(name), settings, iter(known))
    assert make_phrases(PhrasesConfig(tmp_path / "a", buffer=(names[0],))).tokenizer == "abc"
    assert make_phrases(PhrasesConfig(tmp_path / "b", buffer=tuple(names))).tokenizer is None


def test_memories_that_nobody_drafts_from_or_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory train is drafted from by lookups"):
        replace(config(tmp_path), sources="exit", memory="train").settled("traces")
    assert replace(config(tmp_path), sources="exit").settled("traces").memory == "none"
    assert with_defaults({})["memory"] == "none"
    file = tmp_path / "m.safetensors"
    PhraseMemory.from_texts([((), (1, VOCABULARY))]).save(file)
    with pytest.raises(ValueError, match=f"holds token {VOCABULARY}, the vocabulary of model 'copies'"):
        train_thresholds(config(tmp_path, memory=str(file)), sayings(0, 2), progress=False)


def test_the_command_reads_stores_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces, path = sayings(0, 3), tmp_path / "traces.zarr"
    write_whole_store(free_storage(str(path)), traces.settings, iter(traces))
    assert main(["phrases", "--buffer", str(path), "--out", str(tmp_path / "a"), "--max-suffix", "2"]) == 0
    found = PhraseMemory.load(tmp_path / "a")
    wanted = PhraseMemory.from_texts([(each.prompt_ids, each.token_ids) for each in traces.prompts], 2)
    assert found.digest == wanted.digest
    assert f"{len(found):,} n-grams of up to 2 tokens, of 3 texts" in capsys.readouterr().out
    model = load_model("demo")
    (tmp_path / "b.txt").write_text("import numpy as np\nimport os\n")
    (tmp_path / "b.jsonl").write_text('{"text": "import os"}\n\n{"prompt": "def add(a, b):", "answer": " return a"}\n')
    made = make_phrases(
        PhrasesConfig(tmp_path / "b", texts=(tmp_path / "b.txt", tmp_path / "b.jsonl"), model="demo"), model
    )
    assert made.tokenizer is not None
    made.check_model(model)
    asked, said = (model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("import", " numpy"))
    assert made.chain(asked, 1) in (said[:1], model.tokenizer(" os", add_special_tokens=False)["input_ids"][:1])
    assert made.texts.size == 3
    assert not main(["phrases", "--texts", str(tmp_path / "b.txt"), "--model", "demo", "--out", str(tmp_path / "c")])
    assert FINGERPRINT["tokenizer"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give texts to remember"),
        (["--texts", "a.txt"], "give texts and model both"),
        (["--buffer", "a.zarr", "--model", "demo"], "give texts and model both"),
        (["--texts", "a.pdf", "--model", "demo"], "must be .jsonl or .txt files, got a.pdf"),
        (["--buffer", "a.zarr", "--max-suffix", "0"], "--max-suffix must be within 1..32, got 0"),
        (["--texts", "some.txt", "--model", "demo", "--out", "."], "give a file as --out"),
        (["--texts", "some.txt", "--model", "demo", "--out", "some.txt/m"], "cannot make the folder of some.txt/m"),
        (["--texts", "bad.jsonl", "--model", "demo"], "bad.jsonl, line 2: must be an object with `text`"),
        (["--texts", "broken.jsonl", "--model", "demo"], "broken.jsonl, line 1: not JSON"),
        (["--texts", "missing.txt", "--model", "demo"], "cannot read texts 'missing.txt'"),
        (["--texts", "empty.txt", "--model", "demo"], "nothing to remember"),
    ],
)
def test_what_it_can_t_read_is_told_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"text": "a b"}\n{"prompt": "a"}\n')
    Path("broken.jsonl").write_text("{\n")
    Path("empty.txt").write_text("")
    Path("some.txt").write_text("a b c")
    out = [] if "--out" in arguments else ["--out", "m"]
    assert main(["phrases", *arguments, *out]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
