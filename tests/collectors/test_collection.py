from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from lede.buffers import StoreError, StoreSettings, StoreWriter, TraceStore, TransitionStore, open_store, same_record
from lede.checkpoint import save_policy
from lede.collectors import CollectConfig, CollectProgress, collect, collection, plan, recorder
from lede.models import DEMO_FOLDER, EarlyExitModel, load_model
from lede.onednn import packing_works
from lede.policies import LearnedPolicy, StaticPolicy
from tests.collectors.saved_model import assert_close_content, save_tiny_model
from tests.tiny_models import prompt, tiny_model

MODEL = tiny_model("llama")
PROMPTS = [prompt(i, 4 + i % 3) for i in range(8)]


def config(out: Path, **settings: Any) -> CollectConfig:
    return CollectConfig(out=out, max_new_tokens=6, candidates="1,2,4", batch_size=3, shard_prompts=2, **settings)


def assert_same_content(a: Path, b: Path) -> None:
    first, second = open_store(a, verify=True), open_store(b, verify=True)
    assert first.prompt_indices == second.prompt_indices
    assert first.settings.differences(second.settings) == []
    found: list[Any] = list(first)
    wanted: list[Any] = list(second)
    for x, y in zip(found, wanted, strict=True):
        assert same_record(x, y)


def test_settings_are_recorded(tmp_path: Path) -> None:
    out = collect(config(tmp_path / "a", final_reward=1.0, seed=3, temperature=0.5, top_k=7, top_p=0.9), MODEL, PROMPTS)
    store = open_store(out)
    assert isinstance(store, TransitionStore)
    assert out == tmp_path / "a"
    settings = store.settings
    assert (settings.candidates, settings.max_new_tokens, settings.seed) == ((1, 2, 4), 6, 3)
    assert (settings.temperature, settings.top_k, settings.top_p) == (0.5, 7, 0.9)
    assert (settings.explore, settings.epsilon, settings.reward.final_reward) == ("uniform", None, 1.0)
    assert settings.fingerprint["architecture"]["n_layers"] == 6
    assert store.prompt_indices == tuple(range(8))


def test_the_teachers_branches_are_a_setting(tmp_path: Path) -> None:
    teacher = config(tmp_path / "some", collector="teacher")
    assert (teacher.branches, teacher.branch_depth) == (0.1, 11)
    found = {}
    for share, depth in ((0.1, 11), (1.0, 3), (0.0, 11)):
        run = replace(teacher, out=tmp_path / f"{share}", branches=share, branch_depth=depth)
        store = open_store(collect(run, MODEL, PROMPTS))
        assert isinstance(store, TraceStore)
        assert (store.settings.branch_share, store.settings.branch_depth) == (share, depth)
        found[share] = sum(trace.n_branches for trace in store)
        assert all(trace.branch_depth == depth for trace in store)
    wrong = sum(int((trace.match[:, [0, 1, 3]] == 0).sum()) for trace in store)
    assert found[1.0] == wrong > 50
    assert found[0.0] == 0 < found[0.1] < wrong / 5
    with pytest.raises(ValueError, match=r"branch_share: 1\.0 / 0\.5; branch_depth: 3 / 4\. Use"):
        collect(replace(teacher, out=tmp_path / "1.0", branches=0.5, branch_depth=4), MODEL, PROMPTS)
    rollout = open_store(collect(config(tmp_path / "r", episodes=1, branches=0), MODEL, PROMPTS))
    assert rollout.settings.branch_share == 0


def test_prompts_come_from_a_file_in_its_order(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    texts = ["def f():", "import os\n", "class A:"]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    settings = CollectConfig(tmp_path / "s", prompts=file, collector="teacher", episodes=2, max_new_tokens=3)
    store = open_store(collect(settings))
    assert isinstance(store, TraceStore)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    assert [tokenizer.decode(record.prompt_ids) for record in store] == texts[:2]


def test_running_again_resumes_and_more_episodes_extend(tmp_path: Path) -> None:
    for collector in ("rollout", "teacher"):
        whole = collect(config(tmp_path / f"whole-{collector}", collector=collector), MODEL, PROMPTS)
        part = collect(config(tmp_path / f"part-{collector}", collector=collector, episodes=3), MODEL, PROMPTS)
        assert open_store(part).prompt_indices == (0, 1, 2)
        collect(config(part, collector=collector), MODEL, PROMPTS)
        assert_same_content(whole, part)
        shards = open_store(part).n_shards
        collect(config(part, collector=collector), MODEL, PROMPTS)  # nothing is left to do
        assert open_store(part).n_shards == shards


def test_what_is_done_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a copy as long as the collection: one a prompt took hours where there are a million."""
    asked = []

    def done(self: StoreWriter) -> frozenset[int]:
        asked.append(1)
        return frozenset(self._done)

    monkeypatch.setattr(StoreWriter, "done", property(done))
    collect(config(tmp_path / "s"), MODEL, PROMPTS)
    assert (len(asked), len(open_store(tmp_path / "s"))) == (1, 8)


def test_a_worker_passes_over_what_another_collection_has_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who hands out the prompts looked at the store before the worker had loaded its model."""
    collect(config(tmp_path / "s", episodes=3), MODEL, PROMPTS)
    monkeypatch.setattr(recorder, "load_model", lambda *args, **kwargs: MODEL)
    worker = recorder.Recorder(recorder.Order(config(tmp_path / "s"), PROMPTS, torch.get_num_threads()))
    worker.record(range(1, 5), lambda n_tokens, n_prompts: None)
    store = open_store(tmp_path / "s", verify=True)
    assert (store.prompt_indices, store.duplicates) == ((0, 1, 2, 3, 4), 0)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    out = collect(config(tmp_path / "s", episodes=2), MODEL, PROMPTS)
    for change, name in (
        ({"seed": 1}, "seed: 0 / 1"),
        ({"temperature": 1.0}, r"temperature: 0\.0 / 1\.0"),
        ({"candidates": "1,2"}, "candidates"),
        ({"explore": "random"}, "explore: uniform / random"),
        ({"collector": "teacher"}, "kind: transitions / traces"),
        ({"final_reward": 1.0}, "reward"),
        ({"chat": "off"}, "chat"),
    ):
        with pytest.raises(ValueError, match=name):
            collect(replace(config(out), **change), MODEL, PROMPTS)
    with pytest.raises(ValueError, match="prompts_digest"):
        collect(config(out), MODEL, PROMPTS[1:])
    with pytest.raises(ValueError, match="fingerprint"):
        collect(config(out), tiny_model("gpt2"), PROMPTS)
    assert open_store(out).prompt_indices == (0, 1)
    collect(replace(config(out), batch_size=1, shard_prompts=5), MODEL, PROMPTS)  # these change no content
    assert open_store(out).prompt_indices == tuple(range(8))


def test_more_episodes_than_prompts_need_cycle(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="9 episodes need as many prompts, there are 8"):
        collect(config(tmp_path / "s", episodes=9), MODEL, PROMPTS)
    assert not (tmp_path / "s").exists()
    out = collect(config(tmp_path / "s", episodes=5, cycle=True), MODEL, PROMPTS[:2])
    records: list[Any] = list(open_store(out))
    assert [record.prompt_index for record in records] == list(range(5))
    assert [record.prompt_ids.tolist() for record in records] == [PROMPTS[i % 2] for i in range(5)]
    assert not same_record(records[0], replace(records[2], prompt_index=0))  # other streams


def test_only_the_prompts_in_use_have_to_fit(tmp_path: Path) -> None:
    prompts = [*PROMPTS[:2], prompt(0, 255)]
    assert len(open_store(collect(config(tmp_path / "s", episodes=2), MODEL, prompts))) == 2
    with pytest.raises(ValueError, match="prompt 3 has 255 tokens"):
        collect(config(tmp_path / "s"), MODEL, prompts)


def test_an_interrupted_collection_is_sound_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = collect(config(tmp_path / "whole"), MODEL, PROMPTS)

    def interrupt(self: CollectProgress) -> None:
        if self.done == 4:
            raise KeyboardInterrupt
        self.done += 1

    with monkeypatch.context() as patch:
        patch.setattr(CollectProgress, "prompt", interrupt)
        with pytest.raises(KeyboardInterrupt):
            collect(config(tmp_path / "s"), MODEL, PROMPTS)
    told = capsys.readouterr().out
    assert f"interrupted; 5 prompts are safe in {tmp_path / 's'}" in told
    assert len(open_store(tmp_path / "s", verify=True)) == 5
    collect(config(tmp_path / "s"), MODEL, PROMPTS)
    assert_same_content(whole, tmp_path / "s")


@pytest.mark.parametrize("collector", ["rollout", "teacher"])
def test_numbers_that_are_not_finite_never_reach_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collector: Any
) -> None:
    name, column = f"collect_{collector}", {"rollout": "observations", "teacher": "entropy"}[collector]
    real = getattr(plan, name)

    def overflowing(*args: Any) -> Any:
        for record in real(*args):
            if record.prompt_index == 3:
                getattr(record, column)[-1, 2] = np.nan
            yield record

    with monkeypatch.context() as patch:
        patch.setattr(plan, name, overflowing)
        with pytest.raises(ValueError, match=rf"prompt 3 .*: {column} hold .* not finite.* in float64"):
            collect(config(tmp_path / "s", collector=collector), MODEL, PROMPTS)
    assert open_store(tmp_path / "s", verify=True).prompt_indices == (0, 1, 2)
    collect(config(tmp_path / "s", collector=collector), MODEL, PROMPTS)
    assert len(open_store(tmp_path / "s", verify=True)) == 8


def test_a_policy_explores_and_is_recorded(tmp_path: Path) -> None:
    text = "threshold:measure=entropy;thresholds=4.8447"
    settings = open_store(collect(config(tmp_path / "a", explore=text), MODEL, PROMPTS)).settings
    assert (settings.explore, settings.epsilon) == (text, (0.1, 0.1))
    annealed = config(tmp_path / "b", explore=text, epsilon="1:0")
    settings = open_store(collect(replace(annealed, episodes=4), MODEL, PROMPTS)).settings
    assert (settings.explore, settings.epsilon) == (f"{text} over 4 prompts", (1.0, 0.0))
    with pytest.raises(ValueError, match=r"over 4 prompts / .* over 8 prompts"):  # epsilons would not be the same
        collect(annealed, MODEL, PROMPTS)


def test_a_saved_policy_is_recorded_with_its_digest(tmp_path: Path) -> None:
    def save(scale: float) -> None:
        layers = [(np.full((2, 4), scale, dtype=np.float32), np.zeros(2, dtype=np.float32))]
        save_policy(LearnedPolicy.from_network(layers, candidates=(1, 2)), tmp_path / "policy")

    save(1.0)
    settings = config(tmp_path / "s", explore=str(tmp_path / "policy"), episodes=2)
    collect(settings, MODEL, PROMPTS)
    save(2.0)
    with pytest.raises(ValueError, match="explore: "):
        collect(settings, MODEL, PROMPTS)
    save_policy(StaticPolicy(exit_layer=1), tmp_path / "policy")  # a policy without weights
    collect(replace(settings, out=tmp_path / "t"), MODEL, PROMPTS)
    save_policy(StaticPolicy(exit_layer=2), tmp_path / "policy")
    with pytest.raises(ValueError, match="explore: "):
        collect(replace(settings, out=tmp_path / "t"), MODEL, PROMPTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"collector": "pupil"}, "one of rollout, teacher, got 'pupil'"),
        ({"episodes": 0}, "episodes must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"collector": "teacher", "explore": "random"}, "leave out explore and epsilon"),
        ({"branches": 0.5}, "a rollout .* has no branches"),
        ({"branch_depth": 5}, "a rollout .* has no branches"),
        ({"collector": "teacher", "branches": 1.5}, r"within 0\.\.1 of the wrong drafts, got 1\.5"),
        ({"collector": "teacher", "branch_depth": 0}, r"branch_depth must be within 1\.\."),
        ({"epsilon": "0.1"}, "uniform exploration has no epsilon"),
        ({"explore": "random", "epsilon": "2"}, r"within 0\.\.1"),
        ({"explore": "plain"}, "never exits"),
        ({"explore": "nobody"}, "'nobody' is neither a folder nor one of"),
        ({"max_new_tokens": 1}, "at least 2"),
        ({"max_new_tokens": 255}, "exceeds the model's 256 positions"),
        ({"candidates": "7"}, r"within 1\.\.5"),
    ],
)
def test_unusable_settings_are_refused_before_anything_is_written(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        collect(CollectConfig(**{"out": tmp_path / "s", **settings}), MODEL, PROMPTS)
    assert not (tmp_path / "s").exists()


def test_what_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError):
        collect(config(tmp_path), MODEL, PROMPTS)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.skipif(not packing_works(torch.float32), reason="torch has no oneDNN that multiplies by packed weights")
def test_packed_weights_change_rounding_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A store that was begun without them is gone on with by them."""
    loaded: list[EarlyExitModel] = []

    def noted(*arguments: Any, **options: Any) -> EarlyExitModel:
        loaded.append(load_model(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(collection, "load_model", noted)
    monkeypatch.setattr(recorder, "load_model", noted)
    folder = save_tiny_model(tmp_path / "model")
    plain = config(tmp_path / "plain", model=str(folder), collector="teacher", branches=1.0)
    mixed = replace(plain, out=tmp_path / "mixed", pack_weights=True)
    collect(plain, prompts=PROMPTS)
    collect(replace(mixed, episodes=4, pack_weights=False), prompts=PROMPTS)
    collect(mixed, prompts=PROMPTS)
    assert [model.packed is not None for model in loaded] == [False, False, True]
    assert_close_content(plain.out, mixed.out)
    worker = recorder.Recorder(
        recorder.Order(replace(mixed, out=tmp_path / "shared"), PROMPTS, torch.get_num_threads())
    )
    worker.record(range(8), lambda *_: None)
    assert loaded[-1].packed is not None
    assert_close_content(plain.out, tmp_path / "shared")


def test_the_settings_type_is_the_stores(tmp_path: Path) -> None:
    store = open_store(collect(config(tmp_path / "t", collector="teacher", episodes=1), MODEL, PROMPTS))
    assert isinstance(store.settings, StoreSettings)
    assert (store.settings.explore, store.settings.epsilon) == (None, None)
