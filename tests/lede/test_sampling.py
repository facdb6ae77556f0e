"""Sampling keeps the whole model's law, through the real loop, under policies that look at distributions.

Every path of the loop's luck is walked, so the law is known exactly and not from draws; the joint law of 3 tokens is
then also drawn 200,000 times. Two loops that break a condition of `lede.verification` must fail the same tests.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from lede.decoding import Decoder
from lede.drafting import Draft, Drafter
from lede.features import FEATURES, FeatureConfig
from lede.lookup import LookupConfig
from lede.policies import (
    DraftVerifyPolicy,
    DynamicExitLayerPolicy,
    LearnedPolicy,
    LookupPolicy,
    RandomPolicy,
    StaticPolicy,
)
from lede.policies.base import LayerState, Lookup, Policy, PreScan, PreScanState, SkipSublayers
from lede.seeding import Purpose, torch_stream
from lede.verification import Chooser, TorchSource, Warp
from tests.forecasts import every_feature
from tests.table_model import (
    VOCAB_SIZE,
    TableModel,
    chi_square_z,
    distance,
    first_tokens,
    law_of_loop,
    law_of_model,
)

ROUNDING = 2e-6  # distributions are float32
LANES = 200_000


class ByEntropy(Policy):
    """Layer and stop depend on the entropy, which is computed from the very distribution the token is drawn from."""

    kind = "by-entropy"

    @property
    def features(self) -> FeatureConfig:
        return FeatureConfig(("entropy", "trace"), top_k=2)

    def scan(self, state: LayerState) -> bool:
        return bool(state.observation[0] < 1.1) or state.layer == 2

    def draft(self, state: LayerState) -> bool:
        return bool(state.observation[0] + 0.1 * state.observation[1] < 1.15)


def by_entropy(max_draft: int = 12) -> ByEntropy:
    return ByEntropy(candidates=(1, 2), max_draft=max_draft)


class GapsByEntropy(ByEntropy):
    """Drafts with a gap where it is sure, with another where it is not; the stop looks at the last distribution."""

    kind = "gaps-by-entropy"

    def pre_scan(self, state: PreScanState) -> SkipSublayers:
        inner = frozenset({2})
        return SkipSublayers(inner, frozenset() if state.trace < 0.9 else inner)

    def draft(self, state: LayerState) -> bool:
        return bool(state.observation[0] < 1.1)


def on_table(policy: Policy) -> Policy:
    """The policy, told of the model."""
    policy.check_model(TableModel())  # type: ignore[arg-type]
    return policy


def random_gaps(seed: int) -> Policy:
    return on_table(RandomPolicy(seed=seed, candidates=(1, 2), skip_probability=0.1, gap_probability=0.6))


class LookupsBySurprise(ByEntropy):
    """Copies where the last tokens were no surprise, cut by a layer's opinion, and drafts by entropy elsewhere."""

    kind = "lookups-by-surprise"

    @property
    def lookup(self) -> LookupConfig:
        return LookupConfig(max_suffix=2)

    def pre_scan(self, state: PreScanState) -> PreScan | Lookup:
        if state.match is None or state.trace > 1.2:
            return PreScan.SCAN
        return Lookup(1 + state.match.length, prune_at=1 if state.trace < 0.9 else None)


def random_lookups(seed: int) -> Policy:
    return on_table(RandomPolicy(seed=seed, candidates=(1, 2), skip_probability=0.05, lookup_probability=0.7))


QUICK: dict[str, Any] = {"threshold": 0.45, "step": 0.2, "acceptance_weight": 0.2, "threshold_weight": 0.0}
"""One round moves the threshold far."""
LEARNING: dict[str, tuple[type[Policy], dict[str, Any]]] = {
    "draft-verify": (DraftVerifyPolicy, QUICK),
    "draft-verify with gaps": (DraftVerifyPolicy, {**QUICK, "attention": (2,)}),
    "del": (DynamicExitLayerPolicy, {"every_layer": True, "prior": 0.5}),
    "del by confidence": (DynamicExitLayerPolicy, {"every_layer": True, "stop": "confidence", "decay": 0.5}),
}
"""Policies that go by the rounds before, told of the table model in `learning`."""


def learning(name: str) -> Policy:
    policy_class, settings = LEARNING[name]
    return on_table(policy_class(**settings))


def learned(n_outputs: int, seed: int = 0) -> LearnedPolicy:
    """An arbitrary function of every feature there is; with more than two outputs it decides the pre-scan too."""
    rng = np.random.default_rng(seed)
    sizes = (len(FEATURES), 16, n_outputs)
    layers = [(rng.normal(size=(b, a)), rng.normal(size=b)) for a, b in pairwise(sizes)]
    features = every_feature((1, 2), top_k=2, draft_agreement=True)
    return LearnedPolicy.from_network(layers, features=features, candidates=(1, 2))


class BanFavourite(LogitsProcessor):
    """Bans the token that the first exit likes best after this prefix."""

    def __init__(self, model: TableModel) -> None:
        self.model = model

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[0, int(self.model.logits(tuple(input_ids[0].tolist()), 1).argmax())] = -float("inf")
        return scores


CASES: dict[str, dict[str, Any]] = {
    "T=1": {"warp": Warp(1.0)},
    "T=0.5": {"warp": Warp(0.5)},
    "T=1.5": {"warp": Warp(1.5)},
    "top-k": {"warp": Warp(1.0, top_k=2)},
    "top-p": {"warp": Warp(1.0, top_p=0.8)},
    "all": {"warp": Warp(0.7, top_k=3, top_p=0.9)},
    "eos": {"warp": Warp(1.0), "eos": frozenset({2})},
    "banned favourite": {"warp": Warp(1.0), "processors": "ban"},
}
POLICIES: dict[str, Any] = {
    "entropy": by_entropy,
    "entropy, cap 1": lambda: by_entropy(max_draft=1),
    "entropy, cap 2": lambda: by_entropy(max_draft=2),
    "static": lambda: StaticPolicy(exit_layer=1, draft_length=3),
    "random 0": lambda: RandomPolicy(seed=0, candidates=(1, 2)),
    "random 1": lambda: RandomPolicy(seed=1, candidates=(1, 2), blind_probability=0.5, fixed_probability=0.7),
    "gaps by entropy": lambda: GapsByEntropy(candidates=(1, 2)),
    "gaps by entropy, cap 1": lambda: GapsByEntropy(candidates=(1, 2), max_draft=1),
    "random gaps 0": lambda: random_gaps(0),
    "random gaps 1": lambda: random_gaps(1),
    "lookup": lambda: LookupPolicy(draft_length=3, max_suffix=2),
    "lookup of one": lambda: LookupPolicy(draft_length=1, continuation="frequent"),
    "pruned lookup": lambda: LookupPolicy(draft_length=3, max_suffix=1, prune_at=2),
    "lookups by surprise": lambda: LookupsBySurprise(candidates=(1, 2)),
    "random lookups 0": lambda: random_lookups(0),
    "random lookups 1": lambda: random_lookups(1),
    "learned": lambda: learned(2),
    "learned with plans": lambda: learned(4),
    **{name: partial(learning, name) for name in LEARNING},
}


def options(case: str, model: TableModel) -> dict[str, Any]:
    chosen = dict(CASES[case])
    if chosen.get("processors"):
        chosen["processors"] = LogitsProcessorList([BanFavourite(model)])
    return chosen


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a3_3_law_is_the_whole_models(policy: str, case: str) -> None:
    """4 tokens: room for drafts of 2, whose second is accepted, rejected, or never reached."""
    model = TableModel(seed=1)
    chosen = options(case, model)
    found = law_of_loop(model, POLICIES[policy], n_tokens=4, **chosen)
    assert distance(found, law_of_model(model, n_tokens=4, **chosen)) < ROUNDING


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", ["entropy", "gaps by entropy", "lookup", "lookups by surprise"])
def test_joint_law_of_three_tokens_from_many_draws(policy: str, case: str) -> None:
    model = TableModel(seed=2)
    chosen = options(case, model)
    counts = law_of_loop(model, POLICIES[policy], n_tokens=4, lanes=LANES, **chosen)
    assert sum(counts.values()) == LANES
    law = law_of_model(model, n_tokens=4, **chosen)
    assert chi_square_z(first_tokens(counts, 3), first_tokens(law, 3)) < 5


@pytest.mark.parametrize("name", LEARNING)
def test_what_is_learned_differs_from_path_to_path(name: str) -> None:
    """Else the law of these policies would say nothing about learning: states and the rounds behind them must vary."""
    made: list[Policy] = []

    def make() -> Policy:
        made.append(learning(name))
        return made[-1]

    law_of_loop(TableModel(seed=1), make, Warp(1.0), n_tokens=4)
    assert len({str(policy.state()) for policy in made}) > 2


class DroppingDrafter(Drafter):
    """Drops a drafted token that its distribution finds unlikely: breaks condition 3."""

    def draft(self, *args: Any) -> Draft:
        draft = super().draft(*args)
        if len(draft.tokens) > 1:
            q = draft.distributions[-1]
            assert q is not None
            if float(q[draft.tokens[-1]]) < 0.3:
                del draft.tokens[-1], draft.distributions[-1], draft.states[-1]
        return draft


class DroppingDecoder(Decoder):
    drafter_class = DroppingDrafter


@pytest.mark.parametrize("policy", ["entropy", "gaps by entropy"])
def test_negative_control_dropping_the_triggering_token_is_caught(policy: str) -> None:
    model, make = TableModel(seed=1), POLICIES[policy]
    law = law_of_model(model, Warp(1.0), 4)
    found = law_of_loop(model, make, Warp(1.0), 4, decoder_class=DroppingDecoder)
    assert distance(found, law) > 100 * ROUNDING
    counts = law_of_loop(model, make, Warp(1.0), 4, lanes=LANES, decoder_class=DroppingDecoder)
    assert chi_square_z(first_tokens(counts, 3), first_tokens(law, 3)) > 5


class CarelessChooser(Chooser):
    """Draws from the whole of p where a copied token was rejected: breaks condition 2."""

    def _verify_sampled(self, p: torch.Tensor, drafted: Any, distributions: Any) -> tuple[int, int | None]:
        for i, token in enumerate(drafted):
            if not self.source.accept(float(p[i, token])):
                return i, self.source.draw(p[i])
        bonus = self.source.draw(p[len(drafted)]) if p.shape[0] > len(drafted) else None
        return len(drafted), bonus


class CarelessDecoder(Decoder):
    def __init__(self, model: Any, policy: Any, chooser: Chooser, *args: Any) -> None:
        super().__init__(model, policy, CarelessChooser(chooser.warp, chooser.source), *args)


@pytest.mark.parametrize("policy", ["lookup", "lookups by surprise"])
def test_negative_control_a_copy_rejected_and_drawn_again_is_caught(policy: str) -> None:
    model, make = TableModel(seed=1), POLICIES[policy]
    law = law_of_model(model, Warp(1.0), 4)
    found = law_of_loop(model, make, Warp(1.0), 4, decoder_class=CarelessDecoder)
    assert distance(found, law) > 100 * ROUNDING


class Coin(Policy):
    """Exits and drafts by its own luck: on when the token that it would draw itself is a small one.

    It throws its first number away, so that with the tokens' own seed its toss is the token about to be drawn.
    """

    kind = "coin"

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(candidates=(1,))
        self.generator = generator
        self._toss()

    def _toss(self) -> bool:
        return int(torch.multinomial(torch.ones(VOCAB_SIZE), 1, generator=self.generator)) < VOCAB_SIZE // 2

    def scan(self, state: LayerState) -> bool:
        return self._toss()

    draft = scan


@pytest.mark.parametrize("shared", [False, True], ids=["spawned streams", "shared seed"])
def test_negative_control_shared_seed_is_caught(shared: bool) -> None:
    """Policy and tokens from one seed: the policy's luck tells the token that is about to be drawn."""
    model = TableModel(seed=1)
    counts: dict[tuple[int, ...], float] = {}
    for seed in range(4_000):
        purpose = Purpose.TOKENS if shared else Purpose.POLICY
        source = TorchSource(torch_stream(seed, Purpose.TOKENS))
        decoder = Decoder(model, Coin(torch_stream(seed, purpose)), Chooser(Warp(1.0), source))  # type: ignore[arg-type]
        text = tuple(t for tokens in decoder.decode((0, 1), 4) for t in tokens)[:3]
        counts[text] = counts.get(text, 0.0) + 1
    z = chi_square_z(counts, first_tokens(law_of_model(model, Warp(1.0), 4), 3))
    assert (z > 5) == shared, z
