"""What policies see while decoding: every feature from its formula, and nothing that verification has not told."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lede.decoding import Decoder
from lede.features import FEATURES, FeatureConfig, primitives
from lede.lookup import LookupConfig
from lede.policies.base import ExitAt, Lookup, PreScan
from lede.seeding import Purpose, torch_stream
from lede.statistics import Meter, Round
from lede.verification import Chooser, TorchSource, Warp
from tests.forecasts import every_feature, made_up
from tests.naive_lookup import naive_features
from tests.recorded_rounds import SeenRound, Witness, WitnessDecoder
from tests.table_model import N_LAYERS, VOCAB_SIZE, TableModel

EVERYTHING = tuple(FEATURES)
PROMPT = (0, 1, 3)


def decode(
    model: TableModel,
    seed: int = 0,
    warp: Warp | None = None,
    draft_agreement: bool = True,
    lookups: tuple[Lookup, ...] = (),
) -> tuple[list[SeenRound], Decoder]:
    features = every_feature((1, 2), top_k=2, draft_agreement=draft_agreement)
    witness = Witness(features, seed, lookups, candidates=(1, 2))
    chooser = Chooser(warp or Warp(), TorchSource(torch_stream(seed, Purpose.TOKENS)))
    decoder = WitnessDecoder(model, witness, chooser, meter=Meter())  # type: ignore[arg-type]
    for _ in decoder.decode(PROMPT, 22):
        pass
    return witness.rounds, decoder


def expected_at(model: TableModel, prefix: tuple[int, ...], layer: int, below: int | None) -> dict[str, float]:
    """Features that the text, the layer and the layer looked at before it define."""
    read = primitives(model.logits(prefix, layer), top_k=2)
    values = {
        "confidence": float(read.confidence),
        "entropy": float(read.entropy),
        "depth": layer / N_LAYERS,
        "surprisal": -float(read.top1),
        "margin": float(read.top1) - float(read.top2),
    }
    if below is not None:
        values["agreement"] = 1.0 if int(model.logits(prefix, below).argmax()) == int(read.token) else -1.0
    return values


def chance(model: TableModel, prefix: tuple[int, ...], layer: int, drafted: int) -> float:
    """Calibrated acceptance of a position from its formula."""
    read, forecast = primitives(model.logits(prefix, layer), top_k=2), made_up((1, 2))
    rows = forecast.later if drafted else forecast.first
    s, m = -float(read.top1), float(read.top1) - float(read.top2)
    inputs = (s, -math.log(math.exp(s) - 1), m, math.exp(-m), drafted, math.log(1 + drafted), 1)
    odds = sum(weight * each for weight, each in zip(rows[layer - 1], inputs, strict=True))
    return 1 / (1 + math.exp(-odds))


def fared(rounds: list[Round], source: str) -> tuple[float, int]:
    """Acceptance of the last drafts of a source, and the rounds since."""
    drafting = [r for r in rounds if r.source == source][-8:]
    drafted, accepted = sum(r.drafted for r in drafting), sum(r.accepted for r in drafting)
    since = next((n for n, r in enumerate(reversed(rounds)) if r.source == source), len(rounds))
    return (accepted + 1) / (drafted + 2), since


def expected_rounds(
    model: TableModel, seen: list[SeenRound], rounds: list[Round], draft_agreement: bool, copying: bool
) -> list[Any]:
    """Observations of every round from the formulas; the confidence trace is checked elsewhere and left out."""
    found = []
    for i, record in enumerate(seen):
        acceptance, since = fared(rounds[:i], "exit")
        known = {"acceptance": acceptance, "since_draft": float(since)}
        copies = dict(zip(("lookup_acceptance", "since_lookup"), fared(rounds[:i], "lookup"), strict=True))
        rows = [{**known, **copies, **(naive_features(record.ids, LookupConfig()) if copying else {})}]
        for k, state in enumerate(record.scan):
            below = None if k == 0 else record.scan[k - 1].layer
            at_layer = expected_at(model, record.ids, state.layer, below)
            first = chance(model, record.ids, state.layer, 0)
            told = {"survival": 1.0, "certainty": 1.0, "in_scan": 1.0, "chance": first, "outlook": first}
            rows.append({**known, **at_layer, **told})
        for state in record.draft:
            prefix = (*record.ids, *record.tokens[: state.n_drafted])
            below = 1 if draft_agreement and state.layer == 2 else None
            reads = [
                primitives(model.logits(prefix[: len(record.ids) + j], state.layer)) for j in range(state.n_drafted)
            ]
            told = {
                "survival": math.prod(math.exp(float(read.top1)) for read in reads),
                "certainty": math.exp(-sum(math.exp(float(read.top2) - float(read.top1)) for read in reads)),
                "in_draft": 1.0,
                "drafted": float(state.n_drafted),
            }
            chances = [chance(model, prefix[: len(record.ids) + j], state.layer, j) for j in range(state.n_drafted + 1)]
            told |= {"chance": chances[-1], "outlook": math.prod(chances)}
            rows.append({**known, **expected_at(model, prefix, state.layer, below), **told})
        found.append([[row.get(name, 0.0) for name in EVERYTHING] for row in rows])
    return found


@pytest.mark.parametrize("lookups", [(), (Lookup(4), Lookup(4), Lookup(6, prune_at=2))], ids=["exits", "lookups"])
@pytest.mark.parametrize("draft_agreement", [False, True])
@pytest.mark.parametrize("warp", [Warp(), Warp(1.0)], ids=["greedy", "sampled"])
def test_every_feature_is_what_its_formula_says(warp: Warp, draft_agreement: bool, lookups: tuple[Lookup, ...]) -> None:
    model = TableModel(seed=5)
    stages: set[str] = set()
    without_trace = [i for i, name in enumerate(EVERYTHING) if name != "trace"]
    for seed in range(6):
        seen, decoder = decode(model, seed, warp, draft_agreement, lookups)
        rounds = decoder.meter.rounds
        wanted = expected_rounds(model, seen, rounds, draft_agreement, bool(lookups))
        for record, rows in zip(seen, wanted, strict=True):
            found = record.everything()
            np.testing.assert_allclose(found[:, without_trace], np.asarray(rows)[:, without_trace], atol=2e-6)
            stages |= {"scan"} if record.scan else set()
            stages |= {"blind"} if isinstance(record.plan, ExitAt) and record.draft else set()
            stages |= {"skip"} if record.plan is PreScan.SKIP else set()
            stages |= {"long draft"} if len(record.draft) > 2 else set()
        stages |= {"copied and kept" for r in rounds if r.source == "lookup" and r.accepted}
        stages |= {"copied in vain" for r in rounds if r.source == "lookup" and not r.accepted}
    copying = {"copied and kept", "copied in vain"} if lookups else set()
    assert stages == {"scan", "blind", "skip", "long draft"} | copying


def test_second_head_reads_are_made_and_counted() -> None:
    """One a position asked about in the draft above the lowest candidate."""
    model, layers = TableModel(seed=5), set()
    for seed in range(4):
        counts = {}
        for second in (False, True):
            seen, decoder = decode(model, seed, draft_agreement=second)
            counts[second] = decoder.meter.head_reads
        asked = [state.layer for record in seen for state in record.draft]
        assert counts[True] - counts[False] == asked.count(2)
        layers |= set(asked)
    assert layers == {1, 2}


class Contrary(TableModel):
    """Says something else at the last layer from its `n`-th verification on; the layers below are the same."""

    def __init__(self, seed: int, n: int) -> None:
        super().__init__(seed)
        self.verifications_left = n

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().head(hidden)
        if int(hidden[0, 0, 1]) < N_LAYERS:
            return logits
        self.verifications_left -= 1
        return logits if self.verifications_left >= 0 else logits.roll(VOCAB_SIZE // 2, dims=-1)


@pytest.mark.parametrize("warp", [Warp(), Warp(1.0)], ids=["greedy", "sampled"])
def test_no_state_knows_a_match_before_verification(warp: Warp) -> None:
    """Two runs whose matches differ from some round on: every state up to that verification is the same."""
    told_apart = 0
    for seed in range(3):
        plain, decoder = decode(TableModel(seed), seed, warp)
        for n, record in enumerate(plain):
            other, contrary = decode(Contrary(seed, 1 + n), seed, warp)  # the prefill is the first
            for mine, theirs in zip(plain[: n + 1], other[: n + 1], strict=True):
                assert (mine.ids, mine.plan, mine.tokens) == (theirs.ids, theirs.plan, theirs.tokens)
                np.testing.assert_array_equal(mine.everything(), theirs.everything())
            rounds = decoder.meter.rounds[n], contrary.meter.rounds[n]
            if record.tokens and rounds[0].accepted != rounds[1].accepted and n + 1 < min(len(plain), len(other)):
                assert not np.array_equal(plain[n + 1].everything()[0], other[n + 1].everything()[0])
                told_apart += 1
    assert told_apart > 3


def test_the_observation_of_the_pre_scan_comes_to_those_who_decide_it() -> None:
    for names, width in ((("entropy", "trace"), 0), (("entropy", "in_scan"), 2)):
        witness = Witness(FeatureConfig(names), candidates=(1, 2))
        decoder = WitnessDecoder(TableModel(0), witness, Chooser(Warp(), TorchSource(torch.Generator())))  # type: ignore[arg-type]
        for _ in decoder.decode(PROMPT, 8):
            pass
        assert {record.before.shape for record in witness.rounds if record.before is not None} == {(width,)}
