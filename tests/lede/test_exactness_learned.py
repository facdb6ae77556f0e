"""Greedy text is the plain model's under learned policies that use every feature and decide every stage."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import torch

from lede.decoding import Decoder
from lede.drafting import Draft, Drafter
from lede.policies import LearnedPolicy
from lede.policies.base import ExitAt, Lookup, Plan, SkipSublayers
from lede.verification import Chooser, TorchSource, Warp
from tests.forecasts import every_feature
from tests.recorded_rounds import Witness, WitnessDecoder
from tests.tiny_models import plain_generate, prompt, tiny_model

FAMILIES = {"llama": 0, "gemma3_text": 7, "gpt2": 0}  # with the seed of the model
CANDIDATES = (1, 2, 3, 5)
FEATURES_HERE = every_feature(CANDIDATES, draft_agreement=True)
BUDGET = 48


@cache
def observations(family: str) -> np.ndarray:
    """States `(decision, feature)` of the family, so that policies can be made whose decisions vary."""
    witness = Witness(FEATURES_HERE, candidates=CANDIDATES)
    decoder = WitnessDecoder(tiny_model(family, seed=FAMILIES[family]), witness, chooser())
    for _ in decoder.decode(prompt(0, 5), BUDGET):
        pass
    return np.concatenate([record.everything() for record in witness.rounds])


def chooser() -> Chooser:
    return Chooser(Warp(), TorchSource(torch.Generator()))


def random_policy(family: str, seed: int, n_outputs: int) -> LearnedPolicy:
    """Random weights on normalised states."""
    rng, seen = np.random.default_rng(seed), observations(family)
    sizes = [seen.shape[1], 16, n_outputs]
    layers = [(rng.normal(size=(b, a)), rng.normal(size=b)) for a, b in pairwise(sizes)]
    if n_outputs > 2:
        layers[-1][1][0] += 4 * seed  # or no plan of so many would ever be to skip
    return LearnedPolicy.from_network(
        layers, features=FEATURES_HERE, candidates=CANDIDATES, mean=seen.mean(0), std=seen.std(0) + 1e-3
    )


class Watcher(Drafter):
    """Counts plans and drafts."""

    plans: ClassVar[Counter[str]] = Counter()

    def draft(self, ids: list[int], choice: Plan, *rest: object) -> Draft:
        draft = super().draft(ids, choice, *rest)  # type: ignore[arg-type]
        assert not isinstance(choice, SkipSublayers | Lookup)  # these draft from exits alone
        self.plans["blind" if isinstance(choice, ExitAt) else choice.value] += 1
        self.plans["drafted"] += bool(draft.tokens)
        return draft


class Watched(Decoder):
    drafter_class = Watcher


@pytest.mark.parametrize("n_outputs", [2, 2 + len(CANDIDATES)])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_the_plain_models(family: str, n_outputs: int) -> None:
    model = tiny_model(family, seed=FAMILIES[family])
    Watcher.plans.clear()
    for prompt_seed, length in ((0, 5), (1, 17)):
        ids = prompt(prompt_seed, length)
        wanted = plain_generate(model, ids, BUDGET)
        for seed in range(8):
            for eos in (frozenset[int](), frozenset(wanted[20:21])):
                decoder = Watched(model, random_policy(family, seed, n_outputs), chooser(), eos)
                found = [token for tokens in decoder.decode(ids, BUDGET) for token in tokens]
                ends = [i for i, token in enumerate(wanted) if token in eos]
                assert found == (wanted[: ends[0] + 1] if ends else wanted)
    assert Watcher.plans["scan"]
    assert Watcher.plans["drafted"]
    assert (Watcher.plans["skip"] > 0) == (Watcher.plans["blind"] > 0) == (n_outputs > 2), Watcher.plans
