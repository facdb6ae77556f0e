"""SWIFT's search, driven by hand: proposals, scores, what is kept, and when it ends."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lede.checkpoint import load_policy
from lede.policies import SkipSublayers, SwiftConfig, SwiftPolicy, parse_policy
from lede.policies.swift_search import SwiftSearch
from tests.fake_probe import FakeProbe, both, model_of, plan_now, play, searching

ROOT = Path(__file__).resolve().parents[2]
N_LAYERS = 6  # 8 sublayers that may be left out


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a second after the last."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr("lede.policies.swift_search.time", clock)


def policy(**settings: Any) -> SwiftPolicy:
    made = SwiftPolicy(**{"context_window": 8, "bayes_interval": 0, **settings})
    made.check_model(model_of(N_LAYERS))
    made.begin(10)
    return made


def search(**settings: Any) -> SwiftSearch:
    return SwiftSearch(SwiftConfig(**settings), N_LAYERS)


def scores(*given: float) -> FakeProbe:
    left = list(given)
    return FakeProbe(matchness=lambda plan: left.pop(0))


def found(made: SwiftPolicy) -> list[tuple[float | None, bool, str]]:
    return [(step.score, step.kept, step.note) for step in made.search_report()]


def test_defaults_are_those_of_the_authors_script() -> None:
    assert parse_policy("swift").config == SwiftConfig(  # type: ignore[union-attr]
        max_draft=25,
        stop_threshold=0.8,
        skip_ratio=0.45,
        context_window=50,
        opt_interval=1,
        bayes_interval=25,
        max_score=0.93,
        tolerance=300,
        max_iterations=1000,
    )


def test_a_point_stands_for_the_sublayers_of_its_largest_coordinates() -> None:
    # layers 2..5: attention 0.1, 0.9, 0.3, 0.8, then MLP 0.7, 0.2, 0.95, 0.7; floor(8 * 0.5) = 4 of them
    point = np.array([0.1, 0.9, 0.3, 0.8, 0.7, 0.2, 0.95, 0.7])
    made = search(skip_ratio=0.5)
    assert made.plan_at(point) == SkipSublayers(frozenset({3, 5}), frozenset({4, 2}))  # of the two 0.7 the first
    assert search(skip_ratio=0.45).n_skipped == 3  # floor(3.6)
    assert SwiftSearch(SwiftConfig(), 32).n_skipped == 27  # floor(60 * 0.45)


def test_proposals_are_random_sets_of_a_fixed_size() -> None:
    probe = FakeProbe()
    play(policy(skip_ratio=0.5, seed=3), probe, accepted=1, rounds=300)
    plans = [plan for plan, _, _ in probe.calls]
    assert {plan.n_skipped for plan in plans} == {4}
    counts = np.array([[layer in plan.attention, layer in plan.mlp] for plan in plans for layer in range(1, 7)])
    share = counts.reshape(300, 6, 2).mean(0)
    assert (share[[0, 5]] == 0).all()
    assert (abs(share[1:5] - 0.5) < 0.15).all()  # 5 standard deviations
    again, other = FakeProbe(), FakeProbe()
    play(policy(skip_ratio=0.5, seed=3), again, accepted=1, rounds=20)
    play(policy(skip_ratio=0.5, seed=4), other, accepted=1, rounds=20)
    assert again.calls == probe.calls[:20] != other.calls


def test_a_set_is_scored_on_the_first_new_tokens_of_a_text_that_is_long_enough() -> None:
    made, probe = policy(), scores(0.5, 0.6, 0.7)
    probe.n_new = 9
    assert plan_now(made) == both(2, 4)  # every second layer
    play(made, probe, accepted=1)
    assert probe.calls == []
    probe.n_new = 10
    play(made, probe, accepted=1)
    assert [call[1:] for call in probe.calls] == [(0, 9)]  # W + 1 tokens, each with a follower


@pytest.mark.usefixtures("ticking")
def test_a_better_set_drafts_and_a_worse_one_does_not() -> None:
    made, probe = policy(), scores(0.0, 0.5, 0.4, 0.5, 0.75)
    play(made, probe, accepted=1)
    assert plan_now(made) == both(2, 4)  # 0 is no improvement
    assert made.best is None
    play(made, probe, accepted=1)
    second = probe.calls[1][0]
    assert plan_now(made) == made.best == second
    play(made, probe, accepted=1, rounds=2)
    assert plan_now(made) == second
    play(made, probe, accepted=1)
    assert plan_now(made) == probe.calls[4][0] != second
    assert found(made) == [(s, k, "random") for s, k in zip((0, 0.5, 0.4, 0.5, 0.75), (0, 1, 0, 0, 1), strict=True)]
    steps = made.search_report()
    assert [SkipSublayers(frozenset(s.attention), frozenset(s.mlp)) for s in steps] == [c[0] for c in probe.calls]
    assert [step.seconds for step in steps] == [1.0] * 5


def test_rounds_between_proposals() -> None:
    made, probe = policy(opt_interval=3), FakeProbe()
    play(made, probe, accepted=1, rounds=8)
    assert len(probe.calls) == 2
    made.begin(10)
    play(made, probe, accepted=1, rounds=2)
    assert len(probe.calls) == 2  # counted from the start of the text
    play(made, probe, accepted=1)
    assert len(probe.calls) == 3


@pytest.mark.parametrize(
    ("settings", "given", "end"),
    [
        ({"max_score": 0.8}, [0.8, 0.81], "score reached"),
        ({"tolerance": 2}, [0.5, 0.1, 0.6, 0.1, 0.6, 0.2], "tolerance used up"),  # the third miss in a row
        ({"max_iterations": 3}, [0.1, 0.2, 0.15], "iterations used up"),
    ],
)
def test_what_ends_the_search(settings: dict[str, Any], given: list[float], end: str) -> None:
    made, probe = policy(**settings), scores(*given)
    play(made, probe, accepted=1, rounds=len(given) - 1)
    assert searching(made)
    play(made, probe, accepted=1)
    assert not searching(made)
    assert found(made)[-1][2] == f"random; {end}"
    best = probe.calls[given.index(max(given))][0]
    play(made, probe, accepted=0, rounds=10)
    assert plan_now(made) == made.best == best
    assert len(probe.calls) == len(given)


def test_bayesian_proposals_come_at_their_turn_and_learn_from_every_score() -> None:
    wanted = both(2, 5)  # 4 of 8 sublayers

    def matchness(plan: SkipSublayers) -> float:
        return (len(plan.attention & wanted.attention) + len(plan.mlp & wanted.mlp)) / 4

    made, probe = policy(skip_ratio=0.5, bayes_interval=4, max_score=1.0), FakeProbe(matchness=matchness)
    play(made, probe, accepted=1, rounds=48)
    notes = [step.note for step in made.search_report()]
    assert [i + 1 for i, note in enumerate(notes) if note.startswith("bayesian")] == list(range(4, 49, 4))
    values: dict[str, list[float]] = {"random": [], "bayesian": []}
    for step in made.search_report()[16:]:
        assert step.score is not None
        values[step.note].append(step.score)
    assert np.mean(values["bayesian"]) > np.mean(values["random"]) + 0.15
    first = policy(skip_ratio=0.5, bayes_interval=1, max_score=1.0)
    play(first, probe, accepted=1, rounds=2)
    assert [step.note for step in first.search_report()] == ["random", "bayesian"]  # at first there is nothing to learn


def test_without_scikit_learn_bayesian_proposals_are_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.gaussian_process", None)
    with pytest.raises(
        ValueError, match=r"need scikit-learn .*: pip install 'lede-rl\[bench\]', or set bayes_interval=0"
    ):
        policy(bayes_interval=25)
    policy(bayes_interval=0)
    policy(bayes_interval=25, max_iterations=24)


def test_without_scikit_learn_all_else_works() -> None:
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "from types import SimpleNamespace\n"
        "import lede.policies as policies\n"
        "model = SimpleNamespace(n_layers=6, check_sublayers=lambda: None)\n"
        "policies.parse_policy('swift:bayes_interval=0').check_model(model)\n"
        "try: policies.parse_policy('swift').check_model(model)\n"
        "except ValueError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "pip install 'lede-rl[bench]'" in run.stdout


def test_a_stopped_search_goes_on_from_its_state() -> None:
    def matchness(plan: SkipSublayers) -> float:
        return sum(plan.attention) / 20

    settings: dict[str, Any] = {"skip_ratio": 0.5, "bayes_interval": 5, "max_score": 1.0, "opt_interval": 2}
    whole, probe = policy(**settings), FakeProbe(matchness=matchness)
    other, second = policy(**settings), FakeProbe(matchness=matchness)
    for _ in range(24):
        play(whole, probe, accepted=1)
        play(other, second, accepted=1)
        state = json.loads(json.dumps(other.state()))
        other = SwiftPolicy(other.config)
        other.restore(state)
        other.check_model(model_of(N_LAYERS))
    assert second.calls == probe.calls
    assert len(probe.calls) == 12
    assert found(other) == found(whole)
    assert plan_now(other) == plan_now(whole)
    state["search"]["points"].pop()
    with pytest.raises(ValueError, match="one point of 8 coordinates for each score"):
        other.restore(state)


def test_reset_starts_over() -> None:
    made, probe = policy(), FakeProbe(matchness=lambda plan: 0.5)
    play(made, probe, accepted=1, rounds=5)
    made.reset()
    assert made.search_report() == []
    assert plan_now(made) == both(2, 4)
    play(made, probe, accepted=1, rounds=5)
    assert probe.calls[5:] == probe.calls[:5]


def test_a_saved_best_set_is_used_with_the_search_off(tmp_path: Path) -> None:
    made, probe = policy(), scores(0.2, 0.5, 0.1)
    made.save_pretrained(str(tmp_path / "early"))
    early = load_policy(tmp_path / "early")
    early.check_model(model_of(N_LAYERS))
    assert early.searches  # nothing was found yet
    play(made, probe, accepted=1, rounds=3)
    made.save_pretrained(str(tmp_path / "policy"))
    loaded = load_policy(tmp_path / "policy")
    assert isinstance(loaded, SwiftPolicy)
    loaded.check_model(model_of(N_LAYERS))
    loaded.begin(10)
    fresh = FakeProbe(matchness=lambda plan: 1.0)
    play(loaded, fresh, accepted=0, rounds=20)
    assert fresh.calls == []
    assert plan_now(loaded) == probe.calls[1][0]
    assert loaded.search_report() == []
    given = SwiftPolicy.from_sets(frozenset({2}), frozenset({3, 5}))
    given.check_model(model_of(N_LAYERS))
    assert not given.searches
    assert plan_now(given) == SkipSublayers(frozenset({2}), frozenset({3, 5}))


def test_a_search_that_never_scored_keeps_what_it_drafts_with(tmp_path: Path) -> None:
    made = policy(max_iterations=2)
    assert plan_now(made.frozen()) == both(2, 4)
    play(made, scores(0.0, 0.0), accepted=1, rounds=2)
    assert not searching(made)
    assert made.best is None
    made.save_pretrained(str(tmp_path))
    loaded = load_policy(tmp_path)
    for kept in (made, made.frozen(), loaded):
        assert isinstance(kept, SwiftPolicy)
        kept.check_model(model_of(N_LAYERS))
        assert not searching(kept)
        assert plan_now(kept) == both(2, 4)


def test_a_state_that_cannot_go_on_here_is_not_called_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy(bayes_interval=25)
    state = made.state()
    monkeypatch.setitem(sys.modules, "sklearn.gaussian_process", None)
    with pytest.raises(ValueError, match=r"^a swift policy's Bayesian proposals need scikit-learn"):
        SwiftPolicy(made.config).restore(state)
    for n_layers in (2, "many"):
        broken = {**state, "search": {**state["search"], "n_layers": n_layers}}
        with pytest.raises(ValueError, match="the state of the swift search is damaged"):
            SwiftPolicy(made.config).restore(broken)


def test_foreign_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lists of layers, attention and mlp; got mlp int64\[1\]"):
        SwiftPolicy().load_tensors({"mlp": np.array([2])})
    with pytest.raises(ValueError, match=r"got attention float64\[1\], mlp int64\[1\]"):
        SwiftPolicy().load_tensors({"mlp": np.array([2]), "attention": np.array([2.0])})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_ratio": 0.0}, "skip_ratio must be above 0 and at most 1, got 0.0"),
        ({"skip_ratio": 0.1}, r"skip_ratio 0.1 leaves out none of the 8 sublayers of layers 2..5; raise it"),
        ({"opt_interval": 0}, "opt_interval must be at least 1, got 0"),
        ({"tolerance": -1}, "tolerance must be at least 0, got -1"),
        ({"max_score": 1.5}, r"max_score must be within 0..1, got 1.5"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy(**settings)
