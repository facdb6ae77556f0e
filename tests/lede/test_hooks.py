"""What a policy that learns while decoding is told, in which order, and how it is booked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lede.decoding import Decoder
from lede.generation import generate
from lede.models import EarlyExitModel
from lede.policies import (
    ExitAt,
    LayerState,
    Policy,
    PreScan,
    PreScanState,
    RandomPolicy,
    RoundReport,
    Shadow,
    SkipSublayers,
)
from lede.shadow import ShadowReader
from lede.statistics import Meter
from lede.text_probe import TextProbe
from lede.verification import Chooser, TorchSource, Warp
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, plain_generate, prompt, tiny_model

LAYERS = (5, 1, 3)
PLANS: tuple[PreScan | ExitAt | SkipSublayers, ...] = (
    ExitAt(3),
    SkipSublayers(frozenset({3}), frozenset({4})),
    PreScan.SKIP,
    SkipSublayers(frozenset({2, 4}), frozenset({2, 3, 5})),
    ExitAt(5),
    PreScan.SCAN,
)


class Curious(Policy):
    """Goes through plans of every kind, writes down all that it is told, and asks for shadow tokens."""

    kind = "curious"

    def __init__(self, layers: tuple[int, ...] = LAYERS, **settings: Any) -> None:
        super().__init__(candidates=(2, 4), **settings)
        self.layers = layers
        self.events: list[str] = []
        self.plans: list[object] = []
        self.reports: list[RoundReport] = []

    @property
    def shadow_layers(self) -> tuple[int, ...]:
        return self.layers

    @property
    def searches(self) -> bool:
        return len(self.reports) % 2 == 1

    def begin(self, n_prompt_tokens: int) -> None:
        self.events.append(f"begin {n_prompt_tokens}")

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt | SkipSublayers:
        self.events.append("pre_scan")
        self.plans.append(PLANS[len(self.plans) % len(PLANS)])
        return self.plans[-1]  # type: ignore[return-value]

    def scan(self, state: LayerState) -> bool:
        return state.layer == 4

    def draft(self, state: LayerState) -> bool:
        return state.n_drafted < 3

    def verified(self, report: RoundReport) -> None:
        self.events.append("verified")
        self.reports.append(report)

    def between_rounds(self, probe: TextProbe) -> None:
        self.events.append(f"between {probe.n_prompt}+{probe.n_new}")


def lens(model: EarlyExitModel, ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Probabilities `(layer, position, vocabulary)` of a plain forward pass of transformers, read at some layers."""
    stack = getattr(model.hf_model, model.family.decoder)
    norm, head = getattr(stack, model.family.norm), model.hf_model.get_output_embeddings()
    with torch.inference_mode():
        states = model.hf_model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.stack([head(norm(states[layer][0])) for layer in layers]).softmax(-1)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_shadow_tokens_are_those_of_a_plain_forward_pass(family: str) -> None:
    """Whatever drafted, or nothing did; at every position whose prefix is the text and at no other."""
    model, ids, policy = tiny_model(family), prompt(0, 12), Curious()
    out = generate(model, input_ids=ids, policy=policy, max_new_tokens=70)
    text = out.sequences[0].tolist()
    assert text[12:] == plain_generate(model, ids, 70)
    p = lens(model, text, LAYERS).numpy()
    at, kinds = 12, set()
    for report, done in zip(policy.reports, out.rounds, strict=True):
        shadow = report.shadow
        assert shadow is not None
        assert shadow.layers == LAYERS
        assert shadow.targets.tolist() == list(done.tokens) == text[at + 1 : at + 1 + len(done.tokens)]
        here = p[:, at : at + len(done.tokens)]
        assert shadow.tokens.tolist() == here.argmax(-1).tolist()
        np.testing.assert_allclose(shadow.probabilities, here.max(-1), rtol=1e-5)
        assert shadow.tokens.dtype == np.int64
        assert shadow.probabilities.dtype == np.float32
        kinds.add((type(report.plan).__name__, report.accepted < report.drafted))
        at += len(done.tokens)
    every = {("ExitAt", True), ("ExitAt", False), ("SkipSublayers", True), ("SkipSublayers", False)}
    assert kinds >= every | {("NoneType", False)}, kinds


@pytest.mark.parametrize("end", [None, 9])
def test_reports_are_the_rounds(end: int | None) -> None:
    model, ids, policy = tiny_model("llama"), prompt(0, 12), Curious()
    eos = [] if end is None else [plain_generate(model, ids, 20)[end]]
    out = generate(model, input_ids=ids, policy=policy, max_new_tokens=30, eos_token_id=eos)
    plans = iter(policy.plans)
    for report, done in zip(policy.reports, out.rounds, strict=True):
        assert (report.drafted, report.accepted) == (done.drafted, done.accepted)
        asked = next(plans, PreScan.SKIP)  # nobody is asked before the last token of the budget
        wanted = ExitAt(4) if asked is PreScan.SCAN else None if asked is PreScan.SKIP else asked
        assert report.plan == wanted
    n_positions = sum(len(done.tokens) for done in out.rounds)
    assert out.stats.head_reads == out.stats.drafted + len(LAYERS) * n_positions


def test_a_draft_that_could_not_be_longer_is_reported_as_such() -> None:
    """Up to the cap, up to what the budget leaves, or up to a token that ends the text, accepted or not."""
    model, ids = tiny_model("llama"), prompt(0, 12)
    for max_draft in (2, 12):
        policy, left = Curious(layers=(), max_draft=max_draft), 29
        out = generate(model, input_ids=ids, policy=policy, max_new_tokens=30)
        for report, done in zip(policy.reports, out.rounds, strict=True):
            assert report.capped == (report.drafted > 0 and report.drafted == min(max_draft, left - 1))
            left -= len(done.tokens)
        assert {report.capped for report in policy.reports} == {True, False}
    first = plain_generate(model, ids, 1)
    end = int(lens(model, [*ids, *first], (3,))[0, -1].argmax())  # what the first plan drafts first
    assert end != first[0]
    policy = Curious(layers=())
    generate(model, input_ids=ids, policy=policy, max_new_tokens=30, eos_token_id=[end])
    assert (policy.reports[0].drafted, policy.reports[0].capped) == (1, True)


def test_order_of_events() -> None:
    """`begin` once a text, `verified` after every round, `between_rounds` only between rounds and while searching."""
    model, policy = tiny_model("llama"), Curious(layers=())
    for length in (5, 9):
        policy.events.clear()
        policy.reports.clear()
        out = generate(model, input_ids=prompt(0, length), policy=policy, max_new_tokens=16)
        n_new, wanted, left = 1, [f"begin {length}"], 15
        for i, done in enumerate(out.rounds):
            wanted += ["pre_scan"] if left > 1 else []
            wanted += ["verified"]
            n_new, left = n_new + len(done.tokens), left - len(done.tokens)
            wanted += [f"between {length}+{n_new}"] if i % 2 == 0 and left else []
        assert policy.events == wanted
        assert any(event.startswith("between") for event in wanted)


def test_searching_is_booked_as_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes in `between_rounds`, in `verified` and in reading shadow tokens, and nowhere else."""
    clock = [0.0]
    monkeypatch.setattr("lede.statistics.time.perf_counter", lambda: clock[0])

    def read(self: ShadowReader, tokens: Sequence[int]) -> Shadow:
        clock[0] += 1
        return look(self, tokens)

    look = ShadowReader.read
    monkeypatch.setattr(ShadowReader, "read", read)

    class Slow(Curious):
        def between_rounds(self, probe: TextProbe) -> None:
            super().between_rounds(probe)
            assert probe.matchness(PLANS[1], 0, 1) in (0.0, 1.0)  # type: ignore[arg-type]
            clock[0] += 100

        def verified(self, report: RoundReport) -> None:
            super().verified(report)
            clock[0] += 10_000

    policy = Slow()
    out = generate(tiny_model("llama"), input_ids=prompt(0, 12), policy=policy, max_new_tokens=30)
    searches = sum(event.startswith("between") for event in policy.events)
    assert searches > 0
    assert out.stats.seconds.search == 100 * searches + len(out.rounds)
    assert out.stats.seconds.policy == 10_000 * len(out.rounds)
    assert out.stats.seconds.draft == out.stats.seconds.inspect == out.stats.seconds.verify == 0


def test_the_probe_sees_the_text_and_a_full_cache() -> None:
    model, ids = tiny_model("gemma3_text"), prompt(0, 12)

    class Looking(Curious):
        def between_rounds(self, probe: TextProbe) -> None:
            super().between_rounds(probe)
            assert decoder.cache.lengths == [probe.n_prompt + probe.n_new - 1] * N_LAYERS
            confidence = probe.sublayer_confidence(min(16, probe.n_prompt + probe.n_new - 1), "head", 4)
            assert confidence.shape == (N_LAYERS, 2)
            probe.matchness(PLANS[1], 0, probe.n_new - 1)  # type: ignore[arg-type]

    decoder = Decoder(model, Looking(), Chooser(Warp(), TorchSource(torch.Generator())), meter=Meter())
    text = [token for tokens in decoder.decode(ids, 60) for token in tokens]
    assert text == plain_generate(model, ids, 60)


@pytest.mark.parametrize(
    ("layers", "message"), [((0,), "exit layer 0 is outside"), ((6,), "exit layer 6"), ((2, 2), "must be distinct")]
)
def test_shadow_layers_outside_the_model_are_refused(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(tiny_model("llama"), input_ids=prompt(0, 5), policy=Curious(layers=layers), max_new_tokens=4)


def test_a_policy_that_learns_nothing_has_no_state() -> None:
    policy = RandomPolicy()
    assert policy.state() == {}
    policy.restore({})
    with pytest.raises(ValueError, match="a random policy learns nothing while decoding, got sets"):
        policy.restore({"sets": []})
