"""Sampling with processors and with transformers' own warpers keeps the whole model's law, through the real loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    EtaLogitsWarper,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

from lede.decoding import Decoder
from lede.policies import RandomPolicy, StaticPolicy
from lede.policies.base import LayerState, Policy
from lede.verification import Chooser, Warp
from tests.table_model import Law, Paths, TableModel, distance, law_of_loop, law_of_model

ROUNDING = 2e-6  # distributions are float32


class Unsure(Policy):
    """Drafts on by a rule that changes with what was drafted so far."""

    kind = "unsure"

    def __init__(self) -> None:
        super().__init__(candidates=(1, 2))

    def scan(self, state: LayerState) -> bool:
        return state.layer == 2

    def draft(self, state: LayerState) -> bool:
        return state.n_drafted < 2


def gaps() -> Policy:
    policy = RandomPolicy(seed=0, candidates=(1, 2), gap_probability=0.6)
    policy.check_model(TableModel())  # type: ignore[arg-type]  # has what is asked of it
    return policy


POLICIES: dict[str, Callable[[], Policy]] = {
    "static": lambda: StaticPolicy(exit_layer=1, draft_length=3),
    "unsure": Unsure,
    "random": lambda: RandomPolicy(seed=1, candidates=(1, 2)),
    "random gaps": gaps,
}
PROCESSORS: dict[str, list[Any]] = {
    "penalties": [RepetitionPenaltyLogitsProcessor(1.7), NoRepeatNGramLogitsProcessor(2)],
    "warpers": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(3), MinPLogitsWarper(0.2), LogitNormalization()],
    "typical": [TemperatureLogitsWarper(1.4), TypicalLogitsWarper(0.7), EtaLogitsWarper(0.05)],
    "everything": [
        *(RepetitionPenaltyLogitsProcessor(0.6), NoRepeatNGramLogitsProcessor(3), TemperatureLogitsWarper(1.2)),
        *(MinPLogitsWarper(0.15), TypicalLogitsWarper(0.9)),
    ],
}


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        *(("static", name) for name in PROCESSORS),
        *(("unsure", "penalties"), ("random", "warpers"), ("random gaps", "everything")),
    ],
)
def test_a3_4_law_is_the_whole_models_under_processors(policy: str, name: str) -> None:
    """Processors see the drafted tokens before their position, in the draft and in verification."""
    model, processors = TableModel(seed=1), LogitsProcessorList(PROCESSORS[name])
    wanted = law_of_model(model, Warp(1.0), 4, processors=processors)
    assert distance(wanted, law_of_model(model, Warp(1.0), 4)) > 0.05
    found = law_of_loop(model, POLICIES[policy], Warp(1.0), 4, processors=processors)
    assert distance(found, wanted) < ROUNDING


class TwoFaced(Chooser):
    """Draws a drafted token from what processors made of the logits and reports another distribution."""

    def choose(self, logits: torch.Tensor, prefix: Sequence[int]) -> tuple[int, torch.Tensor | None]:
        token, _ = super().choose(logits, prefix)
        return token, self.warp.probabilities(logits.float())


def test_negative_control_another_q_in_the_ratio_is_caught() -> None:
    model, processors = TableModel(seed=1), LogitsProcessorList(PROCESSORS["penalties"])
    law: Law = {}
    paths = Paths()
    for _ in paths:
        chooser = TwoFaced(Warp(1.0), paths, processors)
        decoder = Decoder(model, StaticPolicy(exit_layer=1, draft_length=3), chooser)  # type: ignore[arg-type]
        text = tuple(t for tokens in decoder.decode((0, 1), 4) for t in tokens)
        law[text] = law.get(text, 0.0) + paths.weight
    assert distance(law, law_of_model(model, Warp(1.0), 4, processors=processors)) > 100 * ROUNDING
