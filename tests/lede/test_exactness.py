"""Greedy text is the plain model's: every family, float64 and float32, every policy, every budget."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from lede.exactness import compare
from lede.features import FeatureConfig, default_candidates
from lede.generation import GenerateOutput, generate
from lede.models import EarlyExitModel, load_model
from lede.policies import LearnedPolicy, LookupPolicy, Policy, RandomPolicy, StaticPolicy, ThresholdPolicy
from lede.policies.base import LayerState, PreScan, PreScanState
from tests.exactness import is_exact
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, plain_generate, prompt, tiny_hf_model, tiny_model

BUDGETS = (1, 2, 13, 64)
PROMPTS = ((0, 5), (1, 17))  # (seed, length); with windows of 8, one starts inside the window and one beyond it
SEEDS = {"gemma3_text": 7, "mistral": 7}  # with others, texts collapse onto few tokens or agree too often


def model_of(family: str, dtype: torch.dtype) -> EarlyExitModel:
    return tiny_model(family, dtype, SEEDS.get(family, 0))


@cache
def reference(family: str, dtype: torch.dtype, seed: int, length: int) -> list[int]:
    return plain_generate(model_of(family, dtype), prompt(seed, length), max(BUDGETS))


class Probe(Policy):
    """Exits at the deepest candidate, drafts on, and remembers what it saw."""

    kind = "probe"

    def __init__(self, candidates: tuple[int, ...] = (1, 2, 3, 5)) -> None:
        super().__init__(candidates=candidates)
        self.seen: list[np.ndarray] = []

    @property
    def features(self) -> FeatureConfig:
        return FeatureConfig()

    def scan(self, state: LayerState) -> bool:
        self.seen.append(state.observation)
        return state.layer == (self.config.candidates or ())[-1]

    draft = scan


@cache
def observations(family: str) -> np.ndarray:
    """States `(decision, feature)` of the family, so that policies can be made whose decisions vary."""
    probe = Probe()
    for seed, length in PROMPTS:
        generate(model_of(family, torch.float64), input_ids=prompt(seed, length), policy=probe, max_new_tokens=40)
    return np.stack(probe.seen)


def random_network(seed: int, seen: np.ndarray, candidates: tuple[int, ...] | None) -> LearnedPolicy:
    """A network with random weights, an arbitrary function of states like those seen `(decision, feature)`."""
    rng = np.random.default_rng(seed)
    sizes = [seen.shape[1], 16, 2]
    layers = [(rng.normal(size=(b, a)), rng.normal(size=b)) for a, b in pairwise(sizes)]
    return LearnedPolicy.from_network(layers, candidates=candidates, mean=seen.mean(0), std=seen.std(0))


def policies(family: str) -> dict[str, Policy | None]:
    every: dict[str, Policy | None] = {"plain": None}
    for layer in range(1, N_LAYERS):
        every[f"static {layer}"] = StaticPolicy(exit_layer=layer, draft_length=1 + layer)
    every["static capped"] = StaticPolicy(exit_layer=3, draft_length=12)
    entropy = float(np.median(observations(family)[:, FeatureConfig().names.index("entropy")]))
    every["threshold"] = ThresholdPolicy(measure="entropy", thresholds=entropy)
    for seed in range(3):
        every[f"random {seed}"] = RandomPolicy(seed=seed, fixed_probability=0.4 * seed)
        every[f"learned {seed}"] = random_network(seed, observations(family), (1, 2, 3, 5))
    every["random gaps"] = RandomPolicy(seed=3, gap_probability=0.5)
    every["random lookups"] = RandomPolicy(seed=4, gap_probability=0.2, lookup_probability=0.5)
    every["lookup"] = LookupPolicy(draft_length=16, max_suffix=2)
    every["pruned lookup"] = LookupPolicy(draft_length=8, continuation="frequent", prune_at=3)
    return every


def run(model: EarlyExitModel, ids: list[int], policy: Policy | None, budget: int, **settings: Any) -> GenerateOutput:
    out = generate(model, input_ids=ids, policy=policy, max_new_tokens=budget, **settings)
    new = out.sequences[0, len(ids) :].tolist()
    committed = [t for r in out.rounds for t in r.tokens]
    assert new[1:] == committed
    assert out.stats.tokens == len(new) == 1 + len(committed)
    return out


@cache
def longest(family: str, seed: int, length: int) -> dict[str, GenerateOutput]:
    """What every policy decodes with the largest budget, in float64."""
    model, ids = model_of(family, torch.float64), prompt(seed, length)
    return {name: run(model, ids, policy, max(BUDGETS)) for name, policy in policies(family).items()}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_policy_gives_the_plain_text(family: str) -> None:
    model = model_of(family, torch.float64)
    for seed, length in PROMPTS:
        ids = prompt(seed, length)
        wanted = reference(family, torch.float64, seed, length)
        found = longest(family, seed, length)
        for name, policy in policies(family).items():
            for budget in BUDGETS:
                out = found[name] if budget == max(BUDGETS) else run(model, ids, policy, budget)
                assert is_exact(model, ids, out.sequences[0, len(ids) :].tolist(), wanted[:budget])


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_policy_gives_the_plain_text_in_float32(family: str) -> None:
    """Rounding is all that float32 adds, so one prompt and the largest budget."""
    model, (seed, length) = model_of(family, torch.float32), PROMPTS[1]
    ids, wanted = prompt(seed, length), reference(family, torch.float32, seed, length)
    outputs = [run(model, ids, policy, max(BUDGETS)) for policy in policies(family).values()]
    assert sum(not is_exact(model, ids, out.sequences[0, len(ids) :].tolist(), wanted) for out in outputs) <= 1


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_drafts_are_fallible_and_every_ending_occurs(family: str) -> None:
    """The suite above means something: 20 to 80 % accepted; bonus, rejection, cap and stop all happen."""
    drafts: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for seed, length in PROMPTS:
        for name, out in longest(family, seed, length).items():
            for r in out.rounds:
                drafts[name] += r.drafted
                accepted[name] += r.accepted
                seen["bonus"] += 0 < r.drafted == r.accepted == len(r.tokens) - 1
                seen["mid-block rejection"] += 0 < r.accepted < r.drafted
                seen["cap"] += r.drafted == 12
                seen["stop"] += name.startswith(("learned", "threshold")) and 0 < r.drafted < 12
                seen["plain pass"] += not r.drafted
    assert (
        0.2 < sum(accepted[f"static {i}"] for i in range(2, 6)) / sum(drafts[f"static {i}"] for i in range(2, 6)) < 0.8
    )
    assert all(seen[event] for event in ("bonus", "mid-block rejection", "cap", "stop", "plain pass")), seen
    deciding = [name for name in drafts if name.startswith(("learned", "threshold")) and drafts[name]]
    assert len(deciding) >= 2, drafts  # policies that look at the state do draft


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_end_of_sequence_at_every_position_of_a_block(family: str) -> None:
    """An EOS accepted inside a block ends the text, the counters and the cache there (no junk after it)."""
    model = model_of(family, torch.float64)
    policy = StaticPolicy(exit_layer=4, draft_length=6)
    positions: set[int] = set()
    for seed, length in PROMPTS:
        ids = prompt(seed, length)
        wanted = reference(family, torch.float64, seed, length)
        for token in dict.fromkeys(wanted):
            cut = wanted[: wanted.index(token) + 1]
            out = run(model, ids, policy, 64, eos_token_id=token)
            assert out.sequences[0, len(ids) :].tolist() == cut
            assert out.finish_reason == "eos"
            last = out.rounds[-1] if out.rounds else None
            if last is not None and last.accepted and last.tokens[-1] == token and len(last.tokens) == last.accepted:
                assert last.drafted == last.accepted  # nothing is drafted after an EOS
                positions.add(last.accepted)
    assert len(positions) >= 3, positions


def model_with_an_idle_last_layer() -> EarlyExitModel:
    """Layer L-1 says what the whole model says: every draft from there is right."""
    hf_model = tiny_hf_model("llama")
    last = hf_model.model.layers[-1]
    with torch.no_grad():
        last.self_attn.o_proj.weight.zero_()
        last.mlp.down_proj.weight.zero_()
    return load_model((hf_model, None))


@pytest.mark.parametrize("position", range(1, 8))
def test_end_of_sequence_at_each_position_of_an_accepted_block(position: int) -> None:
    """Six drafted tokens and the bonus; what stands before and after the EOS would be accepted as well."""
    model = model_with_an_idle_last_layer()
    texts = ((ids, plain_generate(model, ids, 8)) for ids in (prompt(seed, 9) for seed in range(30)))
    ids, wanted = next((i, text) for i, text in texts if text[position] not in text[:position])
    policy = StaticPolicy(exit_layer=N_LAYERS - 1, draft_length=6)
    out = run(model, ids, policy, 64, eos_token_id=wanted[position])
    assert out.sequences[0, len(ids) :].tolist() == wanted[: position + 1]
    assert [(r.drafted, r.accepted) for r in out.rounds] == [(min(position, 6), min(position, 6))]


def test_transformers_agrees_about_end_of_sequence() -> None:
    model = model_of("llama", torch.float64)
    ids = prompt(0, 5)
    wanted = reference("llama", torch.float64, 0, 5)
    token = wanted[9]
    assert plain_generate(model, ids, 64, eos_token_id=token) == wanted[: wanted.index(token) + 1]


class FullDepthDraft(Policy):
    """Drafts from one layer below the last, for as long as it may."""

    kind = "full-depth-draft"

    def scan(self, state: object) -> bool:
        return True

    def draft(self, state: object) -> bool:
        return True


def test_identity_layer_makes_every_draft_right() -> None:
    """Drafting with what is the whole model but for an identity layer is accepted to the last token."""
    model = model_with_an_idle_last_layer()
    out = run(model, prompt(2, 9), FullDepthDraft(candidates=(N_LAYERS - 1,)), 60)
    assert out.stats.acceptance_rate == 1.0
    assert out.sequences[0, 9:].tolist() == plain_generate(model, prompt(2, 9), 60)


class SkipAlways(Policy):
    """Never looks, never drafts."""

    kind = "skip-always"

    def pre_scan(self, state: PreScanState) -> PreScan:
        return PreScan.SKIP

    def scan(self, state: object) -> bool:
        raise AssertionError("a skipped round must not scan")

    draft = scan


def test_skip_costs_no_head_read() -> None:
    model = model_of("llama", torch.float64)
    out = run(model, prompt(0, 5), SkipAlways(), 64)
    assert out.sequences[0, 5:].tolist() == reference("llama", torch.float64, 0, 5)
    assert out.stats.head_reads == 0
    assert out.stats.acceptance_rate is None
    assert out.stats.full_passes == 63


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_half_precision_parts_at_ties_alone(family: str, dtype: torch.dtype) -> None:
    """Bit-equality is not promised there: the first divergence is shown, and is a failure above the dtype's noise."""
    model = model_of(family, dtype)
    for seed, length in PROMPTS:
        ids = prompt(seed, length)
        wanted = plain_generate(model, ids, 32)
        random = (RandomPolicy(seed=0), RandomPolicy(seed=0, gap_probability=0.5))
        for policy in (None, StaticPolicy(exit_layer=3, draft_length=4), *random):
            out = run(model, ids, policy, 32)
            apart = compare(model, ids, out.sequences[0, length:].tolist(), wanted)
            print(apart or "equal")
            assert apart is None or apart.tie, apart


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sliding_windows_in_both_attentions(attention: str) -> None:
    """Bursts that cross the window, with the mask in either form."""
    for family in ("mistral", "gemma3_text"):
        hf_model = tiny_hf_model(family, torch.float32, SEEDS.get(family, 0))
        hf_model.set_attn_implementation(attention)
        model = load_model((hf_model, None))
        for length in (6, 7, 8, 9):  # window - 2 .. window + 1
            ids = prompt(length, length)
            wanted = plain_generate(model, ids, 24)
            out = run(model, ids, StaticPolicy(exit_layer=3, draft_length=5), 24)
            assert is_exact(model, ids, out.sequences[0, length:].tolist(), wanted)


def test_bundled_model_in_float32() -> None:
    """Plain, threshold, random and learned on every budget, and static at every layer."""
    model = load_model("demo")
    probe = Probe(candidates=default_candidates(model.n_layers))
    texts = ("def fibonacci(n):\n", "import os\n\n\nclass Folder:\n    ")
    ids = [model.tokenizer(text)["input_ids"] for text in texts]
    generate(model, input_ids=ids[0], policy=probe, max_new_tokens=32)
    seen = np.stack(probe.seen)
    every: list[Policy | None] = [None, ThresholdPolicy(), RandomPolicy(seed=0), RandomPolicy(gap_probability=0.7)]
    every += [random_network(seed, seen, probe.config.candidates) for seed in range(2)]
    static: list[Policy | None] = [StaticPolicy(exit_layer=n, draft_length=3) for n in range(1, model.n_layers)]
    ties = 0
    for prompt_ids, contenders, budgets in (
        (ids[0], every, BUDGETS),
        (ids[0], static, (32,)),
        (ids[1], every[:4], (max(BUDGETS),)),
    ):
        wanted = plain_generate(model, prompt_ids, max(BUDGETS), eos_token_id=list(model.eos_token_ids))
        for policy in contenders:
            for budget in budgets:
                out = run(model, prompt_ids, policy, budget)
                new = out.sequences[0, len(prompt_ids) :].tolist()
                ties += not is_exact(model, prompt_ids, new, wanted[:budget])
    assert ties <= 1
