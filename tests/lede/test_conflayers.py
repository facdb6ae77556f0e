"""ConfLayers' search, driven by hand: what it asks, tries, keeps and reuses."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lede.checkpoint import load_policy
from lede.policies import ConfLayersConfig, ConfLayersPolicy, LayerState, PreScan, parse_policy
from tests.fake_probe import BEFORE, FakeProbe, both, model_of, plan_now, play, searching

N_LAYERS = 7  # 5 that may be left out; K = floor(5 * 0.4) + 1 = 3


def only(*unsure: int) -> np.ndarray:
    """Confidence that leaves out these layers at lambda 0: no two of them side by side, all others equal."""
    values = np.ones((N_LAYERS, 2))
    values[[layer - 1 for layer in unsure]] = 0
    return values


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a second after the last."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr("lede.policies.layer_search.time", clock)


def policy(**settings: Any) -> ConfLayersPolicy:
    made = ConfLayersPolicy(**{"interval": 4, "context_window": 8, "window": 2, **settings})
    made.check_model(model_of(N_LAYERS))
    made.begin(10)
    return made


def found(made: ConfLayersPolicy) -> list[tuple[Any, ...]]:
    assert all(step.attention == step.mlp for step in made.search_report())
    return [(s.attention, s.score, s.mean_accepted, s.kept, s.note) for s in made.search_report()]


def test_defaults_are_those_of_the_design() -> None:
    assert parse_policy("conflayers").config == ConfLayersConfig(  # type: ignore[union-attr]
        max_draft=25,
        stop_threshold=0.8,
        confidence="head",
        stop="paper",
        window="adaptive",
        cap_window=False,
        skip_ratio=0.4,
        context_window=100,
        probe_tokens=16,
        interval=30,
        max_iterations=100,
        max_score=0.95,
    )
    assert parse_policy("conflayers:window=20").config.window == 20  # type: ignore[union-attr]


def test_every_second_layer_is_left_out_until_the_text_has_more_than_the_window_and_one() -> None:
    made, probe = policy(), FakeProbe(only(2, 4, 6), n_new=9)
    assert plan_now(made) == both(2, 4, 6)
    play(made, probe, accepted=1, rounds=6)
    assert probe.calls == []
    probe.n_new = 10
    play(made, probe, accepted=1)
    assert len(probe.calls) == 1


@pytest.mark.parametrize(
    ("settings", "question"),
    [
        ({"context_window": 8}, (8, "head", None)),
        ({"context_window": 8, "probe_tokens": 3}, (3, "head", None)),  # the others are in the cache anyway
        ({"context_window": 8, "probe_tokens": 3, "confidence": "hidden"}, (8, "hidden", None)),
    ],
)
def test_what_the_probe_is_asked(settings: dict[str, Any], question: tuple[Any, ...]) -> None:
    probe = FakeProbe(only(3, 5))
    play(policy(**settings), probe, accepted=1)
    assert probe.calls == [question]


@pytest.mark.usefixtures("ticking")
def test_a_set_is_tried_for_an_interval_and_the_best_one_is_kept() -> None:
    sets = [only(2, 4, 6), only(3, 5), only(2, 4, 6), only(2, 4, 6)]
    made, probe = policy(skip_ratio=0.2, max_iterations=3), FakeProbe(sets)  # K = floor(5 * 0.2) + 1 = 2
    play(made, probe, accepted=5)  # the round that is followed by the first selection is not counted
    assert plan_now(made) == both(2, 4, 6)
    play(made, probe, accepted=2, rounds=4)
    assert plan_now(made) == both(3, 5)
    play(made, probe, accepted=3, rounds=3)
    play(made, probe, accepted=1, drafted=2)
    assert plan_now(made) == both(2, 4, 6)
    play(made, probe, accepted=1, rounds=3)
    assert searching(made)
    assert found(made)[-1] == ((2, 4, 6), pytest.approx(0.2), 1.0, False, "running")
    play(made, probe, accepted=1)
    assert not searching(made)
    assert found(made) == [
        ((2, 4, 6), pytest.approx(2 / 5), 2.0, True, "scored"),
        ((3, 5), pytest.approx((3 * 3 / 5 + 1 / 2) / 4), 2.5, True, "scored"),
        ((2, 4, 6), pytest.approx(1 / 5), 1.0, False, "scored; iterations used up"),
    ]
    assert [step.iteration for step in made.search_report()] == [1, 2, 3]
    assert [step.seconds for step in made.search_report()] == [1.0] * 3
    assert plan_now(made) == made.best == both(3, 5)
    asked = len(probe.calls)
    play(made, probe, accepted=0, rounds=20)
    made.begin(10)
    play(made, probe, accepted=0, rounds=20)
    assert len(probe.calls) == asked == 3
    assert plan_now(made) == both(3, 5)


def test_a_set_that_hardly_gets_tokens_accepted_is_given_up_halfway() -> None:
    made, probe = policy(interval=5), FakeProbe(only(2, 4, 6))  # half of 5 is 2
    play(made, probe, accepted=1)
    play(made, probe, accepted=1)
    assert len(probe.calls) == 1
    play(made, probe, accepted=0)
    assert len(probe.calls) == 2
    assert found(made)[0] == ((2, 4, 6), 0.1, 0.5, False, "given up halfway")
    play(made, probe, accepted=1, rounds=2)  # exactly one each is enough
    play(made, probe, accepted=0, rounds=2)
    assert len(probe.calls) == 2
    play(made, probe, accepted=0)
    assert found(made)[1] == ((2, 4, 6), pytest.approx(0.08), 0.4, True, "scored")
    assert made.best == both(2, 4, 6)


def test_a_set_that_is_too_small_is_not_tried_and_strength_follows() -> None:
    made, probe = policy(window=4), FakeProbe(only(4))  # at lambda 0 only layer 4 is below its neighbours
    play(made, probe, accepted=3)
    assert plan_now(made) == both(4)
    assert made.state()["search"]["strength"] == -0.05  # 1/5 < 0.4
    play(made, probe, accepted=3)
    assert found(made) == [((4,), None, None, False, "too few layers")] * 2
    assert len(probe.calls) == 2  # one selection a round
    play(made, probe, accepted=3, rounds=10)
    assert plan_now(made) == both(4)
    assert made.state()["search"]["strength"] == pytest.approx(-0.6)
    play(made, probe, accepted=3)
    # layers 3 and 5: neighbours 1, 1, 0, 1 have mean 0.75 and deviation 0.433, and 1 < 0.75 + 0.6 * 0.433 = 1.01;
    # layers 2 and 6: 1, 1, 0 and mean 0.667, deviation 0.471, limit 0.95
    assert plan_now(made) == both(3, 4, 5)
    assert made.state()["search"]["strength"] == pytest.approx(-0.6)  # 3/5 is within 0.4..0.65
    asked = len(probe.calls)
    play(made, probe, accepted=3, rounds=3)
    assert len(probe.calls) == asked
    assert found(made)[-1] == ((3, 4, 5), 0.6, 3.0, False, "running")


@pytest.mark.parametrize(
    ("stop", "accepted", "drafted", "ends"),
    [
        ("paper", 5, 5, True),  # 1 > 0.95
        ("paper", 2, 2, True),
        ("paper", 19, 20, False),  # 0.95 is not above it
        ("authors-code", 5, 5, True),
        ("authors-code", 4, 4, False),  # 4 is not above 4
        ("authors-code", 9, 10, False),
    ],
)
def test_what_ends_the_search(stop: str, accepted: int, drafted: int, ends: bool) -> None:
    made, probe = policy(stop=stop), FakeProbe(only(2, 4, 6))
    play(made, probe, accepted, drafted)
    play(made, probe, accepted, drafted, rounds=4)
    assert searching(made) != ends
    assert made.best == both(2, 4, 6)
    assert found(made)[0][-1] == ("scored; score reached" if ends else "scored")


@pytest.mark.parametrize(("stop", "stays"), [("paper", (2, 4, 6)), ("authors-code", (3, 5))])
def test_which_set_stays_when_the_score_is_reached(stop: str, stays: tuple[int, ...]) -> None:
    """The one with most accepted tokens; in the authors' code the one that reached it."""
    made, probe = policy(stop=stop, skip_ratio=0.2), FakeProbe([only(2, 4, 6), only(3, 5)])
    play(made, probe, 9, 10)
    play(made, probe, 9, 10, rounds=4)
    play(made, probe, 5, 5, rounds=4)
    assert not searching(made)
    assert plan_now(made) == made.best == both(*stays)


def test_iterations_that_run_out_before_any_set_was_scored_end_drafting() -> None:
    made, probe = policy(max_iterations=2), FakeProbe(np.full((N_LAYERS, 2), 0.5))
    play(made, probe, accepted=1)
    assert made.pre_scan(BEFORE) is PreScan.SKIP  # equal confidence leaves out nothing
    play(made, probe, accepted=1, rounds=5)
    assert not searching(made)
    assert made.best is None
    assert made.pre_scan(BEFORE) is PreScan.SKIP
    assert found(made)[-1] == ((), None, None, False, "too few layers; iterations used up")
    assert len(probe.calls) == 2


@pytest.mark.parametrize("nothing", [math.nan, math.inf])
def test_confidence_that_is_no_number_ends_the_search_and_not_the_text(nothing: float) -> None:
    broken = only(3, 5)
    broken[3, 1] = nothing
    made, probe = policy(), FakeProbe([only(2, 4, 6), broken])
    play(made, probe, accepted=2, rounds=5)
    assert not searching(made)
    assert plan_now(made) == made.best == both(2, 4, 6)
    assert found(made)[-1] == ((), None, None, False, "no set; confidence is no number")
    at_once = policy()
    play(at_once, FakeProbe(broken), accepted=2, rounds=3)
    assert not searching(at_once)
    assert at_once.pre_scan(BEFORE) is PreScan.SKIP  # there is no best set to draft with


def test_a_new_text_selects_anew_and_the_search_goes_on() -> None:
    made, probe = policy(), FakeProbe(only(2, 4, 6))
    play(made, probe, accepted=2)
    play(made, probe, accepted=2, rounds=4)  # scored
    play(made, probe, accepted=4, rounds=2)
    made.begin(10)
    assert found(made)[-1] == ((2, 4, 6), 0.8, 4.0, False, "cut short by the end of the text")
    probe.n_new = 2
    play(made, probe, accepted=5, rounds=8)  # too early in the text: nothing is selected and nothing is counted
    assert len(probe.calls) == 2
    probe.n_new = 12
    play(made, probe, accepted=1)
    assert len(probe.calls) == 3
    assert made.best == both(2, 4, 6)
    assert [step.iteration for step in made.search_report()] == [1, 2, 3]
    made.begin(10)
    made.begin(10)  # a text too short for a round
    assert len(made.search_report()) == 3


def test_rounds_that_drafted_nothing_do_not_count() -> None:
    made, probe = policy(), FakeProbe(only(2, 4, 6))
    play(made, probe, accepted=1)
    play(made, probe, accepted=0, drafted=0, rounds=9)
    assert len(probe.calls) == 1
    assert found(made) == [((2, 4, 6), None, None, False, "running")]


def test_the_draft_ends_after_the_first_position_that_is_not_sure() -> None:
    made = policy()
    at = {p: LayerState(N_LAYERS, 1, np.array([-math.log(p)])) for p in (0.81, 0.79)}
    assert made.features.names == ("surprisal",)
    assert made.draft(at[0.81])
    assert not made.draft(at[0.79])
    assert policy(stop_threshold=0.0).draft(LayerState(N_LAYERS, 1, np.array([50.0])))
    assert not made.scan(at[0.81])


def test_a_stopped_search_goes_on_from_its_state() -> None:
    sets = [only(2, 4, 6), only(2, 6), only(2, 4), only(2, 4, 6), only(4, 6)]
    whole, probe = policy(skip_ratio=0.2), FakeProbe([*sets])
    other, second = policy(skip_ratio=0.2), FakeProbe([*sets])
    pattern = [1, 4, 2, 0, 3, 1, 1, 0, 5, 5, 2, 2, 1, 0]
    for accepted in pattern:
        play(whole, probe, accepted)
        play(other, second, accepted)
        state = json.loads(json.dumps(other.state()))
        other = ConfLayersPolicy(other.config)  # a new process would restore before it sees the model
        other.restore(state)
        other.check_model(model_of(N_LAYERS))
        assert plan_now(other) == plan_now(whole)
    assert found(whole) == found(other)
    assert len(found(whole)) > 2


def test_reset_forgets_all_of_it() -> None:
    made, probe = policy(), FakeProbe(only(2, 4, 6))
    play(made, probe, accepted=5, rounds=5)
    assert not searching(made)
    made.reset()
    assert searching(made)
    assert made.best is None
    assert made.search_report() == []
    assert plan_now(made) == both(2, 4, 6)
    made.check_model(model_of(N_LAYERS))
    made.begin(1)
    play(made, probe, accepted=0)
    assert len(made.search_report()) == 1


def test_a_saved_best_set_is_used_with_the_search_off(tmp_path: Path) -> None:
    made, probe = policy(), FakeProbe([only(2, 4, 6), only(3, 5)])
    play(made, probe, accepted=2, rounds=5)
    assert searching(made)
    assert plan_now(made) == both(3, 5)  # another set is on trial
    made.save_pretrained(str(tmp_path))
    loaded = load_policy(tmp_path)
    for kept in (loaded, made.frozen()):
        assert isinstance(kept, ConfLayersPolicy)
        kept.check_model(model_of(N_LAYERS))
        kept.begin(10)
        assert not kept.searches
        fresh = FakeProbe(only(3, 5))
        play(kept, fresh, accepted=0, rounds=20)
        kept.between_rounds(fresh)  # type: ignore[arg-type]  # even when it is called
        kept.reset()
        assert fresh.calls == []
        assert plan_now(kept) == both(2, 4, 6)
        with pytest.raises(ValueError, match=r"layers \[2, 4, 6\] can't be left out"):
            kept.check_model(model_of(6))
    assert searching(made)  # frozen() is a copy
    loaded.save_pretrained(str(tmp_path / "again"))
    assert load_policy(tmp_path / "again").tensors()["mlp"].tolist() == [2, 4, 6]


def test_an_empty_best_set_is_saved_as_such_and_an_unfinished_search_is_not(tmp_path: Path) -> None:
    made = policy(max_iterations=1)
    made.save_pretrained(str(tmp_path / "fresh"))
    fresh = load_policy(tmp_path / "fresh")
    fresh.check_model(model_of(N_LAYERS))
    assert fresh.searches
    play(made, FakeProbe(np.full((N_LAYERS, 2), 0.5)), accepted=1)
    assert not searching(made)
    made.save_pretrained(str(tmp_path / "empty"))
    empty = load_policy(tmp_path / "empty")
    empty.check_model(model_of(N_LAYERS))
    assert not empty.searches
    assert empty.pre_scan(BEFORE) is PreScan.SKIP


def test_states_that_do_not_fit_are_refused() -> None:
    made = policy()
    state = made.state()
    with pytest.raises(ValueError, match="of a conflayers search with other settings: interval"):
        policy(interval=5).restore(state)
    with pytest.raises(ValueError, match="of a 'swift' policy, not of a 'conflayers' one"):
        made.restore({**state, "kind": "swift"})
    with pytest.raises(ValueError, match="is damaged"):
        made.restore({**state, "search": {"n_layers": N_LAYERS}})
    with pytest.raises(ValueError, match="a set of its own"):
        made.frozen().restore(state)
    made.restore({})
    assert searching(made)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("confidence=logits", "setting 'confidence' must be head or hidden, got 'logits'"),
        ("window=1", "window must be adaptive or a whole number of at least 2, got 1"),
        ("window=wide", "setting 'window' must be adaptive or a whole number, got 'wide'"),
        ("interval=0", "interval must be at least 1, got 0"),
        ("skip_ratio=1", "skip_ratio must be at least 0 and below 1, got 1.0"),
        ("max_score=2", "max_score must be within 0..1, got 2.0"),
        ("stop_threshold=1.5", "stop_threshold must be within 0..1, got 1.5"),
    ],
)
def test_unusable_settings_are_refused(settings: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"policy 'conflayers': {message}"):
        parse_policy(f"conflayers:{settings}")


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="the model has only 2"):
        ConfLayersPolicy().check_model(model_of(2))
    with pytest.raises(ValueError, match=r"call check_model\(model\) first"):
        ConfLayersPolicy().pre_scan(BEFORE)
    made = policy()
    made.check_model(model_of(9))  # nothing was searched yet
    made.check_model(model_of(N_LAYERS))
    play(made, FakeProbe(only(2, 4, 6)), accepted=1)
    with pytest.raises(ValueError, match=r"searches on a model of 7 layers, and this one has 9; .* reset\(\) this one"):
        made.check_model(model_of(9))
