"""`lede/DraftRound-v1`: the choice of a source, against the simulator and by the rules of a lookup."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from lede.buffers import TraceStore
from lede.cost_model import CostModel
from lede.envs import DraftSourceEnv, DraftSourceVectorEnv
from lede.features import LOOKUP_FEATURES, MEMORY_FEATURES, WALL_CLOCK_FEATURES, FeatureConfig
from lede.lookup import LookupConfig, LookupIndex, agreeing
from lede.phrases import PhraseMemory
from lede.policies import LearnedPolicy
from lede.policies.base import ExitAt, Lookup
from lede.simulation import simulate
from tests.buffers.samples import CANDIDATES, N_LAYERS, settings
from tests.copied_texts import VOCABULARY, copied_text
from tests.planted_costs import PLANTED

BUDGET = 60
COSTS = CostModel(N_LAYERS, (None,) * N_LAYERS, PLANTED)
TRACES = [copied_text(i, BUDGET, N_LAYERS) for i in range(4)]
STORE = TraceStore(settings(max_new_tokens=BUDGET, features=FeatureConfig(top_k=3), vocab_size=VOCABULARY), TRACES)
PLANS = (Lookup(2), Lookup(8), Lookup(8, prune_at=3))


def make(**changes: Any) -> DraftSourceEnv:
    defaults = {"traces": STORE, "profile": COSTS, "max_draft": 4, "order": "sequential", "lookups": PLANS}
    env = gymnasium.make("lede/DraftRound-v1", **{**defaults, **changes}).unwrapped
    assert isinstance(env, DraftSourceEnv)
    return env


def network(width: int, outputs: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [
        (rng.normal(size=(16, width)), rng.normal(size=16)),
        (rng.normal(size=(outputs, 16)), rng.normal(size=outputs)),
    ]


def policy_of(env: DraftSourceEnv, lengths: tuple[int, ...] = ()) -> LearnedPolicy:
    features, copies = env.lanes.features, "source" in env.lanes.infos
    return LearnedPolicy.from_network(
        network(len(features.names), env.lanes.n_actions),
        features=features,
        candidates=env.lanes.costs.candidates,
        max_draft=4,
        lookup=LookupConfig() if copies else None,
        lookups=PLANS if copies else (),
        fixed_drafts=tuple(ExitAt(layer, n) for layer in env.lanes.costs.candidates for n in lengths),
    )


@pytest.mark.parametrize(
    ("sources", "lengths"), [("exit,lookup", ()), ("lookup", ()), ("exit,lookup", (1, 3)), ("exit", (1, 3))]
)
def test_it_plays_what_the_simulator_plays(sources: str, lengths: tuple[int, ...]) -> None:
    env = make(sources=sources, rate=50.0, fixed_lengths=lengths)
    policy = policy_of(env, lengths)
    played = simulate(policy, env.lanes.table, COSTS)
    found = []
    seen, info = env.reset(seed=0)
    for place in range(len(TRACES)):
        tokens = seconds = earned = 0.0
        terminated = False
        while not terminated:
            action = int(policy.decide(seen[None], info["action_mask"][None].astype(bool))[0])
            seen, reward, terminated, truncated, info = env.step(action)
            assert not truncated
            tokens, seconds, earned = tokens + info["tokens"], seconds + info["seconds"], earned + reward
            if info["n_drafted"] >= 0:
                source = info.get("source", int(info["n_drafted"] > 0))
                found.append((place, source, info["n_drafted"], info["n_accepted"]))
        assert tokens == played.tokens[place] == BUDGET - 1
        assert seconds == pytest.approx(played.seconds[place])
        assert earned == pytest.approx(tokens - 50 * seconds)
        seen, info = env.reset()
    log = played.log
    rounds = list(zip(log.prompt, log.source, log.n_drafted, log.n_accepted, strict=True))
    # a plain pass that the budget forces counts towards the step before
    forced = [i for i, t in enumerate(log.decision) if t == BUDGET - 1]
    assert found == [tuple(map(int, r)) for i, r in enumerate(rounds) if i not in forced]
    assert (log.source == 2).sum() > 10 or sources == "exit"
    assert not lengths or {0} < set(log.fixed) <= {0, *lengths}


def test_a_lookup_drafts_what_the_index_proposes() -> None:
    env = make(sources="lookup", lookups=(1, 4, 16))
    _, info = env.reset(seed=0)
    assert info["action_mask"].tolist() == [1, 0, 1, 1, 1]
    trace, t, right = TRACES[0], 1, 0
    rng = np.random.default_rng(0)
    terminated = False
    while not terminated:
        length = (1, 4, 16)[action := int(rng.integers(3))]
        text = [*trace.prompt_ids.tolist(), *trace.token_ids[:t].tolist()]
        copied = LookupIndex(LookupConfig(), text).propose(min(length, BUDGET - t - 1))
        accepted = agreeing(copied, trace.token_ids[t:].tolist())
        *_, terminated, _, info = env.step(2 + action)
        forced = BUDGET - (t + accepted + 1) == 1
        assert (info["n_drafted"], info["n_accepted"]) == (len(copied), accepted)
        assert info["tokens"] == accepted + 1 + forced
        assert info["source"] == (2 if copied else 0)
        t, right = t + info["tokens"], right + accepted
    assert right > 10


def test_a_memory_of_other_texts_stands_behind() -> None:
    """Of these very texts, so that it is always asked and always right: here nobody learns from it."""
    memory = PhraseMemory.from_texts([(trace.prompt_ids[-1:], trace.token_ids) for trace in TRACES])
    env, bare = (make(sources="lookup", lookups=(8,), memory=each) for each in (memory, None))
    assert env.lanes.features.names == ("trace", *MEMORY_FEATURES)
    rounds = {}
    for each in (env, bare):
        observation, _ = each.reset(seed=0)
        terminated, seen = False, [observation]
        while not terminated:
            observation, _, terminated, _, _ = each.step(2)
            seen.append(observation)
        rounds[each] = len(seen)
        if each is env:
            assert {float(row[-1]) for row in seen} == {0.0, 1.0}
    assert rounds[env] < 0.7 * rounds[bare]


def test_spaces_and_defaults() -> None:
    both = make(lookups=(2, 4))
    assert both.action_space == gymnasium.spaces.Discrete(2 + len(CANDIDATES) + 2)
    assert both.lanes.features.names == (*WALL_CLOCK_FEATURES, *LOOKUP_FEATURES)
    _, info = both.reset(seed=0)
    assert info["action_mask"].all()
    alone = make(sources="lookup", lookups=(2, 4))
    assert alone.lanes.features.names == ("trace", *LOOKUP_FEATURES)
    layers = make(sources="exit")
    assert layers.action_space == gymnasium.spaces.Discrete(2 + len(CANDIDATES))
    assert "source" not in layers.reset(seed=0)[1]
    env = make()
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"1 \(scan\).*copy up to 8 tokens, pruned at layer 3"):
        env.step(99)
    fixed = make(lookups=(2,), fixed_lengths=(1, 4))
    assert fixed.action_space == gymnasium.spaces.Discrete(2 + len(CANDIDATES) + 1 + 2 * len(CANDIDATES))
    fixed.reset(seed=0)
    with pytest.raises(ValueError, match=r"copy up to 2 tokens\), 6 \(draft 1 tokens at layer 1 unasked\)"):
        fixed.step(99)


def test_the_vector_twin_steps_alike() -> None:
    alone = make(traces=STORE)
    many = gymnasium.make_vec(
        "lede/DraftRound-v1", num_envs=1, traces=STORE, profile=COSTS, max_draft=4, order="sequential", lookups=PLANS
    ).unwrapped
    assert isinstance(many, DraftSourceVectorEnv)
    seen, info = alone.reset(seed=1)
    seen_many, infos = many.reset(seed=1)
    rng = np.random.default_rng(2)
    sources = set()
    for _ in range(60):
        np.testing.assert_array_equal(seen, seen_many[0])
        action = int(rng.choice(np.flatnonzero(info["action_mask"])))
        seen, reward, terminated, _, info = alone.step(action)
        seen_many, rewards, ends, _, infos = many.step(np.asarray([action]))
        assert (reward, terminated, info["source"]) == (rewards[0], ends[0], infos["source"][0])
        sources.add(info["source"])
        if terminated:
            seen, info = alone.reset()
            seen_many, *_ = many.step(np.asarray([0]))
    assert sources == {-1, 0, 1, 2}


def test_the_checker_has_nothing_to_say() -> None:
    check_env(make(order="shuffled"))
    copying = make(sources="lookup", episode="round", order="shuffled")
    copying.action_space.seed(0)  # the checker draws any action, and without layers the scan is none that is legal
    check_env(copying)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": "text"}, "sources must be 'exit', 'lookup' or 'exit,lookup', got 'text'"),
        ({"lookups": ()}, "lookups must be distinct, at least one"),
        ({"lookups": (2, 2)}, "lookups must be distinct"),
        ({"lookups": (Lookup(2, prune_at=6),)}, r"pruned at layers 1\.\.5"),
        ({"fixed_lengths": (1, 13)}, r"fixed_lengths must be ascending within 1\.\.max_draft = 12, got \[1, 13\]"),
        ({"fixed_lengths": (2,), "sources": "lookup"}, "fixed_lengths are of drafts by layers"),
        ({"render_mode": "human"}, "leave out render_mode"),
    ],
)
def test_unusable_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    given = {"traces": STORE, "profile": COSTS, **changes}
    with pytest.raises(ValueError, match=message):
        DraftSourceEnv(**given)
    with pytest.raises(ValueError, match=message):
        DraftSourceVectorEnv(2, **given)
