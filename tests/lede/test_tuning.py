"""Tuning policy arguments: choices on made-up speeds, budgets, resumption, and what is taken as it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lede.bench_runs import PLAIN, Cost
from lede.interleaving import Decode
from lede.models import EarlyExitModel
from lede.policies import DraftVerifyPolicy, LayerSkippingPolicy, StaticPolicy, parse_policy
from lede.tuned import planned_evaluations
from lede.tuning import Tuner, as_it_is, budget_of, check_disjoint, is_tuned, tune
from lede.tuning_grids import FITTED, LOOKUPS, TUNED, coarse_layers, space_of, text_of
from lede.tuning_log import TUNING
from lede.tuning_measure import Ready
from tests.tiny_models import N_LAYERS, prompt, tiny_model

MODEL = cast(EarlyExitModel, SimpleNamespace(n_layers=16, name="made-up"))
PROMPTS = [[1, 2, n] for n in range(8)]


class Clock:
    """Decodes in no time at speeds that are made up; counts what it was asked."""

    def __init__(self, speed: Callable[[str], float], stop_after: int | None = None) -> None:
        self.speed, self.stop_after = speed, stop_after
        self.made: list[tuple[str, int]] = []

    def __call__(self, ready: Sequence[Ready], prompt: int, turn: int) -> list[Decode]:
        assert ready[0].text == PLAIN
        assert len(ready) <= 8
        if self.stop_after is not None and len(self.made) >= self.stop_after:
            raise KeyboardInterrupt
        self.made += [(each.text, prompt) for each in ready[1:]]
        return [self._decode(each.text) for each in ready]

    def _decode(self, text: str) -> Decode:
        speed = 1.0 if text == PLAIN else self.speed(text)
        if not speed:
            return Decode((), 0.0, 0.0, error="no such layer")
        return Decode(tuple(range(21)), 0.5, 20 / (100 * speed))


def settings_of(text: str) -> dict[str, str]:
    return dict(part.split("=") for part in text.partition(":")[2].split(";"))


def hill(text: str) -> float:
    """Static settings are fastest at layer 5 with 6 tokens."""
    found = settings_of(text)
    return 2 - 0.05 * abs(int(found["exit_layer"]) - 5) - 0.02 * abs(int(found["draft_length"]) - 6)


def test_static_by_name_is_swept_on_the_validation_prompts() -> None:
    clock = Clock(hill)
    tuned = tune(MODEL, "static", PROMPTS, measure=clock)
    assert tuned.settings == "static:exit_layer=5;draft_length=6"
    assert tuned.as_given == "static"
    assert isinstance(tuned.policy, StaticPolicy)
    assert (tuned.policy.config.exit_layer, tuned.policy.config.draft_length) == (5, 6)
    assert tuned.cost.evaluations == len(clock.made)
    assert tuned.cost.prompts == 8
    assert tuned.points[0].settings == tuned.settings
    assert tuned.points[0].speedup == pytest.approx(2.0)
    assert tuned.points[0].tokens_per_second == pytest.approx(200.0)
    assert len(tuned.points) == len({text for text, _ in clock.made})  # every point is kept


def test_runners_up_are_contenders_at_no_cost_of_their_own() -> None:
    tuned = tune(MODEL, "static", PROMPTS, measure=Clock(hill))
    others = tuned.runners_up(3)
    assert [each.settings for each in others] == [point.settings for point in tuned.points[1:4]]
    assert all(isinstance(each.policy, StaticPolicy) and each.cost == Cost() for each in others)


@pytest.mark.parametrize("name", [name for name in TUNED if name not in FITTED])
@pytest.mark.parametrize("n_layers", [6, 16, 30])
def test_every_grid_holds_policies_that_parse(name: str, n_layers: int) -> None:
    space = space_of(name, n_layers, max_new_tokens=64)
    assert 2 < len(space.coarse) <= 45
    for setting in space.everything:
        text = text_of(name, setting)
        tuned = as_it_is(text)
        assert tuned.settings == text
        if tuned.policy is not None:
            assert tuned.policy.kind == name
    clock = Clock(lambda text: 1.0)
    model = cast(EarlyExitModel, SimpleNamespace(n_layers=n_layers, name="made-up"))
    first = tune(model, name, PROMPTS, measure=clock)
    assert first.settings == text_of(name, space.coarse[0])  # the first of equals
    assert len(clock.made) >= planned_evaluations(name, n_layers, 8, 64)


def test_searches_are_tuned_to_texts_that_are_short() -> None:
    windows = {dict(s)["context_window"] for name in ("swift", "conflayers") for s in space_of(name, 16, 64).everything}
    assert windows == {16}
    assert {dict(s)["context_window"] for s in space_of("conflayers", 16, 512).everything} == {100}
    assert max(int(dict(s)["interval"]) for s in space_of("conflayers", 16, 64).everything) <= 16
    assert coarse_layers(16) == (2, 4, 6, 8, 12)
    assert coarse_layers(2) == (1,)


def test_everybody_gets_the_budget() -> None:
    texts = ["static", "del", "draft-verify", "assistant-early-exit", "swift", "conflayers"]
    budget = budget_of([*texts, "plain", "prompt-lookup", "static:exit_layer=3"], 16, 8, 64)
    assert budget == max(planned_evaluations(text, 16, 8, 64) for text in texts) > 0
    for text in texts:
        clock = Clock(lambda text: 1.0 + len(text) / 1000)
        tuned = Tuner(MODEL, PROMPTS, budget=budget, measure=clock).tune(text)
        assert tuned.cost.evaluations == len(clock.made) >= budget


@pytest.mark.parametrize("stop_after", [1, 20, 61, 90])
def test_a_stopped_tuning_goes_on_without_repeating_any_decode(tmp_path: Path, stop_after: int) -> None:
    whole = Clock(hill)
    wanted = tune(MODEL, "static", PROMPTS, budget=120, measure=whole, out=tmp_path / "whole")
    first = Clock(hill, stop_after)
    with pytest.raises(KeyboardInterrupt):
        tune(MODEL, "static", PROMPTS, budget=120, measure=first, out=tmp_path / "parts")
    second = Clock(hill)
    found = tune(MODEL, "static", PROMPTS, budget=120, measure=second, out=tmp_path / "parts")
    assert [*first.made, *second.made] == whole.made
    assert (found.settings, found.points) == (wanted.settings, wanted.points)
    assert found.cost.evaluations == wanted.cost.evaluations
    again = Clock(hill)
    third = tune(MODEL, "static", PROMPTS, budget=120, measure=again, out=tmp_path / "parts")
    assert (third.settings, third.points, third.cost) == (found.settings, found.points, found.cost)
    assert again.made == []


def test_a_resumed_search_knows_what_it_had_learned(tmp_path: Path) -> None:
    """Every decode moves the threshold of a draft-verify policy up by a hundredth."""

    class Teacher(Clock):
        def __call__(self, ready: Sequence[Ready], prompt: int, turn: int) -> list[Decode]:
            done = super().__call__(ready, prompt, turn)
            for each in ready[1:]:
                assert isinstance(each.policy, DraftVerifyPolicy)
                seen[each.text] = [*seen.get(each.text, []), each.policy.threshold]
                each.policy.restore({"threshold": each.policy.threshold + 0.01, "acceptance": 0.5})
            return done

    seen: dict[str, list[float]] = {}
    with pytest.raises(KeyboardInterrupt):
        tune(MODEL, "draft-verify", PROMPTS, measure=Teacher(lambda text: 1.0, 25), out=tmp_path)
    tuned = tune(MODEL, "draft-verify", PROMPTS, measure=Teacher(lambda text: 1.0), out=tmp_path)
    long = max(seen.values(), key=len)
    assert len(long) == 8
    assert long == pytest.approx([long[0] + 0.01 * n for n in range(8)])
    assert isinstance(tuned.policy, DraftVerifyPolicy)
    assert tuned.policy.threshold == tuned.policy.config.threshold  # the test starts afresh


def test_tunings_of_something_else_are_refused_by_name(tmp_path: Path) -> None:
    tune(MODEL, "static", PROMPTS, measure=Clock(hill), out=tmp_path)
    with pytest.raises(ValueError, match=r"max_new_tokens \(32, was 64\)"):
        tune(MODEL, "static", PROMPTS, 32, measure=Clock(hill), out=tmp_path)
    with pytest.raises(ValueError, match="validation"):
        tune(MODEL, "static", PROMPTS[:4], measure=Clock(hill), out=tmp_path)
    tune(MODEL, "static", PROMPTS[:4], measure=Clock(hill), out=tmp_path, suite="another")  # has its own place
    content = json.loads((tmp_path / TUNING).read_text())
    assert set(content["suites"]) == {"", "another"}
    (tmp_path / TUNING).write_text("{")
    with pytest.raises(ValueError, match=r"tuning\.json is damaged"):
        tune(MODEL, "static", PROMPTS, measure=Clock(hill), out=tmp_path)


def test_suites_share_a_file(tmp_path: Path) -> None:
    tuners = {n: Tuner(MODEL, PROMPTS[: 3 + n], measure=Clock(hill), out=tmp_path, suite=str(n)) for n in range(2)}
    found = [tuner.tune("static") for tuner in tuners.values()]
    for n, tuned in enumerate(found):
        clock = Clock(hill)
        again = Tuner(MODEL, PROMPTS[: 3 + n], measure=clock, out=tmp_path, suite=str(n)).tune("static")
        assert (again.points, again.cost, clock.made) == (tuned.points, tuned.cost, [])


def test_no_test_prompt_is_tuned_on() -> None:
    with pytest.raises(ValueError, match=r"1 validation prompts are test prompts too \(validation = test: 3 = 1\)"):
        Tuner(MODEL, PROMPTS, test=[[9, 9], PROMPTS[3]], measure=Clock(hill))
    check_disjoint(PROMPTS, [[1, 2]])
    clock = Clock(hill)
    Tuner(MODEL, PROMPTS, test=[[7]], measure=clock).tune("static")
    assert {prompt for _, prompt in clock.made} == set(range(len(PROMPTS)))


def test_settings_and_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    clock = Clock(hill)
    tuner = Tuner(MODEL, PROMPTS, budget=500, measure=clock)
    StaticPolicy(exit_layer=2).save_pretrained(str(tmp_path / "mine"))
    for text in (
        "static:exit_layer=3;draft_length=2",
        "del:stop=length",
        "prompt-lookup:tokens=4",
        "plain",
        str(tmp_path / "mine"),
    ):
        assert not is_tuned(text)
        tuned = tuner.tune(text)
        assert (tuned.settings, tuned.as_given, tuned.points, tuned.cost.evaluations) == (text, text, (), 0)
    assert clock.made == []
    assert "not known" in tuner.tune(str(tmp_path / "mine")).cost.note
    with pytest.raises(ValueError, match="statik"):
        tuner.tune("statik")


def test_failures_are_told_and_never_chosen() -> None:
    tuned = tune(MODEL, "static", PROMPTS, measure=Clock(lambda text: 0.0 if "exit_layer=5" in text else hill(text)))
    assert "exit_layer=5" not in tuned.settings
    with pytest.raises(ValueError, match="'assistant-early-exit' failed, the first with no such layer"):
        tune(MODEL, "assistant-early-exit", PROMPTS, measure=Clock(lambda text: 0.0))
    with pytest.raises(ValueError, match="the suite has none"):
        tune(MODEL, "static", [], measure=Clock(hill))


def test_an_external_rival_is_tuned_as_well() -> None:
    tuned = tune(MODEL, "assistant-early-exit", PROMPTS, measure=Clock(lambda t: 1 / (1 + abs(int(t[-1]) - 7))))
    assert (tuned.settings, tuned.policy) == ("assistant-early-exit:layer=7", None)


def test_prompt_lookup_by_name_alone_is_tuned() -> None:
    clock = Clock(lambda text: 1 / (1 + abs(int(settings_of(text)["tokens"]) - 5)))
    tuned = tune(MODEL, "prompt-lookup", PROMPTS, measure=clock)
    assert (tuned.settings, tuned.policy) == ("prompt-lookup:tokens=5", None)
    assert {point.settings for point in tuned.points} == {f"prompt-lookup:tokens={n}" for n in LOOKUPS}


def test_a_prompt_that_plain_decoding_fails_on_tells_nothing(tmp_path: Path) -> None:
    class Failing(Clock):
        without: tuple[int, ...] = (3,)

        def __call__(self, ready: Sequence[Ready], prompt: int, turn: int) -> list[Decode]:
            done = super().__call__(ready, prompt, turn)
            return [Decode((), 0.0, 0.0, error="no memory") for _ in done] if prompt in self.without else done

    tuned = tune(MODEL, "static", PROMPTS, measure=Failing(hill), out=tmp_path)
    assert tuned.settings == "static:exit_layer=5;draft_length=6"
    assert "1 validation prompts failed" in tuned.cost.note
    again = tune(MODEL, "static", PROMPTS, measure=Failing(hill), out=tmp_path)
    assert (again.points, again.cost) == (tuned.points, tuned.cost)
    broken = [Decode((), 0.0, 0.0, error="no memory")]
    nothing = Failing(hill)
    nothing.without = tuple(range(8))
    with pytest.raises(ValueError, match="the first with plain decoding failed on validation prompt 0: no memory"):
        tune(MODEL, "static", PROMPTS, measure=nothing)
    with pytest.raises(ValueError, match="failed on every validation prompt, the first with no memory"):
        Tuner(MODEL, PROMPTS, measure=lambda ready, prompt, turn: broken).usage("static:exit_layer=3")


def test_the_engine_measures_on_a_real_model(tmp_path: Path) -> None:
    """Whatever is chosen, the decodes are real: as many as are counted, and their texts the plain ones."""
    model, prompts = tiny_model("llama"), [prompt(n, 6) for n in range(2)]
    settings: dict[str, Any] = {"max_new_tokens": 24, "out": tmp_path}
    static = tune(model, "static", prompts, **settings)
    assert isinstance(static.policy, StaticPolicy)
    entry = json.loads((tmp_path / TUNING).read_text())["suites"][""]["policies"]["static"]
    assert len(entry["decodes"]) == static.cost.evaluations > 8
    assert all(d["tokens"] == d["plain_tokens"] == 23 and d["error"] is None for d in entry["decodes"])
    assert static.cost.search_seconds == pytest.approx(entry["seconds"])
    kept = Tuner(model, prompts, **settings).tune("conflayers", keep_state=True)
    assert isinstance(kept.policy, LayerSkippingPolicy)
    assert not kept.policy.searches
    loaded = parse_policy(kept.settings)
    assert isinstance(loaded, LayerSkippingPolicy)
    assert loaded.best == kept.policy.best is not None
    kept.policy.best.check(N_LAYERS)
