"""Presets: which contenders they add, and the transfer matrix of worked rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lede.bench_row import BenchRow
from lede.bench_speed import Speedup
from lede.interleaving import Decode
from lede.models import EarlyExitModel
from lede.policies import AblatedPolicy, ConfLayersPolicy, LayerSkippingPolicy, StaticPolicy
from lede.presets import (
    Cell,
    ablation,
    learned_folders,
    preset_contenders,
    sweep_contenders,
    transfer,
    transfer_matrix,
    transfer_table,
    window,
)
from lede.statistics import Round
from lede.tuning import Tuner, tune
from lede.tuning_measure import Ready
from tests.lede.test_policies_ablated import learned
from tests.tiny_models import prompt, tiny_model

MODEL = cast(EarlyExitModel, SimpleNamespace(n_layers=16, name="made-up"))
PROMPTS = [[1, 2, n] for n in range(4)]


class Rounds:
    """Decodes in no time, with rounds that are made up."""

    def __init__(self, rounds: Sequence[tuple[int, int | None]] = (), copies: int = 0) -> None:
        self.rounds = tuple(Round((1,), drafted, 0, layer) for drafted, layer in rounds)
        self.rounds += (Round((1,), 16, 0, None, source="lookup"),) * copies
        self.n = 0

    def __call__(self, ready: Sequence[Ready], prompt: int, turn: int) -> list[Decode]:
        self.n += 1
        return [Decode(tuple(range(21)), 0.5, 0.2, self.rounds) for _ in ready]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    learned().save_pretrained(str(tmp_path / "run" / "policy"))
    return str(tmp_path / "run" / "policy")


def test_what_is_held_fixed_is_counted_on_the_validation_prompts(folder: str, tmp_path: Path) -> None:
    """Drafts of 5, 5, 3 and 1 tokens: 3.5 on the mean; most at layer 3, as often as at 2, the deeper of which goes.

    Copies from the text have neither a layer nor a length of its kind.
    """
    rounds = Rounds([(5, 3), (5, 2), (0, None), (3, 3), (1, 2)], copies=9)
    tuner = Tuner(MODEL, PROMPTS, measure=rounds, out=tmp_path / "out")
    usage = tuner.usage(folder)
    assert (usage.draft_length, usage.exit_layer, usage.evaluations) == (3.5, 2, 4)
    length, layer = ablation(tuner, folder, "mine")
    assert (length.name, layer.name) == ("mine, fixed length 4", "mine, fixed layer 2")
    assert isinstance(length.tuned.policy, AblatedPolicy)
    assert isinstance(layer.tuned.policy, AblatedPolicy)
    assert (length.tuned.policy.config.draft_length, length.tuned.policy.config.exit_layer) == (4, None)
    assert (layer.tuned.policy.config.draft_length, layer.tuned.policy.config.exit_layer) == (None, 2)
    assert length.tuned.cost.evaluations == 4
    assert rounds.n == 4
    again = Tuner(MODEL, PROMPTS, measure=Rounds(), out=tmp_path / "out")
    assert again.usage(folder) == usage  # not counted twice
    with pytest.warns(UserWarning, match="never drafts on the validation prompts of code"):
        assert ablation(Tuner(MODEL, PROMPTS, measure=Rounds([(0, None)]), suite="code"), folder, "mine") == []


def test_ablation_needs_a_learned_policy(folder: str, tmp_path: Path) -> None:
    StaticPolicy().save_pretrained(str(tmp_path / "static"))
    others = ["static", "plain", "prompt-lookup", "del:stop=length", str(tmp_path / "static")]
    assert learned_folders([*others, folder]) == [folder]
    with pytest.raises(ValueError, match="give its folder as --policy"):
        learned_folders(others)
    tuners = {"a": Tuner(MODEL, PROMPTS, measure=Rounds([(2, 3)])), "b": Tuner(MODEL, PROMPTS, measure=Rounds())}
    assert [each.name for each in preset_contenders("ablation", "a", tuners, {folder: "run"})] == [
        "run, fixed length 2",
        "run, fixed layer 3",
    ]


def test_ablated_policies_decode_on_a_real_model(folder: str) -> None:
    tuner = Tuner(tiny_model("llama"), [prompt(n, 6) for n in range(2)], max_new_tokens=24)
    usage = tuner.usage(folder)
    assert usage.exit_layer in (1, 2, 3)
    assert 1 <= usage.draft_length <= 6


def test_windows_differ_in_nothing_but_the_window_and_the_confidence() -> None:
    tuner = Tuner(MODEL, PROMPTS, measure=Rounds())
    found = window(tuner)
    assert [each.name for each in found] == [
        "conflayers, window adaptive, head",
        "conflayers, window 10, head",
        "conflayers, window 20, head",
        "conflayers, window adaptive, hidden",
        "conflayers, window 10, hidden",
        "conflayers, window 20, hidden",
    ]
    configs = [each.tuned.policy.config for each in found if isinstance(each.tuned.policy, ConfLayersPolicy)]
    assert [config.window for config in configs] == ["adaptive", 10, 20] * 2
    assert len({(config.skip_ratio, config.interval, config.context_window) for config in configs}) == 1
    assert {each.tuned.cost for each in found} == {tuner.tune("conflayers").cost}


def test_sets_found_on_one_suite_are_frozen_for_all(tmp_path: Path) -> None:
    """Searches on a real model; nobody searches again, and a second suite costs no more decodes."""
    model = tiny_model("llama")
    tuners = {
        name: Tuner(model, [prompt(seed + n, 6) for n in range(2)], 24, suite=name, out=tmp_path)
        for name, seed in (("code", 0), ("news", 10))
    }
    found = transfer(tuners)
    assert [each.name for each in found] == [
        "conflayers from code",
        "conflayers from news",
        "swift from code",
        "swift from news",
    ]
    for each in found:
        assert isinstance(each.tuned.policy, LayerSkippingPolicy)
        assert not each.tuned.policy.searches
        assert each.tuned.policy.best is not None
        assert Path(each.tuned.settings).is_dir()
        assert each.tuned.cost.evaluations > 0
    again = {name: Tuner(model, each.validation, 24, suite=name, out=tmp_path) for name, each in tuners.items()}
    same = preset_contenders("transfer", "news", again, {"conflayers": "conflayers"})
    assert [(e.name, e.tuned.settings, e.tuned.cost) for e in same] == [
        (e.name, e.tuned.settings, e.tuned.cost) for e in found
    ]


def test_a_sweep_offers_the_next_best_static_settings() -> None:
    def measure(ready: Sequence[Ready], prompt: int, turn: int) -> list[Decode]:
        speed = {each.text: 1 + ("exit_layer=4" in each.text) + ("draft_length=8" in each.text) / 2 for each in ready}
        return [Decode(tuple(range(21)), 0.5, 1 / speed[each.text]) for each in ready]

    tuned = tune(MODEL, "static", PROMPTS, measure=measure)
    others = sweep_contenders(tuned, 4)
    assert len(others) == 4
    assert all(each.name == each.tuned.settings != tuned.settings for each in others)
    assert all(each.tuned.cost.evaluations == 0 for each in others)


def row(suite: str, name: str, speed: float | None, acceptance: float | None, **changes: Any) -> BenchRow:
    """A row of the table with nothing in it but these figures."""
    told = None if speed is None else Speedup(speed, speed - 0.1, speed + 0.1, speed + 0.5, 8, True)
    values: dict[str, Any] = {
        "suite": suite,
        "policy": name.partition(" ")[0],
        "name": name,
        "settings": f"out/tuned/{name}",
        "kind": "policy",
        "online": False,
        "lossy": False,
        "n_prompts": 8,
        "n_failed": 0,
        "n_empty": 0,
        "error": None,
        "exact": "yes",
        "n_ties": 0,
        "n_wrong": 0,
        "ranked": True,
        "speedup_over_plain": told,
        "acceptance_rate": acceptance,
    }
    return BenchRow(**{**values, **changes})


ROWS = [
    row("code", "plain", 1.0, None, kind="plain", policy="plain"),
    row("code", "static", 1.4, 0.7, settings="static:exit_layer=3"),
    row("code", "conflayers", 1.0, 0.8, settings="conflayers:skip_ratio=0.4"),
    row("code", "conflayers from code", 1.3, 0.9),
    row("code", "conflayers from news", 1.1, 0.85),
    row("code", "run-code", 1.7, 0.91, policy="runs/run-code/policy"),
    row("news", "conflayers from code", 1.05, 0.8),
    row("news", "conflayers from news", None, None),
    row("news", "run-code", 1.5, 0.75, policy="runs/run-code/policy"),
    row("news", "swift from code", 0.9, 0.5),
]


def test_the_transfer_matrix_of_worked_rows() -> None:
    assert transfer_matrix(ROWS) == {
        "conflayers": {
            "code": {"code": Cell(1.3, 0.9), "news": Cell(1.05, 0.8)},
            "news": {"code": Cell(1.1, 0.85), "news": Cell(None, None)},
        },
        "learned": {"run-code": {"code": Cell(1.7, 0.91), "news": Cell(1.5, 0.75)}},
        "swift": {"code": {"news": Cell(0.9, 0.5)}},
    }


def test_the_transfer_table_reads() -> None:
    assert transfer_table(ROWS).split("\n\n") == [
        "| conflayers, found on | on code | on news |\n|---|---|---|\n"
        "| code | **1.30x, 0.90** | 1.05x, 0.80 |\n| news | 1.10x, 0.85 | - |",
        "| learned, found on | on code | on news |\n|---|---|---|\n| run-code | 1.70x, 0.91 | 1.50x, 0.75 |",
        "| swift, found on | on news |\n|---|---|\n| code | 0.90x, 0.50 |\n",
    ]
    assert transfer_table(ROWS[:3]) == ""
