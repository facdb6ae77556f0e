"""`lede evaluate`: figures against the simulator's own, the files it writes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lede.buffers import StoreWriter
from lede.buffers.playback import synthesize
from lede.buffers.records import PromptTrace
from lede.buffers.settings import StoreSettings
from lede.buffers.store import TraceStore
from lede.cli import main
from lede.cost_model import CostModel
from lede.cost_profile import CostProfile
from lede.evaluation import EvaluateConfig, evaluate
from lede.evaluation_results import Evaluation
from lede.features import FeatureConfig
from lede.off_policy import evaluate_off_policy
from lede.policies import LearnedPolicy, StaticPolicy
from lede.regret import PARTS
from lede.simulation import simulate
from lede.trace_table import TraceTable
from tests.matched_texts import VOCAB_SIZE, random_texts
from tests.planted_costs import PLANTED
from tests.tiny_models import N_LAYERS

BUDGET = 24
CANDIDATES = (1, 2, 4)
FINGERPRINT = {
    "name": "planted",
    "architecture": {"n_layers": N_LAYERS},
    "tokenizer": None,
    "logits": [1.0, 2.0, 4.0],
    "dtype": "float32",
}
SETTINGS = StoreSettings(
    kind="traces",
    model="planted",
    n_layers=N_LAYERS,
    vocab_size=VOCAB_SIZE,
    candidates=CANDIDATES,
    fingerprint=FINGERPRINT,
    max_new_tokens=BUDGET,
)
PROFILE = CostProfile(
    model="planted",
    fingerprint=FINGERPRINT,
    candidates=CANDIDATES,
    contexts=(16,),
    repeats=1,
    device="cpu",
    device_name="imagined",
    threads=1,
    dtype="float32",
    attention="eager",
    versions={},
    measurements=(),
    costs=CostModel(N_LAYERS, (None,) * N_LAYERS, PLANTED),
    residuals={},
)
STATIC = "static:exit_layer=3;draft_length=2"


def texts(seed: int = 0) -> list[PromptTrace]:
    return random_texts(12, BUDGET, N_LAYERS, seed)


def with_branches(trace: PromptTrace) -> PromptTrace:
    """A branch of each wrong draft of layer 2, where the drafter doubts what it says from then on."""
    rows = np.flatnonzero(trace.match[:, 1] == 0)
    shape = (rows.size, 3)
    return replace(
        trace,
        branch_row=rows.astype(np.int32),
        branch_layer=np.full(rows.size, 2, dtype=np.int16),
        branch_length=np.full(rows.size, 3, dtype=np.int16),
        branch_confidence=np.full(shape, 9, dtype=np.float32),
        branch_entropy=np.full(shape, 3, dtype=np.float32),
        branch_top1=np.full(shape, -4, dtype=np.float32),
        branch_top2=np.full(shape, -5, dtype=np.float32),
        branch_token=np.full((*shape, N_LAYERS), -1, dtype=np.int32),
    )


@pytest.fixture
def store() -> TraceStore:
    return TraceStore(SETTINGS, texts())


def learned(
    features: FeatureConfig = FeatureConfig(("entropy", "depth")), limit: float = 2.0, **settings: Any
) -> LearnedPolicy:
    """Exits where the first feature is below the limit; no wrong draft has an entropy below 2."""
    weight = np.zeros((2, len(features.names)))
    weight[1, 0] = -1.0
    return LearnedPolicy.from_network(
        [(weight, np.asarray([0.0, limit]))], features=features, candidates=CANDIDATES, **settings
    )


def evaluated(store: TraceStore, *policies: str, **settings: Any) -> Evaluation:
    return evaluate(EvaluateConfig(policy=policies, traces=Path("memory"), **settings), store, PROFILE)


def test_figures_are_the_simulators(store: TraceStore, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(store, STATIC, "plain", resamples=200)
    table = TraceTable.from_traces(store.prompts, BUDGET, VOCAB_SIZE)
    played = simulate(StaticPolicy(exit_layer=3, draft_length=2), table, PROFILE.costs)
    static, plain = found.policies
    assert static.rate.value == pytest.approx(played.rate)
    assert static.speedup.value == pytest.approx(played.speedup)
    assert static.speedup.lower < static.speedup.value < static.speedup.upper
    assert static.acceptance is not None
    assert static.acceptance.value == pytest.approx(played.acceptance)
    assert static.draft_length == played.draft_length
    assert static.exit_layer == 3
    assert static.head_reads == pytest.approx(played.head_reads.sum() / table.n_decided.sum())
    assert static.speedup_without_branches is None
    assert plain.speedup.value == pytest.approx(1)
    assert plain.acceptance is None
    assert found.plain_rate == pytest.approx(plain.rate.value)
    assert found.candidates == (1, 2, 3, 4)
    told = capsys.readouterr().out
    assert "static:exit_layer=3" in told
    assert f"{played.rate:.1f}" in told


def test_the_split_explains_the_distance_to_the_clairvoyant(store: TraceStore) -> None:
    found = evaluated(store, STATIC, "threshold:candidates=1,2,4", "random:candidates=1,2,4", resamples=50)
    for each in found.policies:
        assert set(each.regret) == set(PARTS)
        assert each.of_clairvoyant.value + sum(each.regret.values()) == pytest.approx(1)
        assert each.of_clairvoyant.value == pytest.approx(each.rate.value / found.clairvoyant.rate)
        assert each.of_clairvoyant.value < 1
    assert found.policies[0].regret["inspection"] == pytest.approx(0, abs=1e-12)


def test_plain_decoding_alone(store: TraceStore) -> None:
    found = evaluated(store, "plain", candidates="all", resamples=50)
    assert found.candidates == (1, 2, 3, 4, 5)
    assert found.policies[0].layer_shares == {0: 1.0}
    lost = {name for name, share in found.policies[0].regret.items() if share > 1e-12}
    assert lost == {"should_draft"}


def test_references_measure_the_others(store: TraceStore) -> None:
    found = evaluated(store, "plain", reference=(STATIC, "plain"), resamples=50)
    plain, static = found.policies
    assert (plain.reference, static.reference) == (True, True)
    best = max(plain.rate.value, static.rate.value)
    assert plain.of_reference is not None
    assert static.of_reference is not None
    assert plain.of_reference.value == pytest.approx(plain.rate.value / best)
    assert static.of_reference.value == pytest.approx(static.rate.value / best)


def test_with_and_without_branches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learned(limit=2.8).save_pretrained(str(tmp_path / "mine" / "policy"))
    traces = TraceStore(replace(SETTINGS, branch_share=1.0, branch_depth=3), [with_branches(t) for t in texts()])
    found = evaluated(traces, str(tmp_path / "mine" / "policy"), STATIC, resamples=50)
    mine, static = found.policies
    assert found.n_branches > 0
    assert mine.name == "mine"
    assert mine.speedup_without_branches is not None
    assert mine.speedup_without_branches.value != mine.speedup.value
    assert static.speedup_without_branches == static.speedup  # it looks at nothing
    assert "without" in capsys.readouterr().out


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StoreWriter.open(tmp_path / "traces.zarr", SETTINGS) as writer:
        for text in texts():
            writer.add(text)
    PROFILE.save(tmp_path / "profile.json")
    command = ["evaluate", "--traces", str(tmp_path / "traces.zarr"), "--profile", str(tmp_path / "profile.json")]
    out = tmp_path / "new" / "results.json"
    assert main([*command, "--policy", STATIC, "--policy", "plain", "--resamples", "50", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert [each["policy"] for each in content["policies"]] == [STATIC, "plain"]
    assert content["clairvoyant"]["speedup"] >= content["policies"][0]["speedup"]["value"]
    assert sum(content["policies"][0]["layer_shares"].values()) == pytest.approx(1)
    told = capsys.readouterr().out
    assert "clairvoyant" in told
    assert max(map(len, told.splitlines())) <= max(80, len(f"written to {out}"))

    other = replace(PROFILE, fingerprint={**FINGERPRINT, "name": "stranger", "logits": [4.0, 2.0, 1.0]})
    other.save(tmp_path / "profile.json")
    assert main([*command, "--policy", "plain"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("lede: error: the profile belongs to model 'stranger', the traces to 'planted'")
    assert told.count("\n") == 1


def test_the_policys_own_profile(tmp_path: Path, store: TraceStore) -> None:
    policy = learned()
    policy.profile = PROFILE
    policy.save_pretrained(str(tmp_path))
    config = EvaluateConfig(policy=(str(tmp_path),), traces=Path("memory"), resamples=50)
    assert evaluate(config, store).policies[0].rate.value > 0
    with pytest.raises(ValueError, match="give a cost profile as --profile"):
        evaluate(replace(config, policy=("plain",)), store)


def test_fitted_q_evaluation(
    store: TraceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def quick(policy: LearnedPolicy, traces: TraceStore, log: Any, config: Any) -> Any:
        seen.append(log)
        return evaluate_off_policy(policy, traces, log, replace(config, steps=20, passes=1))

    monkeypatch.setattr("lede.off_policy.evaluate_off_policy", quick)
    learned().save_pretrained(str(tmp_path / "text"))
    learned(FeatureConfig(("entropy", "acceptance"))).save_pretrained(str(tmp_path / "rounds"))
    given = str(tmp_path / "text"), str(tmp_path / "rounds"), "plain"
    found = evaluated(store, *given, fqe=True, resamples=50)
    fit = found.policies[0].off_policy
    assert fit is not None
    assert [each.off_policy for each in found.policies[1:]] == [None, None]
    assert found.to_json()["policies"][0]["off_policy"]["distance"] == fit.estimate - fit.truth
    assert len(found.notes) == 1
    assert "acceptance" in found.notes[0]
    assert f"{fit.truth:.3f}" in capsys.readouterr().out

    log = synthesize(store, candidates=CANDIDATES, features=FeatureConfig(("entropy", "depth")))
    with StoreWriter.open(tmp_path / "log.zarr", log.settings) as writer:
        for rollout in log:
            writer.add(rollout)
    assert evaluated(store, given[0], fqe=True, log=tmp_path / "log.zarr").policies[0].off_policy is not None
    assert seen[-1].n_rows == log.n_rows
    with pytest.raises(ValueError, match="acceptance"):
        evaluated(store, given[1], fqe=True)
    with pytest.raises(ValueError, match="none was given"):
        evaluated(store, "plain", fqe=True)


def test_fitted_q_evaluation_needs_d3rlpy(
    tmp_path: Path, store: TraceStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise ImportError("no d3rlpy", name="d3rlpy")

    monkeypatch.setattr("lede.quiet_d3rlpy.import_d3rlpy", missing)
    with StoreWriter.open(tmp_path / "traces.zarr", SETTINGS) as writer:
        for text in store:
            writer.add(text)
    PROFILE.save(tmp_path / "profile.json")
    command = ["evaluate", "--traces", str(tmp_path / "traces.zarr"), "--profile", str(tmp_path / "profile.json")]
    assert main([*command, "--policy", "plain", "--fqe"]) == 2
    assert "pip install 'lede-rl[train]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": ("static:exit_layer=6",)}, "exit layer 6 is outside 1..5"),
        ({"policy": ("plain",), "candidates": "7"}, "7"),
        ({"policy": ("nobody",)}, "neither a folder nor one of"),
        ({"policy": ("swift",)}, "the swift policy drafts with gaps; traces know exits alone"),
        ({"policy": ("conflayers",)}, "the conflayers policy drafts with gaps"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str, store: TraceStore) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(EvaluateConfig(traces=Path("memory"), **settings), store, PROFILE)


def test_a_profile_of_other_depth_is_refused(store: TraceStore) -> None:
    deeper = replace(PROFILE, costs=CostModel(N_LAYERS + 1, (None,) * (N_LAYERS + 1), PLANTED))
    with pytest.raises(ValueError, match="with 7 layers, the traces are of 'planted' with 6"):
        evaluate(EvaluateConfig(policy=("plain",), traces=Path("memory")), store, deeper)


def test_a_policy_of_another_model_is_refused(store: TraceStore, tmp_path: Path) -> None:
    learned(fingerprint={**FINGERPRINT, "name": "stranger", "logits": [4.0, 2.0, 1.0]}).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="belongs to model 'stranger', the traces to 'planted'"):
        evaluated(store, str(tmp_path))


def test_confidence_in_another_number_of_tokens_is_refused(store: TraceStore, tmp_path: Path) -> None:
    learned(FeatureConfig(("confidence",), top_k=3)).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="top_k 3, the traces hold it with 5"):
        evaluated(store, str(tmp_path))


def test_transitions_are_no_traces(store: TraceStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = synthesize(store)
    with StoreWriter.open(tmp_path / "log.zarr", log.settings) as writer:
        for rollout in log:
            writer.add(rollout)
    PROFILE.save(tmp_path / "profile.json")
    given = ["--traces", str(tmp_path / "log.zarr"), "--profile", str(tmp_path / "profile.json"), "--policy", "plain"]
    assert main(["evaluate", *given]) == 2
    assert "holds transitions; an evaluation needs traces" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": ()}, "at least one policy"),
        ({"resamples": 0}, "resamples must be positive"),
        ({"log": Path("log")}, "give --fqe as well"),
    ],
)
def test_useless_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluateConfig(**{"policy": ("plain",), "traces": Path("t"), **settings})
