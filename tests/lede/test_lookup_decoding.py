"""Rounds that copy from the text: what they run, what they commit, and what policies are told."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor

from lede.decoding import Decoder
from lede.generation import generate
from lede.lookup import LookupConfig, agreeing
from lede.policies import LookupPolicy, Policy, RandomPolicy, StaticPolicy
from lede.policies.base import ExitAt, LayerState, Lookup, Plan, PreScan, PreScanState, RoundReport
from lede.statistics import Meter
from lede.verification import Chooser, TorchSource, Warp
from tests.naive_lookup import naive_match, naive_proposal
from tests.table_model import N_LAYERS, TableModel
from tests.tiny_models import FAMILY_NAMES, VOCAB_SIZE, plain_generate, prompt, tiny_model

LOOPS = [7, 3, 9, 7, 3, 9, 7, 3]


class Planned(Policy):
    """Takes plans in turn, and remembers in which state."""

    kind = "planned"

    def __init__(self, *plans: Plan, **settings: Any) -> None:
        super().__init__(**{"candidates": (1, 2), **settings})
        self.plans = plans
        self.states: list[PreScanState] = []

    @property
    def lookup(self) -> LookupConfig:
        return LookupConfig()

    @property
    def uses_trace(self) -> bool:
        return True

    def pre_scan(self, state: PreScanState) -> Plan:
        self.states.append(state)
        return self.plans[(len(self.states) - 1) % len(self.plans)]

    def scan(self, state: LayerState) -> bool:
        return state.layer == 2

    def draft(self, state: LayerState) -> bool:
        return state.n_drafted < 3


class Told(Planned):
    """Remembers what came of its rounds too."""

    kind = "told"

    def __init__(self, *plans: Plan) -> None:
        super().__init__(*plans)
        self.reports: list[RoundReport] = []

    def verified(self, report: RoundReport) -> None:
        self.reports.append(report)


def on_table(policy: Policy, n_tokens: int = 22, eos: frozenset[int] = frozenset(), seed: int = 3) -> Decoder:
    """Decode greedily; the table checks that every layer sees each position once and without gaps."""
    chooser = Chooser(Warp(), TorchSource(torch.Generator()))
    decoder = Decoder(TableModel(seed), policy, chooser, eos, Meter())  # type: ignore[arg-type]
    decoder.text = [0, 1]  # type: ignore[attr-defined]
    for tokens in decoder.decode((0, 1), n_tokens):
        decoder.text += tokens  # type: ignore[attr-defined]
    return decoder


def test_a_round_commits_what_the_search_of_the_text_says() -> None:
    """Against an account of its own: proposals of a naive search, verified by the table."""
    model, policy = TableModel(3), Told(Lookup(4), Lookup(16, prune_at=2), Lookup(2), PreScan.SKIP)
    decoder = on_table(policy)
    text: list[int] = decoder.text  # type: ignore[attr-defined]
    plain = [0, 1]
    for _ in range(22):
        plain.append(int(model.logits(tuple(plain), N_LAYERS).argmax()))
    assert text == plain
    at, reads, pruned = 3, 0, 0
    for i, done in enumerate(decoder.meter.rounds):
        before, room = text[:at], len(text) - at - 1
        if room:
            plan = policy.plans[i % 4]
            copied = []
            if isinstance(plan, Lookup):
                assert policy.states[i].match == naive_match(before, LookupConfig())
                copied = naive_proposal(before, LookupConfig(), min(plan.length, room))
                if plan.prune_at and copied:
                    said = [int(model.logits((*before, *copied[:j]), 2).argmax()) for j in range(len(copied) + 1)]
                    reads += len(said)
                    kept = copied[: agreeing(copied, said)]
                    pruned += len(copied) - len(kept)
                    copied = kept
            assert (done.drafted, done.accepted) == (len(copied), agreeing(copied, text[at:]))
            assert done.source == ("lookup" if copied else None)
            assert done.exit_layer is None
            assert policy.reports[i].plan == (plan if copied else None)
        at += len(done.tokens)
    assert at == len(text)
    assert decoder.meter.head_reads == reads
    assert pruned >= 3
    assert sum(r.accepted for r in decoder.meter.rounds if r.source == "lookup") >= 3


def test_sources_keep_their_own_history() -> None:
    policy = Planned(Lookup(2), ExitAt(1), PreScan.SKIP)
    rounds = on_table(policy).meter.rounds
    for i, state in enumerate(policy.states):
        exits = [r for r in rounds[:i] if r.source == "exit"][-8:]
        drafted = sum(r.drafted for r in exits)
        assert state.recent_acceptance == (sum(r.accepted for r in exits) / drafted if drafted else None)
        since = next((n for n, r in enumerate(reversed(rounds[:i])) if r.source == "exit"), i)
        assert state.rounds_since_draft == since
    assert {r.source for r in rounds} == {"lookup", "exit", None}


def test_the_trace_has_the_whole_model_s_surprise_at_copied_tokens() -> None:
    model, policy = TableModel(3), Planned(Lookup(4))
    text: list[int] = on_table(policy).text  # type: ignore[attr-defined]
    for state in policy.states:
        decided = range(3, state.n_tokens)  # the prefill's token was no decision
        told = [-float(model.logits(tuple(text[:i]), N_LAYERS).float().log_softmax(-1).max()) for i in decided][-8:]
        if told:
            assert state.trace == pytest.approx(sum(told) / len(told), abs=1e-5)


@pytest.mark.parametrize("policy", [LookupPolicy(draft_length=6), LookupPolicy(draft_length=6, prune_at=2)], ids=str)
def test_an_end_of_text_that_is_copied_ends_the_draft(policy: LookupPolicy) -> None:
    """Verified as the last token, not run further, no bonus; a wrong one is rejected like any other."""
    endings: set[str] = set()
    for seed in range(12):
        plain: list[int] = on_table(Planned(PreScan.SKIP), seed=seed).text  # type: ignore[attr-defined]
        for token in range(4):
            cut = plain[: plain.index(token, 2) + 1] if token in plain[2:] else plain
            decoder = on_table(policy, eos=frozenset({token}), seed=seed)
            assert decoder.text == cut  # type: ignore[attr-defined]
            for r in decoder.meter.rounds:
                if r.source == "lookup" and r.tokens[-1] == token:
                    endings.add("copied" if len(r.tokens) == r.accepted else "whole model's")
    assert endings == {"copied", "whole model's"}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_looping_prompts_are_copied_at_length(family: str) -> None:
    """Every budget, so that copies are cut by it; the text is the plain model's and lookups do draft."""
    model, drafted = tiny_model(family), 0
    wanted = plain_generate(model, LOOPS, 40)
    for budget in (1, 2, 3, 17, 40):
        out = generate(model, input_ids=LOOPS, policy=LookupPolicy(draft_length=16), max_new_tokens=budget)
        assert out.sequences[0, len(LOOPS) :].tolist() == wanted[:budget]
        drafted += out.stats.drafted
        assert out.stats.head_reads == 0
    assert drafted > 16


def test_a_policy_without_an_index_cannot_copy() -> None:
    class Blind(Planned):
        @property
        def lookup(self) -> None:  # type: ignore[override]
            return None

    with pytest.raises(ValueError, match="its `lookup` is None"):
        on_table(Blind(Lookup(3)))


@pytest.mark.parametrize("layer", [0, 6, 9])
def test_a_layer_that_cannot_prune_is_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=r"prune_at must be|pruned at layers 1\.\.5"):
        generate(tiny_model("llama"), input_ids=LOOPS, policy=LookupPolicy(prune_at=layer), max_new_tokens=4)


@pytest.mark.parametrize("layer", [0, 6])
def test_a_plan_with_a_layer_that_cannot_prune_is_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=r"pruned at layers 1\.\.5 of a model with 6 layers"):
        generate(tiny_model("llama"), input_ids=LOOPS, policy=Planned(Lookup(2, layer)), max_new_tokens=4)
    with pytest.raises(ValueError, match=r"pruned at layers 1\.\.5"):
        generate(tiny_model("llama"), input_ids=[LOOPS, LOOPS], policy=Planned(Lookup(2, layer)), max_new_tokens=4)


def test_a_copy_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        Lookup(0)


def test_the_cap_on_drafting_does_not_cut_copies() -> None:
    model = tiny_model("llama")
    wanted = plain_generate(model, LOOPS, 40)
    loops = LOOPS + wanted
    out = generate(model, input_ids=loops, policy=Planned(Lookup(16), max_draft=1), max_new_tokens=40)
    assert max(r.drafted for r in out.rounds) == 16


def test_processors_and_stop_strings_act_on_copies() -> None:
    model = tiny_model("llama")
    for policy in (LookupPolicy(draft_length=9), RandomPolicy(seed=1, lookup_probability=0.6), StaticPolicy()):
        every: list[dict[str, Any]] = [
            {"no_repeat_ngram_size": 3},
            {"repetition_penalty": 1.3},
            {"min_new_tokens": 9, "eos_token_id": 3},
        ]
        for options in every:
            wanted = plain_generate(model, prompt(0, 9), 24, **options)
            out = generate(model, input_ids=prompt(0, 9), policy=policy, max_new_tokens=24, **options)
            assert out.sequences[0, 9:].tolist() == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_not_asked_about_copies_that_it_rules_out(temperature: float) -> None:
    """The prompt, which is copied from, breaks the grammar; plain decoding never comes to such a text."""
    model, ids = tiny_model("llama"), [*range(VOCAB_SIZE), 5]

    def allowed(_: int, text: torch.Tensor) -> list[int]:
        new = text[len(ids) - 1 :].tolist()
        legal = all(after in _followers(before) for before, after in pairwise(new))
        return _followers(new[-1]) if legal else []  # which transformers raises for

    grammar = LogitsProcessorList([PrefixConstrainedLogitsProcessor(allowed, 1)])
    settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": temperature, "logits_processor": grammar}
    out = generate(model, input_ids=ids, policy=LookupPolicy(draft_length=5), output_scores=True, **settings)
    assert out.stats.drafted > out.stats.accepted
    assert out.scores is not None
    assert len(out.scores) == 12
    if not temperature:
        assert out.sequences[0, len(ids) :].tolist() == plain_generate(model, ids, 12, logits_processor=grammar)


def _followers(token: int) -> list[int]:
    return [(token * 7 + k) % VOCAB_SIZE for k in (1, 2, 3)]
