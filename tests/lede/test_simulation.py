"""The simulator against the decoder itself: on traces that hold every branch, round for round the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lede.buffers.records import PromptTrace
from lede.collectors.branches import BranchRules
from lede.collectors.teacher import collect_teacher
from lede.cost_model import CostModel
from lede.decoding import Decoder
from lede.envs import Rules
from lede.features import CALIBRATED, WALL_CLOCK_FEATURES, FeatureConfig
from lede.models import EarlyExitModel
from lede.policies import (
    AblatedPolicy,
    DraftVerifyPolicy,
    DynamicExitLayerPolicy,
    ExitAt,
    LearnedPolicy,
    Policy,
    RandomPolicy,
    StaticPolicy,
    SurvivalPolicy,
    ThresholdPolicy,
)
from lede.round_log import ENDINGS
from lede.simulation import simulate
from lede.statistics import Meter
from lede.trace_table import TraceTable
from lede.verification import Chooser, TorchSource, Warp
from tests.forecasts import made_up, made_up_survival
from tests.planted_costs import AGAIN, BLOCKS, PLANTED
from tests.tiny_models import N_LAYERS, tiny_model

CANDIDATES = (1, 2, 4)
STAGES = ("in_scan", "in_draft")
FIXED = (ExitAt(1, 1), ExitAt(2, 3), ExitAt(4, 7))
MIXED = (45, 53, 57, 59)  # networks that choose fixed drafts in some rounds, and other plans in others
COLUMNS = ("fixed", "n_drafted", "n_accepted")
BUDGET = 24
PROMPTS = ([3, 5, 7, 11], [2, 4], [90, 17, 33, 71, 8], [1], [64, 65, 66])


def random_network(names: Sequence[str], outputs: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights whose decisions change from state to state."""
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(16, len(names))), rng.normal(size=16)),
        (rng.normal(size=(outputs, 16)), rng.normal(size=outputs)),
    ]


def learned(
    names: tuple[str, ...],
    outputs: int,
    seed: int = 0,
    draft_agreement: bool = False,
    fixed_drafts: tuple[ExitAt, ...] = (),
) -> LearnedPolicy:
    forecast = made_up(CANDIDATES) if "outlook" in names else None
    features = FeatureConfig(names=names, draft_agreement=draft_agreement, forecast=forecast)
    network = random_network(names, outputs + len(fixed_drafts), seed)
    return LearnedPolicy.from_network(
        network, candidates=CANDIDATES, features=features, max_draft=5, fixed_drafts=fixed_drafts
    )


FORECASTS = made_up_survival(2, CANDIDATES)
POLICIES: dict[str, Policy | None] = {
    "plain": None,
    "static": StaticPolicy(exit_layer=2, draft_length=3),
    "threshold": ThresholdPolicy(candidates=CANDIDATES, thresholds=0.02, max_draft=5),
    "paper": learned(("confidence", "entropy", "trace", "depth"), 2, seed=1),
    "paper, more": learned(("surprisal", "margin", "agreement", "trace"), 2, seed=2),
    **{f"plans {i}": learned(WALL_CLOCK_FEATURES, 2 + len(CANDIDATES), seed=i) for i in range(6)},
    "plans, second read": learned(WALL_CLOCK_FEATURES, 2 + len(CANDIDATES), seed=4, draft_agreement=True),
    **{f"fixed {i}": learned(WALL_CLOCK_FEATURES, 2 + len(CANDIDATES), i, fixed_drafts=FIXED) for i in MIXED},
    "fixed, second read": learned(WALL_CLOCK_FEATURES, 2 + len(CANDIDATES), 57, True, FIXED),
    "fixed always": SurvivalPolicy.from_model(FORECASTS.model, replace(FORECASTS.config, blind=2, fixed_length=4)),
    **{f"calibrated {i}": learned((*CALIBRATED, *STAGES), 2 + len(CANDIDATES), seed=i) for i in range(2)},
}


@pytest.fixture(scope="module")
def traces() -> dict[str, list[PromptTrace]]:
    rules = Rules(max_new_tokens=BUDGET, features=FeatureConfig(), warp=Warp(), candidates=(1, 2, 3, 4, 5))
    branching = BranchRules(share=1.0)
    numbered = list(enumerate(PROMPTS))
    return {
        family: list(collect_teacher(tiny_model(family), numbered, rules, branching=branching))
        for family in ("llama", "gemma3_text")
    }


def decoded(model: EarlyExitModel, policy: Policy | None, prompt: Sequence[int]) -> Meter:
    meter = Meter()
    if policy is not None:
        policy.check_model(model)
    chooser = Chooser(Warp(), TorchSource(torch.Generator()))
    for _ in Decoder(model, policy, chooser, frozenset(), meter).decode(prompt, BUDGET):
        pass
    return meter


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rounds_are_those_of_the_decoder(traces: dict[str, list[PromptTrace]], family: str, name: str) -> None:
    model, policy = tiny_model(family), POLICIES[name]
    table = TraceTable.from_traces(traces[family], BUDGET, model.vocab_size)
    costs = CostModel(N_LAYERS, tuple(model.windows), PLANTED)
    found = simulate(policy, table, costs)
    log = found.log
    for place, prompt in enumerate(PROMPTS):
        meter = decoded(model, policy, prompt)
        mine = log.prompt == place
        simulated = list(
            zip(log.layer[mine], log.n_drafted[mine], log.n_accepted[mine], log.n_committed[mine], strict=True)
        )
        real = [(r.exit_layer or 0, r.drafted, r.accepted, len(r.tokens)) for r in meter.rounds]
        assert [tuple(map(int, row)) for row in simulated] == real
        assert found.head_reads[place] == meter.head_reads
        assert found.tokens[place] == sum(len(r.tokens) for r in meter.rounds) == BUDGET - 1


@pytest.mark.parametrize("name", POLICIES)
def test_seconds_are_those_of_the_cost_model(traces: dict[str, list[PromptTrace]], name: str) -> None:
    policy = POLICIES[name]
    model = tiny_model("gemma3_text")
    table = TraceTable.from_traces(traces["gemma3_text"], BUDGET, model.vocab_size)
    costs = CostModel(N_LAYERS, tuple(model.windows), PLANTED, AGAIN, BLOCKS)
    found = simulate(policy, table, costs)
    log = found.log
    features = None if policy is None else policy.features
    for i in range(len(log)):
        prompt, t = log.prompt[i], int(log.decision[i])
        context = int(table.prompt_length[prompt]) + t - 1
        ending = ENDINGS[log.ending[i]]
        asked = policy is not None and features is not None and policy.decides_pre_scan
        seen = None if log.fixed[i] else features
        if BUDGET - t <= 1:
            wanted = costs.plain_seconds(context)  # no room for a draft, so nobody is asked
        elif policy is None:
            wanted = costs.plain_seconds(context)
        else:
            wanted = costs.round_seconds(
                context,
                CANDIDATES[: log.n_scanned[i]],
                int(log.layer[i]) or None,
                int(log.n_drafted[i]),
                "cap" if ending == "plain" else ending,  # type: ignore[arg-type]
                features=seen,
                pre_scan=asked and seen is not None,
                lowest=CANDIDATES[0],
            )
            wanted += costs.pre_scan_seconds(features) if asked and seen is None else 0.0
        assert log.seconds[i] == pytest.approx(wanted, rel=1e-9)
    assert np.bincount(log.prompt, log.seconds) == pytest.approx(found.seconds)


def test_policies_choose_fixed_drafts_and_others(traces: dict[str, list[PromptTrace]]) -> None:
    """Or the tests above would hold for nothing."""
    table = TraceTable.from_traces(traces["llama"], BUDGET, 128)
    costs = CostModel(N_LAYERS, (None,) * N_LAYERS, PLANTED)
    logs = [simulate(POLICIES[f"fixed {i}"], table, costs).log for i in MIXED]
    fixed, drafted, accepted = (np.concatenate([getattr(log, name) for log in logs]) for name in COLUMNS)
    assert set(fixed.tolist()) == {0, 1, 3, 7}
    assert ((fixed == 0) & (drafted > 0)).any()
    assert set(drafted[fixed == 7].tolist()) >= {5}  # max_draft cuts it
    assert ((accepted < drafted) & (fixed > 0)).any()
    always = simulate(POLICIES["fixed always"], table, costs)
    static = simulate(StaticPolicy(exit_layer=2, draft_length=4), table, costs)
    assert always.tokens.tolist() == static.tokens.tolist()
    assert always.seconds == pytest.approx(static.seconds)
    assert always.head_reads.tolist() == static.head_reads.tolist()


def test_random_policy_meets_every_kind_of_round(traces: dict[str, list[PromptTrace]]) -> None:
    model = tiny_model("llama")
    table = TraceTable.from_traces(traces["llama"], BUDGET, model.vocab_size)
    costs = CostModel(N_LAYERS, tuple(model.windows), PLANTED)
    log = simulate(RandomPolicy(candidates=CANDIDATES, max_draft=4), table, costs).log
    assert {ENDINGS[i] for i in log.ending.tolist()} >= {"plain", "stop", "cap"}
    assert set(log.layer.tolist()) == {0, *CANDIDATES}
    assert (log.n_scanned == 0).any()
    assert (log.n_scanned == len(CANDIDATES)).any()


def test_prompts_have_nothing_to_do_with_each_other(traces: dict[str, list[PromptTrace]], tmp_path: Path) -> None:
    """Also for a policy that remembers its draft and is asked lane by lane."""
    base = made_up_survival(2, CANDIDATES)
    base.save_pretrained(str(tmp_path))
    blind = SurvivalPolicy.from_model(base.model, replace(base.config, blind=2))
    costs, held = CostModel(N_LAYERS, (None,) * N_LAYERS, PLANTED), AblatedPolicy.of(tmp_path, exit_layer=2)
    table = TraceTable.from_traces(traces["llama"], BUDGET, 128)
    found, wanted = simulate(held, table, costs).log, simulate(blind, table, costs).log
    assert len(set(found.n_drafted.tolist())) > 2
    for place in range(len(PROMPTS)):
        rounds = [
            list(zip(log.layer[mine], log.n_drafted[mine], log.n_accepted[mine], strict=True))
            for log in (found, wanted)
            for mine in (log.prompt == place,)
        ]
        assert rounds[0] == rounds[1]


@pytest.mark.parametrize("policy", [DraftVerifyPolicy(exit_layer=2), DynamicExitLayerPolicy()], ids=lambda p: p.kind)
def test_who_learns_from_what_it_decodes_is_refused(traces: dict[str, list[PromptTrace]], policy: Policy) -> None:
    table = TraceTable.from_traces(traces["llama"], BUDGET, 128)
    with pytest.raises(ValueError, match=f"the {policy.kind} policy learns from the texts that it decodes"):
        simulate(policy, table, CostModel(N_LAYERS, (None,) * N_LAYERS, PLANTED))


def test_a_text_that_nobody_knows_the_rest_of_is_refused(traces: dict[str, list[PromptTrace]]) -> None:
    table = TraceTable.from_traces(traces["llama"], BUDGET + 1, 128)
    with pytest.raises(ValueError, match=f"neither ends nor fills the budget of {BUDGET + 1} new tokens"):
        simulate(StaticPolicy(exit_layer=2), table, CostModel(N_LAYERS, (None,) * N_LAYERS, PLANTED))


def test_a_blind_layer_outside_the_candidates_is_refused(traces: dict[str, list[PromptTrace]]) -> None:
    model = tiny_model("llama")
    table = TraceTable.from_traces(traces["llama"], BUDGET, model.vocab_size)
    policy = RandomPolicy(candidates=(3,), blind_probability=0.9)
    costs = CostModel(N_LAYERS, tuple(model.windows), PLANTED)
    with pytest.raises(ValueError, match=r"drafts at layer 3, which is none of the candidates \[1, 2\]"):
        simulate(policy, table, costs, candidates=(1, 2))
    gaps = RandomPolicy(candidates=(1, 2), skip_probability=0.0, blind_probability=0.0, gap_probability=1.0)
    gaps.check_model(model)
    with pytest.raises(ValueError, match="the random policy drafts with gaps; traces know exits alone"):
        simulate(gaps, table, costs)
    with pytest.raises(ValueError, match="cost model is of 5 layers, the traces of 6"):
        simulate(None, table, CostModel(5, (None,) * 5, PLANTED))
