"""What goes wrong in a benchmark: told, counted, and the rest goes on; or refused before anything is done."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import lede.bench_decoding
import lede.bench_lineup
import lede.layer_agreement
import lede.tuning_measure
from lede.bench import run_bench
from lede.bench_checks import check_prompts
from lede.bench_config import BenchConfig
from lede.bench_progress import BenchProgress, Notes
from lede.bench_runs import CONTROL, PLAIN, SETUP, TRANSFORMERS, read_runs, read_setup
from lede.collectors import CollectConfig, collect
from lede.interleaving import lede_contender
from lede.models import EarlyExitModel, load_model
from lede.phrases import PhraseMemory
from lede.policies import StaticPolicy
from lede.rivals import rival_contender
from lede.suites import Item, Suite
from tests.lede.test_bench import N_TEST, STATIC, Letters, config, prompts
from tests.tiny_models import tiny_hf_model

__all__ = ["prompts"]  # a fixture


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    return load_model((tiny_hf_model("llama", torch.float32), Letters()))


def no_memory(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("out of\nmemory")


def test_a_policy_whose_every_setting_fails_is_told_and_the_others_go_on(
    model: EarlyExitModel, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("this model can't leave out sublayers")

    def contender(model: Any, name: str, policy: Any, *rest: Any) -> Any:
        made = lede_contender(model, name, policy, *rest)
        return made if policy is None else replace(made, decode=decode)

    monkeypatch.setattr(lede.tuning_measure, "lede_contender", contender)
    settings = config(prompts, tmp_path / "out", policy=("swift", STATIC), preset="transfer", sweep=("static",))
    rows = {row["name"]: row for row in run_bench(settings, model)["rows"]}
    for name in ("swift", "static", "preset transfer"):
        assert rows[name]["n_failed"] == N_TEST
        assert "can't leave out sublayers" in rows[name]["error"]
        assert rows[name]["exact"] is None
    assert (rows[STATIC]["n_failed"], rows[STATIC]["exact"]) == (0, "yes")


def test_validation_prompts_without_room_are_failures_of_the_tuning(
    model: EarlyExitModel, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lede.tuning_measure, "prepare", no_memory)
    rows = {r["name"]: r for r in run_bench(config(prompts, tmp_path / "out", policy=("static",)), model)["rows"]}
    assert rows["static"]["n_failed"] == N_TEST
    assert "failed on validation prompt 0: prefill: OutOfMemoryError: out of memory" in rows["static"]["error"]
    assert rows[PLAIN]["n_failed"] == 0


def test_a_comparison_without_room_is_a_failure_of_the_prompt(
    model: EarlyExitModel, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lede.bench_decoding, "compare", no_memory)
    monkeypatch.setattr(lede.layer_agreement, "layer_agreement", no_memory)
    settings = config(prompts, tmp_path / "out")
    run_bench(settings, model)
    runs = read_runs(settings.out)
    assert {run.error for run in runs} == {"comparison: OutOfMemoryError: out of memory"}
    assert all(run.token_ids == () and run.reference is None for run in runs)
    assert read_setup(settings.out).suites[0].agreement == ()


def test_plain_texts_decide_where_transformers_failed(
    model: EarlyExitModel, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contender(*args: Any) -> Any:
        made = rival_contender(*args)

        def decode(call: Any) -> Any:
            return no_memory() if len(call.ids) == len("prompt cccc") + 1 else made.decode(call)

        return replace(made, decode=decode)

    monkeypatch.setattr(lede.bench_lineup, "rival_contender", contender)
    settings = config(prompts, tmp_path / "out")
    rows = {row["name"]: row for row in run_bench(settings, model)["rows"]}
    found = {(run.policy, run.prompt_index): run.reference for run in read_runs(settings.out)}
    for name in (PLAIN, CONTROL, STATIC):
        assert [found[name, index] for index in range(2, 6)] == [TRANSFORMERS] * 3 + [PLAIN]
        assert (rows[name]["exact"], rows[name]["exact_against"]) == ("yes", PLAIN)
    assert rows[TRANSFORMERS]["exact_against"] == TRANSFORMERS
    assert "yes (own)" in (settings.out / "report.md").read_text()


def test_nothing_draws_while_a_decode_is_timed() -> None:
    console, before = Console(force_terminal=True, width=80), set(threading.enumerate())
    with console.capture() as shown, BenchProgress("code", 3, 0, console) as progress:
        progress.decoded("static", False)
        assert set(threading.enumerate()) == before
    assert "static" in shown.get()
    with console.capture() as shown, Notes(console) as notes:
        notes.tell("tuning static")
        assert set(threading.enumerate()) == before
    assert "tuning static" in shown.get()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"suite": ("gsm8k:nowhere.jsonl",)}, r"cannot read nowhere\.jsonl: No such file"),
        ({"suite": ("mt-bench:x",)}, "there is no suite 'mt-bench:x'"),
        ({"policy": ("static",), "validation_prompts": 0}, "'static' is tuned on validation prompts, and"),
        ({"sweep": ("static",), "validation_prompts": 0}, "'static' is tuned on validation prompts, and"),
        ({"preset": "window", "validation_prompts": 0}, "what preset window adds is tuned on validation prompts"),
        ({"preset": "ablation"}, "the preset ablation takes a learned policy apart"),
    ],
)
def test_arguments_are_refused_before_a_model_is_loaded(
    settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lede.models.load_model", lambda *args: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=message):
        run_bench(BenchConfig(**{"out": tmp_path / "out", "policy": (STATIC,), **settings}))
    assert not (tmp_path / "out").exists()


def suite(name: str, test: list[list[int]], validation: list[list[int]]) -> Suite:
    items = [tuple(Item(i, tuple(ids), "", None) for i, ids in enumerate(each)) for each in (test, validation)]
    return Suite(name, f"jsonl:{name}", items[0], items[1], 0)


def test_what_moves_between_suites_was_tuned_on_no_test_prompt(tmp_path: Path) -> None:
    suites = [suite("a", [[1], [2]], [[3]]), suite("b", [[4], [3]], [[5]])]
    check_prompts(BenchConfig(tmp_path, policy=(STATIC,)), suites, [STATIC])
    check_prompts(BenchConfig(tmp_path, preset="window"), suites, [])
    with pytest.raises(ValueError, match="suite a, moved to all suites: 1 validation prompts are test prompts too"):
        check_prompts(BenchConfig(tmp_path, preset="transfer"), suites, [])
    with pytest.raises(ValueError, match="'del' is tuned on validation prompts, and suite c has none"):
        check_prompts(BenchConfig(tmp_path, policy=("del",)), [suite("c", [[1]], [])], ["del"])


def test_test_prompts_that_a_policy_has_seen_are_counted(model: EarlyExitModel, tmp_path: Path) -> None:
    seen = [[1, 2, 3], [4, 5, 6]]
    collect(CollectConfig(tmp_path / "traces.zarr", collector="teacher", max_new_tokens=4, branches=0.0), model, seen)
    StaticPolicy(exit_layer=2).save_pretrained(str(tmp_path / "run" / "policy"))
    (tmp_path / "run" / "config.json").write_text('{"buffer": "../traces.zarr"}')
    folder = str(tmp_path / "run" / "policy")
    with pytest.warns(UserWarning, match=r"1 of the 2 test prompts of code are among those that .*policy was trained"):
        check_prompts(BenchConfig(tmp_path, policy=(folder,)), [suite("code", [[4, 5, 6], [7, 8, 9]], [])], [folder])
    check_prompts(BenchConfig(tmp_path, policy=(folder,)), [suite("code", [[7, 8, 9]], [])], [folder])


def test_test_prompts_that_a_memory_holds_are_counted(tmp_path: Path) -> None:
    PhraseMemory.from_texts([([4, 5, 6], [1, 2]), ([8, 9], [1, 2])]).save(tmp_path / "phrases.safetensors")
    text = f"lookup:memory={tmp_path / 'phrases.safetensors'}"
    with pytest.warns(UserWarning, match=r"phrases.safetensors holds 1 of the 2 test prompts of code, and what was"):
        check_prompts(BenchConfig(tmp_path, policy=(text,)), [suite("code", [[4, 5, 6], [7, 8, 9]], [])], [text])
    check_prompts(BenchConfig(tmp_path, policy=(text,)), [suite("code", [[7, 8, 9]], [])], [text])


def test_a_failed_contender_stays_failed_on_resumption(
    model: EarlyExitModel, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(prompts, tmp_path / "out", policy=("static",))
    with monkeypatch.context() as patched:
        patched.setattr(lede.tuning_measure, "prepare", no_memory)
        run_bench(settings, model)
    before = (settings.out / SETUP).read_bytes(), read_runs(settings.out)
    run_bench(settings, model)
    assert ((settings.out / SETUP).read_bytes(), read_runs(settings.out)) == before
