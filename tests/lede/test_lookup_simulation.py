"""Lookups in the simulator against the decoder itself: tokens, rounds, head reads, observations and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from lede.buffers.records import PromptTrace
from lede.ceilings import solve
from lede.collectors.branches import BranchRules
from lede.collectors.teacher import collect_teacher
from lede.copy_forecast import COPY_FEATURES, GROUPS, CopyForecast, inputs
from lede.cost_model import CostModel
from lede.decoding import Decoder
from lede.envs import Rules
from lede.features import CALIBRATED_FEATURES, LOOKUP_FEATURES, MEMORY_FEATURES, FeatureConfig
from lede.lookup import LookupConfig
from lede.lookup_table import lookups_of
from lede.models import EarlyExitModel
from lede.phrases import PhraseMemory
from lede.policies import LearnedPolicy, LookupPolicy, LookupValuePolicy, Policy, RandomPolicy
from lede.policies.base import BLIND, Lookup, Plan, PreScanState
from lede.regret import split
from lede.round_log import SOURCES
from lede.simulation import Simulation, play, rounds_of, simulate
from lede.statistics import Meter
from lede.trace_table import TraceTable
from lede.verification import Chooser, TorchSource, Warp
from tests.forecasts import made_up, made_up_sources
from tests.planted_costs import AGAIN, BLOCKS, PLANTED
from tests.tiny_models import N_LAYERS, tiny_model

CANDIDATES = (1, 2, 4)
BUDGET = 40
LOOKUPS = (Lookup(2), Lookup(4), Lookup(16), Lookup(8, prune_at=3))
# texts that have much to copy, and the ends that random models come to repeat
PROMPTS = ([7, 3, 9, 7, 3, 9, 7, 3], [2, 4], [5, 6, 5, 6, 8, 5, 6], [1], [64, 65, 66, 64, 65])


def network(width: int, outputs: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights whose decisions change from state to state."""
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(16, width)), rng.normal(size=16)),
        (rng.normal(size=(outputs, 16)), rng.normal(size=outputs)),
    ]


def both(seed: int) -> LearnedPolicy:
    names = (*CALIBRATED_FEATURES, *LOOKUP_FEATURES)
    return LearnedPolicy.from_network(
        network(len(names), BLIND + len(CANDIDATES) + len(LOOKUPS), seed),
        features=FeatureConfig(names, forecast=made_up(CANDIDATES)),
        candidates=CANDIDATES,
        max_draft=5,
        lookup=LookupConfig(),
        lookups=LOOKUPS,
    )


def copying(seed: int) -> LearnedPolicy:
    names = ("trace", *LOOKUP_FEATURES)
    return LearnedPolicy.from_network(
        network(len(names), BLIND + len(LOOKUPS), seed),
        features=FeatureConfig(names),
        candidates=(),
        lookup=LookupConfig(2, continuation="frequent"),
        lookups=LOOKUPS,
    )


def remembering(seed: int) -> LearnedPolicy:
    names = ("trace", *MEMORY_FEATURES)
    return LearnedPolicy.from_network(
        network(len(names), BLIND + len(LOOKUPS), seed),
        features=FeatureConfig(names),
        candidates=(),
        lookup=LookupConfig(4),
        lookups=LOOKUPS,
    )


def memory_of(traces: list[PromptTrace]) -> PhraseMemory:
    """Of the texts, but for every sixth token."""
    texts = []
    for trace in traces:
        answer = trace.token_ids.copy()
        answer[5::6] = (answer[5::6] + 1) % tiny_model("llama").vocab_size
        texts.append((trace.prompt_ids, answer))
    return PhraseMemory.from_texts(texts)


def valued(prices: tuple[float, ...] = (0.2, 0.5, 1.0, 2.0)) -> LookupValuePolicy:
    features = FeatureConfig(COPY_FEATURES)
    n_inputs = inputs(np.zeros((1, len(COPY_FEATURES)), dtype=np.float32), features).shape[1]
    weights = np.random.default_rng(5).normal(size=(len(GROUPS), n_inputs))
    return LookupValuePolicy.from_forecast(CopyForecast(features, weights), prices=prices)


POLICIES: dict[str, Policy] = {
    "lookup": LookupPolicy(draft_length=6),
    "lookup, frequent": LookupPolicy(draft_length=3, max_suffix=2, continuation="frequent"),
    "lookup, pruned": LookupPolicy(draft_length=8, prune_at=5),
    "random": RandomPolicy(candidates=CANDIDATES, lookup_probability=0.6, blind_probability=0.2, skip_probability=0.1),
    "value": valued(),
    "sources 0": made_up_sources(0, CANDIDATES, LOOKUPS),
    "sources 1": made_up_sources(1, CANDIDATES, LOOKUPS),
    **{f"both {i}": both(i) for i in (2, 3, 4, 8, 10)},
    **{f"copying {i}": copying(i) for i in (1, 2, 3, 4, 10)},
    "lookup, memory": LookupPolicy(draft_length=6, max_suffix=4),
    "value, memory": valued((0.01, 0.02, 0.04, 0.08)),
    **{f"copying, memory {i}": remembering(i) for i in (1, 2, 3)},
}


@pytest.fixture(scope="module")
def traces() -> list[PromptTrace]:
    rules = Rules(max_new_tokens=BUDGET, features=FeatureConfig(), warp=Warp(), candidates=(1, 2, 3, 4, 5))
    return list(collect_teacher(tiny_model("llama"), list(enumerate(PROMPTS)), rules, branching=BranchRules(share=1.0)))


def table_of(traces: list[PromptTrace]) -> TraceTable:
    return TraceTable.from_traces(traces, BUDGET, tiny_model("llama").vocab_size)


COSTS = CostModel(N_LAYERS, (None,) * N_LAYERS, PLANTED, AGAIN, BLOCKS)


class Listener:
    """Notes what a policy is shown before each round."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.states = policy, []  # type: ignore[var-annotated]
        self._ask = policy.pre_scan

    def __enter__(self) -> Listener:
        self.policy.pre_scan = self._note  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self.policy.pre_scan

    def _note(self, state: PreScanState) -> Plan:
        self.states.append(state)
        return self._ask(state)


def decoded(model: EarlyExitModel, policy: Policy, prompt: Sequence[int]) -> tuple[list[int], Meter]:
    meter = Meter()
    policy.check_model(model)
    chooser = Chooser(Warp(), TorchSource(torch.Generator()))
    text = [
        token for block in Decoder(model, policy, chooser, frozenset(), meter).decode(prompt, BUDGET) for token in block
    ]
    return text, meter


def simulated(policy: Policy, table: TraceTable) -> tuple[Simulation, dict[tuple[int, int], np.ndarray]]:
    """The rounds, and what was seen before each, by prompt and decision."""
    if not isinstance(policy, LearnedPolicy):
        return simulate(policy, table, COSTS), {}
    seen = {}

    def decide(lanes):  # type: ignore[no-untyped-def]
        observed = lanes.observe()
        for lane in np.flatnonzero(lanes.stage == 0):
            seen[int(lane), int(lanes.decision[lane])] = observed[lane]
        return policy.decide(observed, lanes.legal())

    return play(rounds_of(policy, table, COSTS), decide), seen


@pytest.mark.parametrize("name", POLICIES)
def test_rounds_are_those_of_the_decoder(traces: list[PromptTrace], name: str) -> None:
    model, policy, table = tiny_model("llama"), POLICIES[name], table_of(traces)
    policy.memory = memory_of(traces) if "memory" in name else None
    policy.reset()
    found, seen = simulated(policy, table)
    policy.reset()
    log = found.log
    drafted = fooled = remembered = 0
    for place, prompt in enumerate(PROMPTS):
        if isinstance(policy, RandomPolicy):
            policy.reset()
            one = TraceTable.from_traces([traces[place]], BUDGET, model.vocab_size)
            found = simulate(policy, one, COSTS)
            log, where = found.log, 0
            policy.reset()
        else:
            where = place
        with Listener(policy) as heard:
            text, meter = decoded(model, policy, prompt)
        assert text == traces[place].token_ids.tolist()
        mine = log.prompt == where
        columns = (log.source, log.layer, log.n_drafted, log.n_accepted, log.n_committed)
        rounds = [tuple(map(int, row)) for row in zip(*(column[mine] for column in columns), strict=True)]
        real = [
            (SOURCES.index(r.source or "plain"), r.exit_layer or 0, r.drafted, r.accepted, len(r.tokens))
            for r in meter.rounds
        ]
        if name == "lookup, pruned":
            # behind a wrong token that the layer finds likeliest too, traces don't tell what it says next
            astray = [mine[2] == mine[3] + 1 for mine in rounds]
            fooled += sum(astray)
            rounds = [
                (*mine[:2], max(mine[2], true[2]), *mine[3:]) if odd else mine
                for mine, true, odd in zip(rounds, real, astray, strict=True)
            ]
        assert rounds == real
        assert found.head_reads[where] == meter.head_reads
        starts = np.cumsum([1, *(len(r.tokens) for r in meter.rounds)])
        if seen:
            wanted = np.stack([state.observation for state in heard.states])
            mirrored = np.stack([seen[place, int(t)] for t in starts[: len(heard.states)]])
            np.testing.assert_allclose(mirrored, wanted, atol=1e-5)
        drafted += sum(r.drafted for r in meter.rounds if r.source == "lookup")
        remembered += sum(state.match is not None and state.match.remembered for state in heard.states)
    assert drafted > 20
    assert (remembered > 10) == ("memory" in name)
    assert (fooled > 0) == (name == "lookup, pruned")


@pytest.mark.parametrize("name", ["lookup", "lookup, pruned", "value", "copying 1", "both 3"])
def test_seconds_are_those_of_the_cost_model(traces: list[PromptTrace], name: str) -> None:
    policy, table = POLICIES[name], table_of(traces)
    found = simulate(policy, table, COSTS)
    log, features = found.log, policy.features
    assert policy.lookup is not None
    proposed = lookups_of(table, policy.lookup).proposed
    asked = 0.0 if features is None else PLANTED.observe + PLANTED.policy
    checked = 0
    for i in np.flatnonzero(log.source == SOURCES.index("lookup")).tolist():
        t, drafted = int(log.decision[i]), int(log.n_drafted[i])
        context = int(table.prompt_length[log.prompt[i]]) + t - 1
        wanted = asked + PLANTED.embed + PLANTED.propose + PLANTED.index * int(log.n_committed[i])
        plain = wanted + COSTS.verify_seconds(0, drafted + 1, context)
        row = table.first_row[log.prompt[i]] + t - 1
        read = min(8, BUDGET - t - 1, int(proposed[row])) + 1
        layer = 5 if name == "lookup, pruned" else 3
        pruned = wanted + PLANTED.choose + COSTS.seconds(0, layer, read, context) + COSTS.head_seconds(read)
        pruned += COSTS.verify_seconds(layer, drafted + 1, context)
        if name == "lookup, pruned":
            assert log.seconds[i] == pytest.approx(pruned, rel=1e-9)
        elif policy.config == POLICIES["lookup"].config or name == "value":
            assert log.seconds[i] == pytest.approx(plain, rel=1e-9)
        else:
            assert min(abs(log.seconds[i] - each) for each in (plain, pruned)) < 1e-12
        checked += 1
    assert checked > 5
    by_prompt = np.bincount(log.prompt, log.seconds)
    np.testing.assert_allclose(by_prompt, found.seconds)


def test_regret_with_lookups_adds_up_and_is_never_negative(traces: list[PromptTrace]) -> None:
    table = table_of(traces)
    # costs that grow with the block, so that a longer one is never cheaper
    costs = replace(COSTS, blocks=())
    for name in ("copying 1", "both 3", "both 8", "lookup"):
        policy = POLICIES[name]
        lookup = lookups_of(table, policy.lookup)  # type: ignore[arg-type]
        best = solve(table, costs, CANDIDATES, 12, lookup=lookup)
        found = simulate(policy, table, costs)
        lost = split(found, best)
        total = best.seconds + sum(lost.parts.values())
        np.testing.assert_allclose(total, found.seconds)
        assert all((part >= -1e-9).all() for part in lost.parts.values())
        assert (best.seconds <= found.seconds + 1e-12).all()
        assert lost.parts["wrong_source"].sum() > 0
        without = solve(table, costs, CANDIDATES, 12)
        assert best.rate > without.rate
        assert best.summary().lookup_share > 0 == without.summary().lookup_share
