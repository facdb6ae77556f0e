"""`lede buffer merge` and `split`: stores out of stores, each prompt once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lede.buffers import (
    PromptRollout,
    StoreError,
    StoreSettings,
    StoreWriter,
    check_store,
    held_out_prompts,
    merge_stores,
    open_store,
    same_record,
    split_store,
)
from lede.buffers.local_storage import LocalStorage
from lede.buffers.storage import storage_for
from lede.buffers.whole_store import CLAIM, write_whole_store
from lede.cli import main
from lede.features import FeatureConfig
from lede.rewards import RewardConfig
from tests.buffers.samples import make_rollout, make_trace, settings, with_branches

FINGERPRINT = {"architecture": {"n_layers": 6}, "tokenizer": "ab", "logits": [0.5, 1.0], "dtype": "float32"}


def make(path: Path, records: Any, made: StoreSettings | None = None, shard_prompts: int = 3) -> Path:
    with StoreWriter.open(path, made or settings("transitions"), shard_prompts=shard_prompts) as writer:
        for record in records:
            writer.add(record)
    return path


def assert_holds(path: Any, records: Any) -> None:
    assert check_store(path).damage == ()
    store: Any = open_store(path)
    assert len(store) == len(records)
    assert all(same_record(a, b) for a, b in zip(store, records, strict=True))


def test_parts_of_a_collection_come_together(tmp_path: Path) -> None:
    records = [make_rollout(i, eos=i % 2 == 0) for i in range(12)]
    parts = [make(tmp_path / f"{i}.zarr", records[i::3]) for i in range(3)]
    merged = merge_stores(parts, tmp_path / "all.zarr")
    assert (merged.prompts, merged.duplicates) == (12, 0)
    assert_holds(tmp_path / "all.zarr", records)
    assert open_store(tmp_path / "all.zarr").settings == open_store(parts[0]).settings
    again = merge_stores(parts[::-1], tmp_path / "again.zarr")
    assert again.prompts == 12
    files = {f.relative_to(tmp_path / "all.zarr"): f.read_bytes() for f in (tmp_path / "all.zarr").rglob("*.json")}
    other = {f.relative_to(tmp_path / "again.zarr"): f.read_bytes() for f in (tmp_path / "again.zarr").rglob("*.json")}
    assert files == other  # whatever the order of the parts


def test_traces_with_branches_come_together(tmp_path: Path) -> None:
    traces = [with_branches(make_trace(i, n_tokens=5), i % 3) for i in range(5)]
    made = settings("traces", branch_share=0.5)
    parts = [make(tmp_path / "a.zarr", traces[:2], made), make(tmp_path / "b.zarr", traces[2:], made)]
    merge_stores(parts, tmp_path / "all.zarr")
    assert_holds(tmp_path / "all.zarr", traces)


def test_a_prompt_of_two_parts_is_kept_once(tmp_path: Path) -> None:
    records = [make_rollout(i) for i in range(4)]
    nearly = replace(records[1], observations=records[1].observations + np.float32(1e-6))
    parts = [make(tmp_path / "a.zarr", records[:2]), make(tmp_path / "b.zarr", [nearly, *records[2:]])]
    merged = merge_stores(parts, tmp_path / "all.zarr")
    assert (merged.prompts, merged.duplicates) == (4, 1)
    assert_holds(tmp_path / "all.zarr", records)


def test_two_texts_for_one_prompt_are_refused(tmp_path: Path) -> None:
    records = [make_rollout(i) for i in range(3)]
    other = replace(records[2], token_ids=records[2].token_ids + 1)
    parts = [make(tmp_path / "a.zarr", records), make(tmp_path / "b.zarr", [other])]
    with pytest.raises(ValueError, match=r"a.zarr and .*b.zarr have different texts for prompt 2"):
        merge_stores(parts, tmp_path / "all.zarr")
    assert not (tmp_path / "all.zarr").exists()


@pytest.mark.parametrize("renumber", [False, True])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fingerprint": FINGERPRINT | {"tokenizer": "cd"}, "model": "other"}, "model: tiny / other"),
        (
            {"features": FeatureConfig(names=("depth", "entropy", "trace", "margin"))},
            "features: .*confidence.* / .*margin",
        ),
        ({"reward": RewardConfig(final_reward=1.0)}, "reward: .*0.0.* / .*1.0"),
        ({"candidates": (1, 4)}, r"candidates: \[1, 2, 4\] / \[1, 4\]"),
        ({"vocab_size": 60}, "vocab_size: 50 / 60"),
        ({"temperature": 0.5}, "temperature: 0.0 / 0.5"),
        ({"max_new_tokens": 128}, "max_new_tokens: 64 / 128"),
    ],
)
def test_unlike_stores_are_refused_by_name(tmp_path: Path, change: Any, named: str, renumber: bool) -> None:
    ours = settings("transitions", fingerprint=FINGERPRINT)
    theirs = replace(ours, **change, prompts_digest="cd" if renumber else "")
    made = make(tmp_path / "a.zarr", [make_rollout(0)], ours), make(tmp_path / "b.zarr", [], theirs)
    with pytest.raises(ValueError, match=rf"a.zarr and .*b.zarr can't be merged, .*\(.*a.zarr / .*b.zarr\): .*{named}"):
        merge_stores(made, tmp_path / "all.zarr", renumber)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zarr", "b.zarr"]


def test_traces_and_transitions_are_unlike(tmp_path: Path) -> None:
    made = make(tmp_path / "a.zarr", [], settings("traces")), make(tmp_path / "b.zarr", [make_rollout(0)])
    with pytest.raises(ValueError, match="kind: traces / transitions"):
        merge_stores(made, tmp_path / "all.zarr")


def test_collections_are_laid_one_after_the_other(tmp_path: Path) -> None:
    ours = settings("transitions", prompts_digest="ab", explore="uniform", seed=1)
    theirs = replace(ours, prompts_digest="cd", explore="threshold", epsilon=(0.2, 0.1), seed=2)
    records = [[make_rollout(i) for i in (0, 2)], [make_rollout(i) for i in (0, 1, 5)]]
    made = make(tmp_path / "a.zarr", records[0], ours), make(tmp_path / "b.zarr", records[1], theirs)
    with pytest.raises(ValueError, match=r"prompts_digest: ab / cd.* other collections .*: renumbering \(--renumber\)"):
        merge_stores(made, tmp_path / "all.zarr")
    assert merge_stores(made, tmp_path / "all.zarr", renumber=True).prompts == 5
    expected = [replace(record, prompt_index=i) for i, record in enumerate([*records[0], *records[1]])]
    assert_holds(tmp_path / "all.zarr", expected)
    merged = open_store(tmp_path / "all.zarr").settings
    assert (merged.explore, merged.epsilon, merged.seed) == ("uniform + threshold", None, 1)
    for one in (ours, theirs):  # neither collection can be resumed in it
        with pytest.raises(ValueError, match="prompts_digest"):
            StoreWriter.open(tmp_path / "all.zarr", one)


def test_parts_of_a_collection_are_not_renumbered(tmp_path: Path) -> None:
    made = make(tmp_path / "a.zarr", [make_rollout(0)]), make(tmp_path / "b.zarr", [make_rollout(1)])
    with pytest.raises(ValueError, match=r"are parts of one collection, .*: leave out renumber"):
        merge_stores(made, tmp_path / "all.zarr", renumber=True)
    theirs = replace(settings("transitions"), prompts_digest="cd", seed=2)
    other = make(tmp_path / "c.zarr", [make_rollout(0)], theirs)
    with pytest.raises(ValueError, match=r"a.zarr and .*b.zarr are parts of one collection"):  # not next to each other
        merge_stores([other, *made], tmp_path / "all.zarr", renumber=True)


def test_a_merge_that_can_not_be_is_refused_before_any_work(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a.zarr", [make_rollout(0)]), make(tmp_path / "b.zarr", [make_rollout(1)])
    with pytest.raises(ValueError, match="two stores or more, got 1"):
        merge_stores([a], tmp_path / "all.zarr")
    with pytest.raises(ValueError, match="named twice"):
        merge_stores([a, a], tmp_path / "all.zarr")
    with pytest.raises(ValueError, match="exists already"):
        merge_stores([a, b], a)
    with pytest.raises(StoreError, match="there is no store at"):
        merge_stores([a, tmp_path / "nothing.zarr"], tmp_path / "all.zarr")


def test_damage_found_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a.zarr", [make_rollout(0)]), make(tmp_path / "b.zarr", [make_rollout(1)])
    chunk = sorted(b.glob("shards/*/rewards/c.*"))[0]
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\0")
    with pytest.raises(StoreError, match=r"rewards/c.* was altered"):
        merge_stores([a, b], tmp_path / "all.zarr")
    assert not (tmp_path / "all.zarr").exists()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("url", ["memory://two-at-once/{}.zarr", "{}/all.zarr"])
def test_two_that_make_one_store_at_once_spare_each_other(tmp_path: Path, url: str, fails: bool) -> None:
    place, made = url.format(tmp_path), settings("transitions")

    def records(n: int) -> Iterator[PromptRollout]:
        """What one has read when the other comes and, while it works, goes."""
        with pytest.raises(ValueError, match=r"exists already"):
            write_whole_store(place, made, [make_rollout(7)])
        with pytest.raises(StoreError, match=r"is no store of lede: it has no file"):
            StoreWriter.open(place, made)
        yield from map(make_rollout, range(n))
        if fails:
            raise OSError(28, "No space left on device")

    if fails:
        with pytest.raises(OSError, match="No space left"):
            write_whole_store(place, made, records(3))
        assert storage_for(place).state() == "absent"
    else:
        write_whole_store(place, made, records(3))
        assert_holds(place, [make_rollout(i) for i in range(3)])
        assert storage_for(place).names() == ["commits", "shards", "zarr.json"]
        storage_for(place).remove_folder("")


@pytest.mark.parametrize("claimed", [False, True])
def test_a_collection_that_was_faster_keeps_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: bool
) -> None:
    path = make(tmp_path / "all.zarr", [make_rollout(0)])
    before, names = sorted(path.rglob("*")), LocalStorage.names
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "state", lambda self: "absent")  # the store came behind the first look
        if claimed:  # and behind the second
            patch.setattr(LocalStorage, "names", lambda self, folder="": names(self, folder) if folder else [CLAIM])
        with pytest.raises(ValueError, match="exists already"):
            write_whole_store(path, settings("transitions"), [make_rollout(5)])
    assert sorted(path.rglob("*")) == before
    assert_holds(path, [make_rollout(0)])


def with_text(rollout: PromptRollout, text: int) -> PromptRollout:
    return replace(rollout, prompt_ids=np.array([text]))


def test_a_split_and_its_merge_are_the_store(tmp_path: Path) -> None:
    records = [make_rollout(i) for i in range(20)]
    path = make(tmp_path / "r.zarr", records)
    halves = split_store(path, holdout=0.25, seed=3)
    assert (halves.train, halves.holdout) == (str(tmp_path / "r-train.zarr"), str(tmp_path / "r-holdout.zarr"))
    assert (halves.train_prompts, halves.holdout_prompts) == (15, 5)
    held = held_out_prompts(open_store(path), 0.25, 3)
    assert_holds(halves.holdout, [records[i] for i in held])
    assert_holds(halves.train, [records[i] for i in range(20) if i not in held])
    merge_stores([halves.train, halves.holdout], tmp_path / "back.zarr")
    assert_holds(tmp_path / "back.zarr", records)
    assert open_store(tmp_path / "back.zarr").settings == open_store(path).settings


def test_the_choice_depends_on_the_seed_and_not_on_shards(tmp_path: Path) -> None:
    records = [make_rollout(i) for i in range(30)]
    one = open_store(make(tmp_path / "a.zarr", records, shard_prompts=30))
    other = open_store(make(tmp_path / "b.zarr", records[::-1], shard_prompts=4))
    assert held_out_prompts(one, 0.2, 5) == held_out_prompts(other, 0.2, 5)
    choices = {held_out_prompts(one, 0.2, seed) for seed in range(5)}
    assert len(choices) == 5
    assert {len(choice) for choice in choices} == {6}


def test_prompts_with_the_same_text_stay_together(tmp_path: Path) -> None:
    records = [with_text(make_rollout(i), i % 4) for i in range(12)]
    store = open_store(make(tmp_path / "r.zarr", records))
    for seed in range(4):
        held = held_out_prompts(store, 0.25, seed)
        assert len(held) == 3
        assert len({i % 4 for i in held}) == 1


@pytest.mark.parametrize(("share", "n"), [(0.001, 1), (0.999, 3)])
def test_neither_side_is_empty(tmp_path: Path, share: float, n: int) -> None:
    store = open_store(make(tmp_path / "r.zarr", [with_text(make_rollout(i), i) for i in range(4)]))
    assert len(held_out_prompts(store, share)) == n


def test_a_split_that_can_not_be_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "r.zarr", [with_text(make_rollout(i), 7) for i in range(3)])
    with pytest.raises(ValueError, match=r"at least two different prompts, .*r.zarr has 1"):
        split_store(path)
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=f"holdout must be above 0 and below 1, got {share}"):
            split_store(path, share)
    (tmp_path / "x-holdout.zarr").mkdir()
    with pytest.raises(ValueError, match=r"x-holdout.zarr exists already"):
        split_store(path, out=str(tmp_path / "x"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.zarr", "x-holdout.zarr"]


def test_by_url_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path / "r.zarr", [make_rollout(i) for i in range(10)])
    arguments = ["--holdout", "0.3", "--by", "prompt", "--out", "memory://split/r"]
    assert main(["buffer", "split", str(path), *arguments]) == 0
    assert "7 prompts in memory://split/r-train.zarr, 3 in memory://split/r-holdout.zarr" in capsys.readouterr().out
    parts = ["memory://split/r-train.zarr", "memory://split/r-holdout.zarr"]
    assert main(["buffer", "merge", *parts, "--out", str(tmp_path / "back.zarr")]) == 0
    assert "10 prompts written to" in capsys.readouterr().out
    assert_holds(tmp_path / "back.zarr", [make_rollout(i) for i in range(10)])
    assert main(["buffer", "merge", *parts, "--out", str(tmp_path / "back.zarr")]) == 2
    assert "exists already" in capsys.readouterr().err
