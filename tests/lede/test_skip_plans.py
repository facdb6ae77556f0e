"""Drafts with gaps: the text is the plain model's, and every layer runs as often as the design says."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from lede.decoding import Decoder
from lede.features import FeatureConfig
from lede.generation import generate
from lede.models import EarlyExitModel, load_model
from lede.policies import ExitAt, LayerState, Policy, PreScan, PreScanState, RandomPolicy, RoundReport, SkipSublayers
from lede.sublayers import ATTENTION, MLP
from lede.verification import Chooser, TorchSource, Warp
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, plain_generate, prompt, tiny_hf_model, tiny_model

BUDGETS = (1, 2, 3, 48)
PROMPTS = ((0, 5), (1, 17))  # (seed, length); with windows of 8, one starts inside the window and one beyond it
SEEDS = {"gemma3_text": 7, "mistral": 7}  # with others, texts collapse onto few tokens or agree too often
INNER = tuple(range(2, N_LAYERS))


def model_of(family: str) -> EarlyExitModel:
    return tiny_model(family, seed=SEEDS.get(family, 0))


@cache
def reference(family: str, seed: int, length: int) -> list[int]:
    return plain_generate(model_of(family), prompt(seed, length), max(BUDGETS))


class Gaps(Policy):
    """Draws a plan in every round: skip, exit at a layer or leave few sublayers out; stops by luck or by surprisal."""

    kind = "gaps"

    def __init__(self, seed: int = 0, looks: bool = False, exits: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        self.luck = np.random.default_rng(seed)
        self.looks = looks
        self.exits = exits
        self.reports: list[RoundReport] = []
        self.asked: list[LayerState] = []

    @property
    def features(self) -> FeatureConfig | None:
        return FeatureConfig(("surprisal", "trace", "survival", "drafted")) if self.looks else None

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt | SkipSublayers:
        luck = self.luck.random()
        if self.exits and luck < 0.3:
            return PreScan.SKIP if luck < 0.1 else ExitAt(int(self.luck.integers(1, N_LAYERS)))
        n = int(self.luck.integers(1, 5))
        left_out = self.luck.choice(2 * len(INNER), n, replace=False).tolist()
        places = [(INNER[i // 2], i % 2) for i in left_out]
        return SkipSublayers(*(frozenset(layer for layer, k in places if k == kind) for kind in (ATTENTION, MLP)))

    def scan(self, state: LayerState) -> bool:
        raise AssertionError("no plan of this policy scans")

    def draft(self, state: LayerState) -> bool:
        self.asked.append(state)
        return bool(state.observation[0] < 4.845) if self.looks else bool(self.luck.random() < 0.8)

    def verified(self, report: RoundReport) -> None:
        self.reports.append(report)


def policies() -> list[Policy]:
    gaps: list[Policy] = [Gaps(seed) for seed in range(3)]
    luck: dict[str, Any] = {"gap_probability": 0.5, "blind_probability": 0.1}
    random = [RandomPolicy(seed=0, **luck), RandomPolicy(seed=1, max_draft=1, **luck)]
    return [*gaps, Gaps(3, looks=True), Gaps(4, exits=False, max_draft=1), *random]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_text_is_the_plain_models(family: str) -> None:
    model = model_of(family)
    seen: Counter[str] = Counter()
    for seed, length in PROMPTS:
        ids, wanted = prompt(seed, length), reference(family, seed, length)
        for policy in policies():
            for budget in BUDGETS:
                out = generate(model, input_ids=ids, policy=policy, max_new_tokens=budget)
                assert out.sequences[0, length:].tolist() == wanted[:budget]
                for r in out.rounds:
                    gaps = bool(r.skipped)
                    assert not (gaps and r.exit_layer), r
                    seen["exit"] += r.exit_layer is not None
                    seen["plain pass"] += not r.drafted
                    seen["rejected at once"] += gaps and r.accepted == 0
                    seen["mid-block rejection"] += gaps and 0 < r.accepted < r.drafted
                    seen["all accepted"] += gaps and r.accepted == r.drafted
                    seen["long"] += gaps and r.drafted > 3
    events = ("exit", "plain pass", "rejected at once", "mid-block rejection", "all accepted", "long")
    assert all(seen[event] for event in events), seen


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_after_every_round_keys_and_values_are_those_of_a_fresh_prefill(family: str) -> None:
    model = model_of(family)
    for seed, length in PROMPTS:
        ids = prompt(seed, length)
        decoder = Decoder(model, Gaps(seed), Chooser(Warp(), TorchSource(torch.Generator())))
        for tokens in decoder.decode(list(ids), 40):
            ids += tokens
            fresh = decoder.prefill(ids[:-1]).cache
            assert decoder.cache.lengths == fresh.lengths
            for found, wanted in ((decoder.cache.keys, fresh.keys), (decoder.cache.values, fresh.values)):
                for one, other in zip(found, wanted, strict=True):
                    assert one is not None
                    assert other is not None
                    torch.testing.assert_close(one[:, :, : len(ids) - 1], other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_sublayer_runs_as_often_as_it_must(family: str) -> None:
    """Before the first gap once a position; behind it once in verification and, if kept, once a drafted position."""
    hf_model = tiny_hf_model(family)
    model = load_model((hf_model, None))
    passed: Counter[tuple[int, int]] = Counter()  # tokens by layer from 1 and sublayer
    for i, layer in enumerate(model._layers):
        for kind, names in enumerate((model.family.attention, model.family.mlp)):

            def count(_: Any, __: Any, out: Any, key: tuple[int, int] = (i + 1, kind)) -> None:
                passed[key] += (out[0] if isinstance(out, tuple) else out).shape[1]

            assert names is not None
            layer.get_submodule(names.module).register_forward_hook(count)

    class Counting(Gaps):
        def pre_scan(self, state: PreScanState) -> PreScan | ExitAt | SkipSublayers:
            passed.clear()
            return super().pre_scan(state)

        def verified(self, report: RoundReport) -> None:
            super().verified(report)
            plan = report.plan
            if isinstance(plan, SkipSublayers):
                for layer in range(1, N_LAYERS + 1):
                    for kind, left_out in enumerate((plan.attention, plan.mlp)):
                        in_draft = report.drafted if layer > plan.prefix and layer not in left_out else 0
                        assert passed[layer, kind] == report.drafted + 1 + in_draft

    policy = Counting(0)
    generate(model, input_ids=prompt(0, 5), policy=policy, max_new_tokens=60)
    assert sum(isinstance(report.plan, SkipSublayers) for report in policy.reports) > 5


def likeliest(model: EarlyExitModel, ids: list[int], plan: SkipSublayers) -> float:
    """Probability of the likeliest token behind a text that is drafted at once, by the last position."""
    with torch.inference_mode():
        cache = model.new_cache(len(ids))
        block = model.block(cache, 0, len(ids) - 1)
        model.run_layers(model.embed(torch.tensor([ids[:-1]]), block), 0, N_LAYERS, block)
        block = model.block(cache, len(ids) - 1, 1)
        hidden = model.run_layers(model.embed(torch.tensor([ids[-1:]]), block), 0, plan.prefix, block)
        return float(model.head(model.run_skipping(hidden, plan, block))[0, -1].softmax(-1).max())


def test_decisions_look_at_the_last_drafted_position() -> None:
    """Asked before every token but the first, behind the stack with gaps, with the reading that drafted the last."""
    policy = Gaps(5, looks=True, exits=False, max_draft=4)
    out = generate(model_of("llama"), input_ids=prompt(0, 5), policy=policy, max_new_tokens=40)
    states, left, text = iter(policy.asked), 39, out.sequences[0].tolist()
    n_compared = 0
    for report, done in zip(policy.reports, out.rounds, strict=True):
        assert report.capped == (report.drafted > 0 and report.drafted == min(4, left - 1))
        n_asked = report.drafted - report.capped  # at the cap nobody is asked
        asked = [next(states) for _ in range(n_asked)]
        prefix = text[: len(text) - left]
        left -= len(done.tokens)
        if not report.drafted:
            continue
        assert [state.n_drafted for state in asked] == list(range(1, n_asked + 1))
        assert {state.layer for state in asked} <= {N_LAYERS}
        seen = [float(np.exp(-state.observation[0])) for state in asked]
        survival = np.cumprod(seen)  # of all drafted so far, the last included
        assert [float(state.observation[2]) for state in asked] == pytest.approx(survival.tolist(), rel=1e-5)
        if seen:  # the first drafted position follows the text itself
            assert isinstance(report.plan, SkipSublayers)
            assert seen[0] == pytest.approx(likeliest(model_of("llama"), prefix, report.plan), rel=1e-5)
            n_compared += 1
    assert next(states, None) is None
    assert n_compared > 5
    assert len({r.drafted for r in out.rounds}) > 2


class Fixed(Gaps):
    """One plan for good, drafting up to the cap."""

    def __init__(self, plan: SkipSublayers, **settings: Any) -> None:
        super().__init__(**settings)
        self.plan = plan

    def pre_scan(self, state: PreScanState) -> SkipSublayers:
        return self.plan

    def draft(self, state: LayerState) -> bool:
        return True


def model_with_an_idle_layer(layer: int) -> EarlyExitModel:
    """Without this layer the model says the same: every draft without it is right."""
    hf_model = tiny_hf_model("llama")
    idle = hf_model.model.layers[layer - 1]
    with torch.no_grad():
        idle.self_attn.o_proj.weight.zero_()
        idle.mlp.down_proj.weight.zero_()
    return load_model((hf_model, None))


IDLE = SkipSublayers(frozenset({3}), frozenset({3}))


@pytest.mark.parametrize("position", range(1, 8))
def test_end_of_sequence_at_each_position_of_an_accepted_block(position: int) -> None:
    """Six drafted tokens and the bonus; what stands before and after the EOS would be accepted as well."""
    model = model_with_an_idle_layer(3)
    texts = ((ids, plain_generate(model, ids, 8)) for ids in (prompt(seed, 9) for seed in range(30)))
    ids, wanted = next((i, text) for i, text in texts if text[position] not in text[:position])
    out = generate(
        model, input_ids=ids, policy=Fixed(IDLE, max_draft=6), max_new_tokens=64, eos_token_id=wanted[position]
    )
    assert out.sequences[0, len(ids) :].tolist() == wanted[: position + 1]
    assert [(r.drafted, r.accepted) for r in out.rounds] == [(min(position, 6), min(position, 6))]
    assert out.finish_reason == "eos"


def test_figures_of_drafts_with_gaps() -> None:
    """An idle layer left out: all accepted, one head read a drafted token, 2 of 12 sublayers skipped."""
    model = model_with_an_idle_layer(3)
    out = generate(model, input_ids=prompt(2, 9), policy=Fixed(IDLE, max_draft=4), max_new_tokens=51)
    assert out.sequences[0, 9:].tolist() == plain_generate(model, prompt(2, 9), 51)
    stats = out.stats
    assert (stats.acceptance_rate, stats.mean_draft_length, stats.rounds) == (1.0, 4.0, 10)
    assert stats.mean_exit_layer is None
    assert stats.mean_skipped_share == pytest.approx(2 / 12)
    assert stats.head_reads == stats.drafted == 40
    assert {(r.skipped, r.exit_layer) for r in out.rounds} == {(2, None)}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_processors_see_the_same_text(family: str) -> None:
    model, ids = model_of(family), prompt(0, 5)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2)])
    wanted = plain_generate(model, ids, 40, logits_processor=processors)
    for seed in range(2):
        policy = Gaps(seed)
        out = generate(model, input_ids=ids, policy=policy, max_new_tokens=40, logits_processor=processors)
        assert out.sequences[0, 5:].tolist() == wanted
        assert any(r.accepted and r.skipped for r in out.rounds)
