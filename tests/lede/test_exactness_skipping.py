"""The text is the plain model's while a search for layers to skip runs, greedily and in law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lede.decoding import Decoder
from lede.generation import GenerateOutput, generate
from lede.models import EarlyExitModel
from lede.policies import ConfLayersPolicy, LayerSkippingPolicy, LayerState, SkipSublayers, SwiftPolicy
from lede.text_probe import TextProbe
from lede.verification import Chooser, Warp
from tests.exactness import is_exact
from tests.table_model import Law, Paths, distance
from tests.tiny_models import FAMILY_NAMES, plain_generate, prompt, tiny_model

SEEDS = {"gemma3_text": 7, "mistral": 7}  # with others, texts collapse onto few tokens or agree too often
PROMPTS = ((0, 5), (1, 17), (2, 9))
BUDGET = 48
SURE = 0.0102  # the likeliest of 128 tokens of these models has 0.0095 to 0.0125, so drafts end anywhere
SEARCHES: dict[str, tuple[type[LayerSkippingPolicy], dict[str, Any]]] = {
    "conflayers": (
        ConfLayersPolicy,
        {"interval": 3, "context_window": 6, "probe_tokens": 4, "max_score": 1.0, "stop_threshold": SURE},
    ),
    "conflayers, authors' code": (
        ConfLayersPolicy,
        {
            "interval": 2,
            "context_window": 6,
            "confidence": "hidden",
            "stop": "authors-code",
            "window": 4,
            "skip_ratio": 0.1,
            "stop_threshold": 0.0,
            "max_draft": 4,
        },
    ),
    "swift": (
        SwiftPolicy,
        {"context_window": 6, "bayes_interval": 7, "skip_ratio": 0.3, "max_score": 1.0, "stop_threshold": SURE},
    ),
}
SHORT: dict[str, dict[str, Any]] = {
    "conflayers": {"context_window": 1, "interval": 1, "max_draft": 2, "skip_ratio": 0.3},
    "swift": {"context_window": 1, "max_draft": 2},
}
"""Settings under which a search acts in a text of 5 tokens."""


def search(name: str, **changes: Any) -> LayerSkippingPolicy:
    policy_class, settings = SEARCHES[name]
    return policy_class(**{**settings, **changes})


def model_of(family: str, dtype: torch.dtype = torch.float64) -> EarlyExitModel:
    return tiny_model(family, dtype, SEEDS.get(family, 0))


def decode(model: EarlyExitModel, ids: Sequence[int], policy: LayerSkippingPolicy, **settings: Any) -> GenerateOutput:
    return generate(model, input_ids=ids, policy=policy, **{"max_new_tokens": BUDGET, **settings})


def new_tokens(out: GenerateOutput, ids: Sequence[int]) -> list[int]:
    tokens: list[int] = out.sequences[0, len(ids) :].tolist()
    return tokens


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every question that a probe was asked."""
    asked: list[str] = []
    for name in ("sublayer_confidence", "matchness"):
        original = getattr(TextProbe, name)

        def counting(self: TextProbe, *args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            asked.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(TextProbe, name, counting)
    return asked


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_greedy_text_is_the_plain_models_while_the_search_runs(family: str, name: str) -> None:
    model, policy = model_of(family), search(name)
    drafted, accepted = 0, 0
    lengths = set()
    for seed, length in PROMPTS:
        ids = prompt(seed, length)
        wanted = plain_generate(model, ids, BUDGET)
        for budget in (BUDGET, 11):
            out = decode(model, ids, policy, max_new_tokens=budget)
            assert new_tokens(out, ids) == wanted[:budget]
            drafted, accepted = drafted + out.stats.drafted, accepted + out.stats.accepted
            lengths |= {r.drafted for r in out.rounds}
    steps = policy.search_report()
    assert len({(step.attention, step.mlp) for step in steps}) > 1  # sets changed in the middle of texts
    assert any(step.score is not None for step in steps)
    assert 0 < accepted < drafted
    assert len(lengths) > 2


@pytest.mark.parametrize("name", SEARCHES)
def test_greedy_float32_text_is_the_plain_models_up_to_ties(name: str) -> None:
    model, policy = model_of("llama", torch.float32), search(name)
    exact = []
    for seed, length in PROMPTS:
        ids = prompt(seed, length)
        found = new_tokens(decode(model, ids, policy), ids)
        exact.append(is_exact(model, ids, found, plain_generate(model, ids, BUDGET)))
    assert sum(not e for e in exact) <= 1


def law_of_model(model: EarlyExitModel, ids: list[int], warp: Warp, n_tokens: int) -> Law:
    """The law of plain sampling by transformers' own forward."""
    law: Law = {}

    def extend(text: tuple[int, ...], weight: float) -> None:
        if len(text) == n_tokens:
            law[text] = weight
            return
        with torch.inference_mode():
            logits = model.hf_model(torch.tensor([[*ids, *text]])).logits[0, -1]
        for token, p in enumerate(warp.probabilities(logits.float()).tolist()):
            if p > 0:
                extend((*text, token), weight * p)

    extend((), 1.0)
    return law


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_law_of_sampling_is_the_plain_models_while_the_search_runs(
    family: str, name: str, questions: list[str]
) -> None:
    """Every path of luck is walked; 5 tokens, so that rounds draft with a set that the sampled text selected."""
    model, ids, warp = model_of(family), prompt(1, 17), Warp(1.5, top_k=2)
    law: Law = {}
    paths, plans = Paths(), set()
    for _ in paths:
        policy = search(name, **SHORT[name])
        policy.check_model(model)
        decoder = Decoder(model, policy, Chooser(warp, paths))
        text = tuple(token for tokens in decoder.decode(ids, 5) for token in tokens)
        law[text] = law.get(text, 0.0) + paths.weight
        plans |= {(step.attention, step.mlp) for step in policy.search_report()}
    assert distance(law, law_of_model(model, ids, warp, 5)) < 2e-6
    assert questions
    assert len(plans) > 1


@pytest.mark.parametrize("name", SEARCHES)
def test_a_saved_best_set_asks_nothing(name: str, questions: list[str], tmp_path: Any) -> None:
    model, policy = model_of("llama"), search(name)
    for _ in range(10):
        decode(model, prompt(1, 17), policy)
        if policy.best is not None and len(policy.search_report()) >= 3:
            break
    assert policy.best is not None
    assert len(policy.search_report()) >= 3
    assert questions
    best = policy.best
    policy.bind(model).save_pretrained(str(tmp_path))
    questions.clear()
    loaded = type(policy).from_pretrained(str(tmp_path))
    for seed, length in PROMPTS:
        ids = prompt(seed, length)
        out = decode(model, ids, loaded)
        assert new_tokens(out, ids) == plain_generate(model, ids, BUDGET)
        assert {r.skipped for r in out.rounds if r.drafted} == {best.n_skipped}
        assert out.stats.seconds.search == 0
    assert questions == []
    assert loaded.best == best


def test_two_searches_on_one_model_do_not_disturb_one_another() -> None:
    model = model_of("llama")

    def texts(*policies: LayerSkippingPolicy) -> list[list[int]]:
        return [decode(model, prompt(*p), policy).sequences[0].tolist() for p in PROMPTS for policy in policies]

    def report(policy: LayerSkippingPolicy) -> list[tuple[Any, ...]]:
        return [(s.attention, s.mlp, s.score, s.mean_accepted, s.kept, s.note) for s in policy.search_report()]

    alone = [search("conflayers"), search("swift")]
    by_itself = [texts(policy) for policy in alone]
    together = [search("conflayers"), search("swift")]
    assert texts(*together) == [text for pair in zip(*by_itself, strict=True) for text in pair]
    assert [report(policy) for policy in together] == [report(policy) for policy in alone]
    assert all(len(report(policy)) > 3 for policy in together)


@pytest.mark.parametrize("policy_class", [ConfLayersPolicy, SwiftPolicy])
def test_an_empty_set_never_drafts(policy_class: type[LayerSkippingPolicy], questions: list[str]) -> None:
    model, ids = model_of("llama"), prompt(0, 5)
    out = decode(model, ids, policy_class.from_sets(frozenset(), frozenset()))
    assert new_tokens(out, ids) == plain_generate(model, ids, BUDGET)
    assert out.stats.drafted == 0
    assert out.stats.rounds == BUDGET - 1
    assert out.stats.head_reads == 0
    assert questions == []


def test_an_unsure_position_is_the_last_of_its_draft() -> None:
    """Probabilities below the threshold end a draft behind the token that they belong to."""
    model, ids = model_of("llama"), prompt(0, 5)
    asked: list[float] = []
    drafts: list[tuple[list[float], Any]] = []  # probabilities that were asked about, and the report

    class Listening(ConfLayersPolicy):
        def draft(self, state: LayerState) -> bool:
            asked.append(math.exp(-float(state.observation[0])))
            return super().draft(state)

        def verified(self, report: Any) -> None:
            assert isinstance(report.plan, SkipSublayers | None)
            if report.drafted:
                drafts.append((list(asked), report))
            asked.clear()

    policy = Listening(stop_threshold=SURE, max_draft=6)
    decode(model, ids, policy)
    assert all(min(p if report.capped else p[:-1], default=1.0) >= SURE for p, report in drafts)
    ended_by_doubt = [p for p, report in drafts if not report.capped]
    assert all(p[-1] < SURE for p in ended_by_doubt)
    assert all(len(p) == report.drafted - report.capped for p, report in drafts)
    assert {len(p) for p in ended_by_doubt} >= {1, 2, 3}
    assert len(ended_by_doubt) < len(drafts)  # others reached the cap
