"""Cost profiles under a clock that only planted costs move: the fit finds them, and rounds of the real loop add up."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lede.cache import KVCache
from lede.cli import main
from lede.cost_measurement import fitting
from lede.cost_model import Ending
from lede.cost_profile import CostProfile
from lede.decoding import Decoder
from lede.drafting import Draft, Drafter
from lede.features import DEFAULT_FEATURES, WALL_CLOCK_FEATURES, FeatureConfig
from lede.lookup import LookupIndex
from lede.models import EarlyExitModel
from lede.observer import Observer
from lede.policies import LearnedPolicy, Policy, StaticPolicy
from lede.policies.base import ExitAt, LayerState, Plan, PreScan, PreScanState
from lede.profiling import ProfileConfig, profile
from lede.verification import Chooser, TorchSource, Warp
from tests.planted_costs import PLANTED, Clock, head_cost, layers_cost, planted_model, reading_cost
from tests.tiny_models import N_LAYERS, plain_generate, prompt, tiny_model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Every operation of a round takes its planted cost."""
    clock = Clock()
    monkeypatch.setattr("lede.cost_measurement.perf_counter", clock)
    clock.charge(EarlyExitModel, "run_layers", layers_cost, monkeypatch)
    clock.charge(EarlyExitModel, "head", head_cost, monkeypatch)
    clock.charge(EarlyExitModel, "embed", lambda *_: PLANTED.embed, monkeypatch)
    clock.charge(LearnedPolicy, "scan", lambda *_: PLANTED.policy, monkeypatch)
    clock.charge(LearnedPolicy, "draft", lambda *_: PLANTED.policy, monkeypatch)
    before = lambda policy, _: PLANTED.policy if policy.decides_pre_scan else 0.0  # noqa: E731
    clock.charge(LearnedPolicy, "pre_scan", before, monkeypatch)
    clock.charge(Chooser, "choose", lambda *_: PLANTED.choose, monkeypatch)
    accept = lambda _, logits, *rest: PLANTED.accept + (len(logits) - 1) * PLANTED.accept_token  # noqa: E731
    clock.charge(Chooser, "verify", accept, monkeypatch)
    clock.charge(LookupIndex, "extend", lambda *_: PLANTED.index, monkeypatch)
    clock.charge(LookupIndex, "propose", lambda *_: PLANTED.propose, monkeypatch)
    clock.charge(Observer, "read", reading_cost, monkeypatch)
    clock.charge(Observer, "token", lambda *_: PLANTED.choose, monkeypatch)
    for stage in ("before_scan", "in_scan", "in_draft"):
        clock.charge(Observer, stage, lambda *_: PLANTED.observe, monkeypatch)
    return clock


_PROFILED: dict[tuple[str, str | None], CostProfile] = {}


def profiled(tmp_path: Path, family: str = "llama", candidates: str | None = None) -> CostProfile:
    """A profile under the clock, which gives the same one every time, so each is made once."""
    if (family, candidates) not in _PROFILED:
        config = ProfileConfig(out=tmp_path / "profile.json", contexts="4,24", repeats=2, candidates=candidates)
        _PROFILED[family, candidates] = profile(config, tiny_model(family, torch.float32))
        assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
        assert CostProfile.load(config.out) == _PROFILED[family, candidates]
    return _PROFILED[family, candidates]


@cache
def plain_text(seed: int) -> tuple[list[int], list[int]]:
    """A prompt, and 40 tokens of plain decoding behind it."""
    ids = prompt(seed, 6)
    return ids, plain_generate(tiny_model("llama"), ids, 40)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_the_fit_recovers_planted_costs(family: str, clock: Clock, tmp_path: Path) -> None:
    found = profiled(tmp_path, family)
    assert asdict(found.costs.costs) == pytest.approx(asdict(PLANTED), rel=1e-6)
    assert max(found.residuals.values()) < 1e-9
    assert all(m.lower == pytest.approx(m.seconds) == pytest.approx(m.upper) for m in found.measurements)


def test_everything_is_measured(clock: Clock, tmp_path: Path) -> None:
    found = profiled(tmp_path, candidates="2,4")
    spans = {(m.first, m.last, m.context) for m in found.of_kind("layers")}
    for context in (4, 24):
        assert {(0, 1, context), (5, 6, context), (0, 2, context), (0, 4, context), (0, 6, context)} <= spans
        verified = {(m.first, m.q) for m in found.of_kind("verify") if m.context == context}
        assert verified == {(layer, q) for layer in (0, 4) for q in range(1, 18)}
    assert [m.q for m in found.of_kind("head")] == list(range(1, 18))
    assert all(found.of_kind(kind) for kind in ("embed", "observe", "policy", "choose", "accept", "index", "propose"))
    assert all(found.of_kind(kind) for kind in ("features", "features_entropy", "features_top_k"))


def test_derived_facts(clock: Clock, tmp_path: Path) -> None:
    found = profiled(tmp_path, candidates="2,4")
    c, model = PLANTED, planted_model()
    plain = c.embed + c.span + 6 * (c.layer + 4 * c.layer_context) + c.head + c.accept
    draft = c.embed + c.span + 2 * (c.layer + 4 * c.layer_context) + c.head + c.choose
    assert found.head_over_layer() == pytest.approx(c.head / (c.span + c.layer + 4 * c.layer_context))
    assert found.draft_share(2) == pytest.approx(draft / plain)
    asked = draft + c.observe + c.features + c.policy - c.choose  # what is read off the logits tells the token
    assert found.draft_share(2, FeatureConfig(("surprisal", "trace"))) == pytest.approx(asked / plain)
    ratios = found.verification_ratios(24)
    assert ratios[7] == pytest.approx(model.verify_seconds(4, 7, 24) / model.verify_seconds(4, 1, 24))
    rate = found.break_even(2)
    assert rate is not None
    assert sum(rate**i for i in range(5)) * plain == pytest.approx(
        model.round_seconds(4, (), 2, 4, features=None), rel=1e-6
    )
    dear = replace(found, costs=replace(found.costs, costs=replace(PLANTED, choose=1.0)))
    assert dear.break_even(2) is None
    with pytest.raises(ValueError, match="context 5 was not measured; 4, 24 were"):
        found.verification_ratios(5)


class Recorder(Drafter):
    """Keeps the plan and the draft of the last round."""

    last: tuple[Plan, Draft] | None = None

    def draft(self, ids: list[int], choice: Plan, cap: int, cache: KVCache) -> Draft:
        draft = super().draft(ids, choice, cap, cache)
        self.__class__.last = choice, draft
        return draft


class Recorded(Decoder):
    drafter_class = Recorder


class Chancy(LearnedPolicy):
    """Asks its network and then decides by luck."""

    kind = "chancy"
    luck = np.random.default_rng(3)

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt:
        super().pre_scan(state)
        blind = [ExitAt(layer) for layer in self.config.candidates or ()]
        plans: list[PreScan | ExitAt] = [PreScan.SKIP, PreScan.SCAN, *blind]
        return plans[int(self.luck.integers(len(plans)))] if self.decides_pre_scan else PreScan.SCAN

    def scan(self, state: LayerState) -> bool:
        super().scan(state)
        return bool(self.luck.random() < 0.4)

    def draft(self, state: LayerState) -> bool:
        super().draft(state)
        return bool(self.luck.random() < 0.7)


def rounds_of(policy: Policy | None, clock: Clock, seed: int) -> set[str]:
    """Decode, compare each round's time on the clock with the model's, and return the plans and endings met."""
    model, cost = tiny_model("llama"), planted_model()
    ids, text = plain_text(seed)
    eos = frozenset(text[30:31])
    decoder = Recorded(model, policy, Chooser(Warp(), TorchSource(torch.Generator())), eos)
    budget, done, began = 40, 0, 0.0
    met: set[str] = set()
    for tokens in decoder.decode(ids, budget):
        cap = min(policy.config.max_draft, budget - done - 1) if done and policy is not None else 0
        if done and (cap <= 0 or policy is None):
            assert clock.now - began == pytest.approx(cost.round_seconds(len(ids) - 1 + done), rel=1e-9)
            met.add("plain")
        elif done:
            assert policy is not None
            assert Recorder.last is not None
            (plan, draft), candidates = Recorder.last, policy.candidates_for(N_LAYERS)
            arguments: dict[str, Any] = {
                "features": policy.features,
                "pre_scan": policy.decides_pre_scan,
                "lowest": candidates[0],
            }
            name = "skip" if plan is PreScan.SKIP else "blind" if isinstance(plan, ExitAt) else "scan"
            if plan is PreScan.SCAN:
                arguments["scanned"] = [layer for layer in candidates if layer <= draft.exit_layer]
            if draft.tokens:
                ending: Ending = "stop" if len(draft.tokens) < cap else "cap"
                ending = "eos" if draft.tokens[-1] in eos else ending
                arguments.update(exit_layer=draft.exit_layer, n_drafted=len(draft.tokens), ending=ending)
                name += f", {ending}"
            assert clock.now - began == pytest.approx(cost.round_seconds(len(ids) - 1 + done, **arguments), rel=1e-9)
            met.add(name)
        done += len(tokens)
        began = clock.now
    return met


@pytest.mark.parametrize(
    ("names", "settings", "plans"),
    [
        (DEFAULT_FEATURES, {}, 0),
        (("surprisal",), {}, 0),
        (WALL_CLOCK_FEATURES, {}, 0),
        (WALL_CLOCK_FEATURES, {}, 3),
        ((*WALL_CLOCK_FEATURES, "confidence"), {"draft_agreement": True}, 3),
        (("confidence", "agreement"), {"draft_agreement": True, "top_k": 1}, 0),
    ],
    ids=["default", "top 1", "wall clock", "with plans", "everything", "agreement"],
)
def test_rounds_of_the_real_loop_add_up(
    names: tuple[str, ...], settings: dict[str, Any], plans: int, clock: Clock
) -> None:
    network = [(np.zeros((2 + plans, len(names))), np.zeros(2 + plans))]
    features = FeatureConfig(names, **settings)
    met: set[str] = set()
    for seed in range(12):
        policy = Chancy.from_network(network, features=features, candidates=(1, 2, 4), max_draft=4)
        met |= rounds_of(policy, clock, seed)
    assert met >= {"scan, stop", "scan, cap", "scan"}
    assert any("eos" in name for name in met)
    assert met >= {"skip", "blind, stop", "blind, cap"} if plans else met.isdisjoint({"skip", "blind, stop"})


def test_rounds_without_observations_add_up(clock: Clock) -> None:
    met: set[str] = set()
    for seed in range(8):
        for length in (2, 4):
            met |= rounds_of(StaticPolicy(exit_layer=2, draft_length=length, max_draft=4), clock, seed)
        assert rounds_of(None, clock, seed) == {"plain"}
    assert met >= {"blind, stop", "blind, cap", "blind, eos"}


def test_round_trip(clock: Clock, tmp_path: Path) -> None:
    found = profiled(tmp_path, "gemma3_text")
    assert CostProfile.from_json(json.loads(json.dumps(found.to_json()))) == found
    found.save(tmp_path / "profile.json")
    assert CostProfile.load(tmp_path / "profile.json") == found
    assert (found.dtype, found.device, found.contexts) == ("float32", "cpu", (4, 24))
    assert found.fingerprint["architecture"]["n_layers"] == N_LAYERS
    assert found.versions["torch"]
    assert found.device_name


def test_damaged_files_are_refused_by_name(clock: Clock, tmp_path: Path) -> None:
    content = profiled(tmp_path).to_json()
    path = tmp_path / "profile.json"
    spoiled: list[tuple[object, str]] = [
        ([], "no cost profile"),
        ({"schema_version": 99}, "schema version 99, wanted 2"),
        ({name: value for name, value in content.items() if name != "costs"}, "damaged: 'costs'"),
        ({**content, "measurements": [{"kind": "head"}]}, "damaged"),
    ]
    for wrong, message in spoiled:
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message) as refused:
            CostProfile.load(path)
        assert str(path) in str(refused.value)
    path.write_text("{")
    with pytest.raises(ValueError, match="cannot read"):
        CostProfile.load(path)


def test_contexts_beyond_the_positions_are_left_out(
    clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fitting((8, 239, 240), tiny_model("llama")) == (8, 239)
    config = ProfileConfig(out=tmp_path / "profile.json", contexts="8,4096", repeats=1)
    assert profile(config, tiny_model("llama", torch.float32)).contexts == (8,)
    assert "left out, beyond the model's 256 positions: 4096" in capsys.readouterr().out


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "new" / "profile.json"
    assert main(["profile", "--contexts", "16,48", "--candidates", "2,8", "--repeats", "1", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80 or str(out) in max(told.splitlines(), key=len)
    for part in ("head read / layer", "verify(q) / verify(1)", "break-even", "full pass, q = 17", "behind 48"):
        assert part in told
    found = CostProfile.load(out)
    assert (found.model, found.candidates, found.contexts) == ("demo", (2, 8), (16, 48))
    assert found.costs.plain_seconds(16) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "12,many"], "contexts '12,many' must be positive numbers"),
        (["--contexts", "0,8"], "contexts '0,8' must be positive numbers"),
        (["--contexts", "99999"], "no context of 99999 fits; the model has room for 4079 tokens"),
        (["--repeats", "0"], "repeats must be at least 1, got 0"),
        (["--candidates", "2,99"], "99"),
        (["--model", "no/such/folder"], "cannot load model 'no/such/folder'"),
        (["--out", "."], "is a folder"),
    ],
)
def test_user_errors_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["profile", "--out", "profile.json", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
    assert told.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
