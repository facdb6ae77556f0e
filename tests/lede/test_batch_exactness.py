"""Texts of a batch are those of single runs: every family, unequal prompts, every kind of policy, every ending."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import lede
from lede.features import FeatureConfig
from lede.generation import GenerateOutput, generate
from lede.lookup import LookupConfig
from lede.models import EarlyExitModel, load_model
from lede.policies import LearnedPolicy, LookupPolicy, Policy, RandomPolicy, StaticPolicy, ThresholdPolicy
from lede.policies.base import ExitAt, LayerState, Lookup, Plan, PreScan, PreScanState
from tests.exactness import is_exact
from tests.forecasts import every_feature, made_up_sources, made_up_survival
from tests.tiny_models import ALL_FAMILY_NAMES, FAMILY_NAMES, WINDOW, plain_generate, prompt, tiny_hf_model, tiny_model

BUDGET = 24
ROWS = [prompt(seed, length) for seed, length in ((0, 5), (1, 17), (2, 2), (3, 9))]
SEEDS = {"gemma3_text": 7, "mistral": 7}  # with others, texts collapse onto few tokens or agree too often
SURE = 0.0103  # the likeliest of 128 tokens of these models has 0.0095 to 0.0125, so drafts end anywhere
CANDIDATES = (1, 2, 3, 5)
MIXED_FEATURES = FeatureConfig(("entropy", "trace", "agreement", "acceptance", "survival"), draft_agreement=True)
EVERY_FEATURE = every_feature(CANDIDATES, draft_agreement=True)


def model_of(family: str, dtype: torch.dtype = torch.float64) -> EarlyExitModel:
    return tiny_model(family, dtype, SEEDS.get(family, 0))


class Probe(Policy):
    """Exits at the deepest candidate, drafts on, and remembers what it saw."""

    kind = "probe"

    def __init__(self) -> None:
        super().__init__(candidates=CANDIDATES)
        self.seen: list[np.ndarray] = []

    @property
    def features(self) -> FeatureConfig:
        return EVERY_FEATURE

    def scan(self, state: LayerState) -> bool:
        self.seen.append(state.observation)
        return state.layer == CANDIDATES[-1]

    draft = scan


@cache
def learned(n_outputs: int, seed: int) -> LearnedPolicy:
    """An arbitrary function of every feature there is; with more than two outputs it decides the pre-scan too."""
    probe = Probe()
    generate(model_of("llama"), input_ids=ROWS[1], policy=probe, max_new_tokens=BUDGET)
    seen, rng = np.stack(probe.seen), np.random.default_rng(seed)
    layers = [(rng.normal(size=(b, a)), rng.normal(size=b)) for a, b in pairwise((seen.shape[1], 16, n_outputs))]
    return LearnedPolicy.from_network(
        layers, features=EVERY_FEATURE, candidates=CANDIDATES, mean=seen.mean(0), std=seen.std(0) + 1e-3
    )


class Mixed(Policy):
    """Skips, scans and drafts blind in turn, and decides by the digits of the entropy: rows are hardly ever in step."""

    kind = "mixed"

    def __init__(self) -> None:
        super().__init__(candidates=CANDIDATES, max_draft=7)

    @property
    def features(self) -> FeatureConfig:
        return MIXED_FEATURES

    def pre_scan(self, state: PreScanState) -> Plan:
        plans = (PreScan.SKIP, PreScan.SCAN, ExitAt(4), PreScan.SCAN, ExitAt(2))
        return plans[state.n_tokens % len(plans)]

    def scan(self, state: LayerState) -> bool:
        return int(state.observation[0] * 1e4) % 3 == 0

    def draft(self, state: LayerState) -> bool:
        return int(state.observation[0] * 1e4) % 4 > 0


class MixedLookups(Mixed):
    """Copies in between, pruned and not."""

    kind = "mixed-lookups"

    @property
    def lookup(self) -> LookupConfig:
        return LookupConfig(max_suffix=2)

    def pre_scan(self, state: PreScanState) -> Plan:
        plans = (Lookup(6), PreScan.SCAN, Lookup(16, prune_at=3), ExitAt(2), PreScan.SKIP, Lookup(3))
        return plans[state.n_tokens % len(plans)]


class Nowhere(Policy):
    """Scans without a candidate to look at: plain passes."""

    kind = "nowhere"

    def candidates_for(self, n_layers: int) -> tuple[int, ...]:
        return ()

    def scan(self, state: LayerState) -> bool:
        return True

    draft = scan


DECIDED: dict[str, Any] = {
    "plain": lambda: None,
    "static": lambda: StaticPolicy(exit_layer=3, draft_length=4),
    "static to the cap": lambda: StaticPolicy(exit_layer=4, draft_length=6, max_draft=6),
    "threshold": lambda: ThresholdPolicy(thresholds=SURE),
    "learned": lambda: learned(2, 3),
    "learned with plans": lambda: learned(2 + len(CANDIDATES), 2),
    "mixed": Mixed,
    "lookup": lambda: LookupPolicy(draft_length=5),
    "pruned lookup": lambda: LookupPolicy(draft_length=9, max_suffix=1, prune_at=4),
    "mixed with lookups": MixedLookups,
    "nowhere": Nowhere,
    "survival": lambda: made_up_survival(2, CANDIDATES),
    "sources": lambda: made_up_sources(4, CANDIDATES, (Lookup(3), Lookup(8))),
}
"""Policies whose decisions are functions of what they are told."""


def decode(
    model: EarlyExitModel, rows: list[list[int]], policy: Policy | None, **settings: Any
) -> list[GenerateOutput]:
    outputs = generate(model, input_ids=rows, policy=policy, **{"max_new_tokens": BUDGET, **settings})
    assert [out.sequences[0, : len(row)].tolist() for out, row in zip(outputs, rows, strict=True)] == rows
    return outputs


def new_tokens(out: GenerateOutput, row: list[int]) -> list[int]:
    tokens: list[int] = out.sequences[0, len(row) :].tolist()
    return tokens


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_texts_are_the_plain_models(family: str) -> None:
    model = model_of(family)
    wanted = [plain_generate(model, row, BUDGET) for row in ROWS]
    for policy in (None, StaticPolicy(exit_layer=3, draft_length=4), LookupPolicy(), RandomPolicy(seed=0), MIXTURE):
        outputs = decode(model, ROWS, policy)
        assert [new_tokens(out, row) for out, row in zip(outputs, ROWS, strict=True)] == wanted, policy
    drafted = sum(out.stats.drafted for out in outputs)
    assert 0.1 < sum(out.stats.accepted for out in outputs) / drafted < 0.95


MIXTURE = RandomPolicy(seed=1, blind_probability=0.4, fixed_probability=0.6, lookup_probability=0.3)

NOTABLE = {"codegen", "cohere2", "gemma2", "gpt_bigcode", "gpt_oss", "mixtral", "opt", "phi3", "stablelm"}
"""Soft caps, sinks, experts, one head of keys, tables of positions: what rows in one block could disturb."""


@pytest.mark.parametrize(
    "family",
    [
        name if name in NOTABLE else pytest.param(name, marks=pytest.mark.slow)
        for name in ALL_FAMILY_NAMES
        if name not in FAMILY_NAMES
    ],
)
def test_every_other_family_once(family: str) -> None:
    model = tiny_model(family)
    rows = [row[:9] for row in ROWS]
    outputs = decode(model, rows, Mixed(), max_new_tokens=10)
    wanted = [plain_generate(model, row, 10) for row in rows]
    assert [new_tokens(out, row) for out, row in zip(outputs, rows, strict=True)] == wanted


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_float32_parts_at_ties_alone(family: str) -> None:
    model = model_of(family, torch.float32)
    ties = 0
    for policy in (None, StaticPolicy(exit_layer=3, draft_length=4), RandomPolicy(seed=0)):
        for out, row in zip(decode(model, ROWS, policy), ROWS, strict=True):
            ties += not is_exact(model, row, new_tokens(out, row), plain_generate(model, row, BUDGET))
    assert ties <= 1


@pytest.mark.parametrize("name", DECIDED)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_decisions_and_counts_are_those_of_single_runs(family: str, name: str) -> None:
    """Round by round: exit layer, drafted and accepted tokens, head reads; so every row saw what it would see alone."""
    model = model_of(family)
    outputs = decode(model, ROWS, DECIDED[name]())
    for out, row in zip(outputs, ROWS, strict=True):
        alone = generate(model, input_ids=row, policy=DECIDED[name](), max_new_tokens=BUDGET)
        assert out.rounds == alone.rounds
        assert out.stats.head_reads == alone.stats.head_reads
        assert out.finish_reason == alone.finish_reason
    if name == "survival":
        assert len({r.drafted for out in outputs for r in out.rounds}) > 3, "drafts that end as their products do"
    if name == "mixed":
        assert {r.exit_layer for out in outputs for r in out.rounds} >= {None, 1, 2, 3, 4}
        assert len({r.drafted for out in outputs for r in out.rounds}) > 4


@pytest.mark.parametrize("name", [name for name in DECIDED if name != "static to the cap"])
@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}], ids=str)
def test_sampled_rows_are_single_runs_with_their_stream(name: str, settings: dict[str, Any]) -> None:
    """Token for token, whoever else is in the batch."""
    model = model_of("llama")
    outputs = decode(model, ROWS, DECIDED[name](), seed=5, stream=2, **settings)
    for i, (out, row) in enumerate(zip(outputs, ROWS, strict=True)):
        alone = generate(
            model, input_ids=row, policy=DECIDED[name](), max_new_tokens=BUDGET, seed=5, stream=2 + i, **settings
        )
        assert new_tokens(out, row) == new_tokens(alone, row)
        assert out.rounds == alone.rounds
    assert decode(model, ROWS[:2], DECIDED[name](), seed=5, stream=2, **settings)[1].rounds == outputs[1].rounds


@pytest.mark.parametrize("n_rows", [2, 3, 7])
def test_batches_of_any_size_in_any_order(n_rows: int) -> None:
    """Rows of equal and unequal length; the order of the rows is that of the prompts."""
    model = model_of("llama")
    rows = [prompt(20 + i, (6, 6, 11, 3)[i % 4]) for i in range(n_rows)]
    wanted = [plain_generate(model, row, 12) for row in rows]
    for policy in (None, StaticPolicy(exit_layer=2, draft_length=3), RandomPolicy(seed=4)):
        outputs = decode(model, rows, policy, max_new_tokens=12)
        assert [new_tokens(out, row) for out, row in zip(outputs, rows, strict=True)] == wanted


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_bursts_cross_sliding_windows(family: str, attention: str) -> None:
    """Rows of window - 2 to window + 1 tokens, and one far beyond it, with the mask in either form."""
    hf_model = tiny_hf_model(family, torch.float64, SEEDS[family])
    hf_model.set_attn_implementation(attention)
    model = load_model((hf_model, None))
    rows = [prompt(length, length) for length in (*range(WINDOW - 2, WINDOW + 2), 3 * WINDOW)]
    wanted = [plain_generate(model, row, BUDGET) for row in rows]
    for policy in (None, StaticPolicy(exit_layer=3, draft_length=5), RandomPolicy(seed=1)):
        outputs = decode(model, rows, policy)
        assert [new_tokens(out, row) for out, row in zip(outputs, rows, strict=True)] == wanted


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_end_by_end_of_sequence_when_they_get_there(family: str) -> None:
    """Also inside an accepted block: nothing follows, and the other rows go on."""
    model = model_of(family)
    wanted = [plain_generate(model, row, BUDGET) for row in ROWS]
    inside: set[int] = set()
    for token in dict.fromkeys(wanted[0][2:8] + wanted[1][2:8]):
        cut = [text[: text.index(token) + 1] if token in text else text for text in wanted]
        assert len({len(text) for text in cut}) > 1  # they end at different times
        for policy in (None, StaticPolicy(exit_layer=4, draft_length=6)):
            outputs = decode(model, ROWS, policy, eos_token_id=token)
            assert [new_tokens(out, row) for out, row in zip(outputs, ROWS, strict=True)] == cut
            for out, text in zip(outputs, cut, strict=True):
                assert out.finish_reason == ("eos" if text[-1] == token else "length")
                last = out.rounds[-1] if out.rounds else None
                if last is not None and last.accepted and len(last.tokens) == last.accepted:
                    inside.add(last.accepted)
    assert len(inside) >= 2, inside


class UpTo(StoppingCriteria):
    """Ends a text at a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.BoolTensor:
        return input_ids[:, -1] == self.token  # type: ignore[return-value]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_length": 22, "max_new_tokens": None},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"stop": 1},
        {"stop": 6},
    ],
    ids=str,
)
def test_budgets_processors_and_criteria_are_each_rows_own(settings: dict[str, Any]) -> None:
    model = model_of("llama")
    settings = {key: value for key, value in settings.items() if value is not None}
    if "stop" in settings:
        token = plain_generate(model, ROWS[1], BUDGET)[settings.pop("stop")]
        settings["stopping_criteria"] = StoppingCriteriaList([UpTo(token)])
    if "max_length" not in settings:
        settings.setdefault("max_new_tokens", BUDGET)
    for policy in (None, StaticPolicy(exit_layer=4, draft_length=5)):
        outputs = generate(model, input_ids=ROWS, policy=policy, **settings)
        assert isinstance(outputs, list)
        for out, row in zip(outputs, ROWS, strict=True):
            alone = generate(model, input_ids=row, policy=policy, **settings)
            assert isinstance(alone, GenerateOutput)
            assert new_tokens(out, row) == new_tokens(alone, row)
            assert (out.rounds, out.finish_reason) == (alone.rounds, alone.finish_reason)


def test_scores_are_those_of_single_runs() -> None:
    model = model_of("llama")
    policy = StaticPolicy(exit_layer=4, draft_length=5)
    settings: dict[str, Any] = {"output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    for out, row in zip(decode(model, ROWS, policy, **settings), ROWS, strict=True):
        alone = generate(model, input_ids=row, policy=policy, max_new_tokens=BUDGET, **settings)
        assert out.scores is not None
        assert alone.scores is not None
        assert out.logits is not None
        assert alone.logits is not None
        assert len(out.scores) == len(out.logits) == BUDGET
        torch.testing.assert_close(torch.cat(out.scores), torch.cat(alone.scores), rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.cat(out.logits), torch.cat(alone.logits), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_up_to_the_models_last_position(family: str) -> None:
    """Rows that end there while others are padded beyond them."""
    model = model_of(family)
    room = model.max_positions
    rows = [prompt(1, room - 12), prompt(2, 6), prompt(3, room - 20)]
    wanted = [plain_generate(model, row, 12) for row in rows]
    for policy in (StaticPolicy(exit_layer=3, draft_length=8), RandomPolicy(seed=2)):
        outputs = decode(model, rows, policy, max_new_tokens=12)
        assert [new_tokens(out, row) for out, row in zip(outputs, rows, strict=True)] == wanted


def test_prompts_of_a_batch_go_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few tokens may go through at once, texts are the same."""
    model = model_of("llama")
    wanted = [plain_generate(model, row, 6) for row in ROWS]
    for limit, n_groups in ((4096, 1), (20, 3), (1, 4)):
        monkeypatch.setattr("lede.batch_decoding.PREFILL_TOKENS", limit)
        with monkeypatch.context() as patch:
            seen: list[int] = []
            own = EarlyExitModel.rows_block

            def watched(model: EarlyExitModel, cache: Any, rows: Any, starts: Any, lengths: Any) -> Any:
                if set(starts) == {0}:
                    seen.append(len(rows))  # noqa: B023  called inside the loop
                return own(model, cache, rows, starts, lengths)  # noqa: B023  likewise

            patch.setattr(EarlyExitModel, "rows_block", watched)
            outputs = decode(model, ROWS, None, max_new_tokens=6)
        assert [new_tokens(out, row) for out, row in zip(outputs, ROWS, strict=True)] == wanted
        assert (len(seen), sum(seen)) == (n_groups, len(ROWS))


def test_the_bundled_model_on_prompts_of_text() -> None:
    model = lede.load_model("demo")
    texts = ["def fibonacci(n):", "import os\n\n\nclass Folder:\n    ", "x = 1"]
    for policy in (None, StaticPolicy(exit_layer=5, draft_length=3), ThresholdPolicy()):
        outputs = generate(model, texts, policy=policy, max_new_tokens=20)
        for out, text in zip(outputs, texts, strict=True):
            ids = model.tokenizer(text)["input_ids"]
            wanted = plain_generate(model, ids, 20, eos_token_id=list(model.eos_token_ids))
            if is_exact(model, ids, new_tokens(out, ids), wanted):
                assert out.text == model.tokenizer.decode(wanted, skip_special_tokens=True)
