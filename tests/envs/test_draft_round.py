"""Rounds against the rules of decoding, applied to each trace by hand, and against the cost of a whole round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from lede.buffers import PromptTrace, TraceStore
from lede.cost_model import CostModel
from lede.envs import DraftRoundEnv
from lede.features import CALIBRATED_FEATURES, DRAFT, PRE_SCAN, SCAN, WALL_CLOCK_FEATURES, FeatureConfig
from tests.buffers.samples import CANDIDATES, N_LAYERS, make_trace, settings
from tests.forecasts import made_up
from tests.planted_costs import PLANTED

BUDGET, CAP = 12, 4
COSTS = CostModel(N_LAYERS, (None,) * N_LAYERS, PLANTED)
# texts as a budget of 12 leaves them: cut there, or ended before
TRACES = [make_trace(i, 12 if i % 2 else 5 + i, eos=i % 2 == 0) for i in range(6)]
STORE = TraceStore(settings(max_new_tokens=BUDGET, features=FeatureConfig(top_k=3)), TRACES)


def make(**changes: Any) -> DraftRoundEnv:
    defaults = {"traces": STORE, "profile": COSTS, "max_draft": CAP, "order": "sequential"}
    env = gymnasium.make("lede/DraftRound-v0", **{**defaults, **changes}).unwrapped
    assert isinstance(env, DraftRoundEnv)
    return env


class Bookkeeper:
    """Follows one prompt by the rules, without the simulator."""

    def __init__(self, trace: PromptTrace) -> None:
        self.trace, self.t = trace, 1
        self.begin()

    def begin(self) -> None:
        self.stage, self.layer, self.drafted = PRE_SCAN, 0, 0
        self.scanned: list[int] = []

    def legal(self) -> list[int]:
        return list(range(2 + len(CANDIDATES))) if self.stage == PRE_SCAN else [0, 1]

    def act(self, action: int) -> tuple[int, int, float, int] | None:
        """Drafted, accepted, seconds of the whole round and tokens, once it is over."""
        if self.stage == PRE_SCAN:
            if action == 0:
                return self.end("plain")
            if action >= 2:
                self.layer = CANDIDATES[action - 2]
                return self.draft()
            self.stage, self.scanned = SCAN, [CANDIDATES[0]]
        elif self.stage == SCAN:
            if action == 1:
                self.layer = self.scanned[-1]
                return self.draft()
            if len(self.scanned) == len(CANDIDATES):
                return self.end("plain")
            self.scanned.append(CANDIDATES[len(self.scanned)])
        else:
            return self.draft() if action == 1 else self.end("stop")
        return None

    def draft(self) -> tuple[int, int, float, int] | None:
        self.stage = DRAFT
        self.drafted += 1
        at_eos = self.trace.ended_by_eos and self.t + self.drafted - 1 == self.trace.n_decided
        if at_eos and self.accepted() == self.drafted:
            return self.end("eos")
        return self.end("cap") if self.drafted == min(CAP, BUDGET - self.t - 1) else None

    def accepted(self) -> int:
        right = self.trace.match[self.t - 1 : self.t - 1 + self.drafted, self.layer - 1]
        return int(np.cumprod(right).sum())

    def end(self, ending: Any) -> tuple[int, int, float, int]:
        context = self.trace.prompt_ids.size + self.t - 1
        plain = ending == "plain"
        seconds = COSTS.round_seconds(
            context,
            self.scanned,
            None if plain else self.layer,
            self.drafted,
            "cap" if plain else ending,
            FeatureConfig(WALL_CLOCK_FEATURES, top_k=3),
            pre_scan=True,
        )
        accepted = 0 if plain else self.accepted()
        tokens = accepted + (ending != "eos")
        found = self.drafted, accepted
        self.t += tokens
        if self.t <= self.trace.n_decided and BUDGET - self.t < 2:  # no room for a draft and its bonus
            seconds += COSTS.plain_seconds(self.trace.prompt_ids.size + self.t - 1)
            tokens, self.t = tokens + 1, self.t + 1
        self.begin()
        return *found, seconds, tokens


@pytest.mark.parametrize("episode", ["prompt", "round"])
def test_rounds_follow_the_rules_and_cost_what_a_round_costs(episode: Any) -> None:
    env = make(episode=episode, rate=100.0)
    rng = np.random.default_rng(0)
    endings = set()
    _, info = env.reset(seed=0)
    for number in range(5 * len(TRACES)):
        trace = TRACES[number % len(TRACES)]
        book, committed, spent = Bookkeeper(trace), 0, 0.0
        while book.t <= trace.n_decided:
            assert (info["prompt_index"], info["stage"]) == (trace.prompt_index, book.stage)
            assert info["layer"] == (0 if book.stage == PRE_SCAN else (book.layer or book.scanned[-1]))
            assert np.flatnonzero(info["action_mask"]).tolist() == book.legal()
            # mostly draft on, so that drafts grow
            action = int(rng.choice(book.legal())) if rng.random() < 0.5 else 1
            over = book.act(action)
            _, reward, terminated, truncated, info = env.step(action)
            spent, committed = spent + info["seconds"], committed + info["tokens"]
            assert reward == pytest.approx(info["tokens"] - 100 * info["seconds"])
            if over is None:
                assert (info["tokens"], info["n_drafted"], info["n_accepted"]) == (0, -1, -1)
            else:
                assert (info["n_drafted"], info["n_accepted"], info["tokens"]) == (over[0], over[1], over[3])
                assert spent == pytest.approx(over[2])
                endings.add((over[0] > 0, over[0] == over[1], book.t > trace.n_decided))
                spent = 0.0
            done = book.t > trace.n_decided
            assert not truncated
            assert terminated == (done if episode == "prompt" else over is not None)
            if terminated:
                _, info = env.reset()
                assert (info["tokens"], info["seconds"], info["n_drafted"]) == (0, 0.0, -1)
        assert committed == trace.n_decided
    assert len(endings) == 6  # drafts right and wrong and plain passes, in the text and at its end


def test_by_default_a_second_costs_what_plain_decoding_makes_of_it() -> None:
    features = FeatureConfig(("trace",), top_k=3)
    env = make(features=features)
    seconds = sum(COSTS.plain_seconds(t.prompt_ids.size + i) for t in TRACES for i in range(t.n_decided))
    tokens = sum(t.n_decided for t in TRACES)
    assert env.rate == pytest.approx(tokens / seconds)
    env.set_rate(5.0)
    assert env.rate == 5.0
    env.reset(seed=0)
    *_, info = env.step(1)
    assert env.step(0)[1] < 0 == info["tokens"]
    env.set_rate(None)
    assert env.rate == pytest.approx(tokens / seconds)
    for rate in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="rate must be a positive number"):
            env.set_rate(rate)


def test_without_the_stage_in_view_the_pre_scan_scans() -> None:
    env = make(features=FeatureConfig(top_k=3))
    _, info = env.reset(seed=0)
    assert info["action_mask"].tolist() == [0, 1, 0, 0, 0]
    with pytest.raises(ValueError, match=r"action 0 .* in the pre-scan they are 1 \(scan\)"):
        env.step(0)
    env.reset()  # the round in view goes to its end all the same


@pytest.mark.parametrize("actions", [(), (1,), (1, 1), (3, 1)])
def test_a_round_left_undecided_drafts_no_more(actions: tuple[int, ...]) -> None:
    env, other = make(episode="round"), make(episode="round")
    for each in (env, other):
        each.reset(seed=0)
    for action in actions:
        assert not env.step(action)[2]
        other.step(action)
    _, info = env.reset()
    while not other.step(0)[2]:
        pass
    seen, expected = other.reset()
    assert info["prompt_index"] == expected["prompt_index"] == 0
    assert env.lanes.rounds.decision == other.lanes.rounds.decision > 1
    np.testing.assert_array_equal(env.lanes.observations[0], seen)


def test_nothing_in_view_tells_of_matches_before_the_verification() -> None:
    """Two texts that differ in nothing but what would be accepted look alike until a draft is verified."""
    features = FeatureConfig(CALIBRATED_FEATURES, top_k=3, forecast=made_up(CANDIDATES))
    changed = make_trace(1, 12, eos=False)
    changed.match[:, :-1] = 1 - changed.match[:, :-1]
    runs = []
    for trace in (make_trace(1, 12, eos=False), changed):
        env = make(traces=TraceStore(STORE.settings, [trace]), features=features)
        views = [env.reset(seed=0)]
        views += [env.step(action)[::4] for action in (1, 0, 1, 1, 1)]
        runs.append((views, env.step(0)[::4]))
    (views, end), (views_changed, end_changed) = runs
    for (seen, info), (seen_changed, info_changed) in zip(views, views_changed, strict=True):
        np.testing.assert_array_equal(seen, seen_changed)
        assert {**info, "action_mask": 0} == {**info_changed, "action_mask": 0}
    assert end[1]["n_accepted"] != end_changed[1]["n_accepted"]
    assert not np.array_equal(end[0], end_changed[0])


def test_seeds_draw_the_acceptance_of_sampled_drafts() -> None:
    store = TraceStore(STORE.settings, [make_trace(i, 12, eos=False, sampled=True) for i in range(3)])
    env = make(traces=store)
    accepted = []
    for seed in (1, 1, 2):
        env.reset(seed=seed)
        found: list[int] = []
        while len(found) < 6:
            *_, terminated, _, info = env.step(3 if env.lanes.infos["stage"][0] == PRE_SCAN else 1)
            found += [info["n_accepted"]] if info["n_accepted"] >= 0 else []
            if terminated:
                env.reset()
        accepted.append(found)
    assert accepted[0] == accepted[1] != accepted[2]


def test_the_checker_has_nothing_to_say() -> None:
    for episode in ("prompt", "round"):
        check_env(make(episode=episode, order="shuffled"))  # warnings are errors
    check_env(make(order="shuffled", fixed_lengths=(2, 4)))


def test_a_profile_is_read_from_its_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*profile\.json"):
        make(profile=tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episode": "token"}, "one of prompt, round, got 'token'"),
        ({"max_draft": 0}, "max_draft must be at least 1, got 0"),
        ({"candidates": (3, 6)}, r"within 1\.\.5"),
        ({"features": FeatureConfig(WALL_CLOCK_FEATURES, top_k=4)}, "top_k 3, not 4"),
        ({"profile": CostModel(7, (None,) * 7, PLANTED)}, "7 layers, the traces of one with 6"),
        ({"traces": [make_trace(0, 2)], "vocab_size": 50}, "leaves no room for a draft"),
        ({"render_mode": "human"}, "leave out render_mode"),
    ],
)
def test_unusable_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftRoundEnv(**{"traces": STORE, "profile": COSTS, **changes})


def test_illegal_actions_are_named() -> None:
    env = make()
    with pytest.raises(ResetNeeded):
        env.step(0)
    _, info = env.reset(seed=0)
    assert env.action_space == gymnasium.spaces.Discrete(5)
    assert env.action_space.sample(info["action_mask"]) in range(5)
    with pytest.raises(ValueError, match=r"0 \(skip the draft\), 1 \(scan\), 2 \(draft blind at layer 1\), 3"):
        env.step(5)
    env.step(1)
    with pytest.raises(ValueError, match=r"action 2 .* in the scan they are 0 \(go on\), 1 \(exit and draft\)"):
        env.step(2)
    env.step(1)
    with pytest.raises(ValueError, match=r"action 3 .* in the draft they are 0 \(stop\), 1 \(draft on\)"):
        env.step(3)
