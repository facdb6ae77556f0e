"""Single readings and observations are those of the whole-table functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lede.features import (
    DRAFT,
    FEATURES,
    PRE_SCAN,
    RECENT_ROUNDS,
    SCAN,
    WALL_CLOCK_FEATURES,
    ConfidenceTrace,
    FeatureConfig,
    primitives,
    surprisal,
)
from lede.head_reading import HeadReader, Reading
from lede.history import History
from lede.observer import Doubt, Observer
from tests.forecasts import made_up

READ = ("surprisal", "margin", "entropy", "confidence")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def rows() -> list[torch.Tensor]:
    """Flat, peaked, shifted, banned, tied and tiny rows of logits."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(n, generator=generator) * s for n, s in itertools.product((2, 7, 1000, 8192), (0.01, 1, 9))]
    peaked = torch.zeros(100)
    peaked[7] = 300.0
    banned = torch.randn(50, generator=generator)
    banned[::3] = -float("inf")
    barred = torch.randn(50, generator=generator)
    barred[::3] = torch.finfo(torch.float16).min  # as a bias bans tokens
    hidden = torch.randn(50, generator=generator)
    hidden[5] = torch.finfo(torch.float32).min
    one_left = torch.full((9,), -float("inf"))
    one_left[4] = 2.0
    return [
        *found,
        peaked,
        banned,
        barred,
        hidden,
        one_left,
        found[3] + 1e4,
        torch.tensor([0.0, 2.0, 2.0]),
        torch.tensor([0.3]),
    ]


def agree(reading: Reading, logits: torch.Tensor, top_k: int, tolerance: float = 1e-5) -> None:
    wanted = primitives(logits, top_k)
    clipped = [min(value, 50.0) for value in (reading.surprisal, reading.margin, reading.confidence)]
    margin = min(float(wanted.top1) - float(wanted.top2), 50.0)
    np.testing.assert_allclose(clipped, [-float(wanted.top1), margin, float(wanted.confidence)], atol=tolerance)
    assert reading.entropy == pytest.approx(float(wanted.entropy), abs=tolerance)
    assert reading.token == int(wanted.token)


@pytest.mark.parametrize("top_k", [1, 2, 5, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_readings_are_the_primitives(dtype: torch.dtype, top_k: int) -> None:
    reader = HeadReader(FeatureConfig((*READ, "agreement"), top_k=top_k))
    for row in rows():
        logits = row.to(dtype)
        kept = logits.clone()
        agree(reader.read(logits), logits, top_k)
        agree(reader._by_torch(logits), logits, top_k)
        assert reader.token(logits) == int(logits.argmax())
        assert torch.equal(logits, kept)
        assert surprisal(logits) == pytest.approx(-float(primitives(logits).top1), abs=1e-5)


@given(st.lists(st.floats(-200, 200, width=32), min_size=2, max_size=60), st.integers(1, 8))
def test_readings_of_any_logits(values: list[float], top_k: int) -> None:
    logits = torch.tensor(values)
    agree(HeadReader(FeatureConfig((*READ, "agreement"), top_k=top_k)).read(logits), logits, top_k)


@pytest.mark.parametrize("names", [names for n in (1, 2) for names in itertools.combinations(READ, n)])
def test_only_what_is_named_is_read(names: tuple[str, ...]) -> None:
    row = rows()[5]
    whole, part = (HeadReader(FeatureConfig(n)).read(row) for n in ((*READ, "agreement"), names))
    for name in READ:
        wanted = getattr(whole, name) if name in (*names, "surprisal") else 0.0
        assert getattr(part, name) == pytest.approx(wanted, abs=1e-6)


def some_history() -> History:
    history = History(ConfidenceTrace(2.0, window=8))
    history.trace.push(0.5)  # type: ignore[union-attr]
    history.verified(4, 3)
    history.verified(0, 0)
    return history


def chance(surprisal: float, margin: float, drafted: int) -> float:
    """Of the forecast of the tests below, at its layer."""
    chances = made_up((4,)).log_chances(np.array([4]), [surprisal], [margin], np.array([drafted]))
    return math.exp(chances[0])


@pytest.mark.parametrize("names", [tuple(FEATURES), WALL_CLOCK_FEATURES, ("surprisal",), ("depth", "entropy")])
@pytest.mark.parametrize("stage", [PRE_SCAN, SCAN, DRAFT])
def test_observations_are_those_of_the_config(names: tuple[str, ...], stage: int) -> None:
    features = FeatureConfig(names, forecast=made_up((4,)) if "chance" in names else None)
    observer, history = Observer(features, n_layers=16, vocab_size=1000), some_history()
    reading = HeadReader(FeatureConfig((*READ, "agreement"))).read(rows()[6])
    values: dict[str, float] = {"trace": 0.5, "acceptance": 4 / 6, "since_draft": 1}
    if stage == PRE_SCAN:
        seen = observer.before_scan(history)
        values |= {"lookup_acceptance": 0.5, "since_lookup": 2}
    else:
        read = {name: getattr(reading, name) for name in READ}
        values |= {**read, "depth": 4 / 16, "agreement": -1.0, "survival": 1.0, "certainty": 1.0}
        if stage == SCAN:
            seen = observer.in_scan(history, 4, reading, reading.token + 1)
            values["in_scan"] = 1.0
            values["chance"] = values["outlook"] = chance(reading.surprisal, reading.margin, 0)
        else:
            doubt = Doubt()
            doubt.add(0.3, math.log(2))
            doubt.add(0.4, math.log(4))
            seen = observer.in_draft(history, 4, reading, reading.token + 1, n_drafted=2, doubt=doubt)
            values |= {"drafted": 2, "in_draft": 1.0, "survival": math.exp(-0.7)}
            values["certainty"] = math.exp(-(math.exp(-math.log(2)) + 0.25))
            values["chance"] = chance(reading.surprisal, reading.margin, 2)
            values["outlook"] = chance(0.3, math.log(2), 0) * chance(0.4, math.log(4), 1) * values["chance"]
    assert seen.dtype == np.float32
    np.testing.assert_allclose(seen, features.observe(values, 16, 1000), rtol=1e-6)
    defined = {name for name in names if stage in FEATURES[name].stages}
    told = {name for name, value in zip(names, seen, strict=True) if value}
    assert told <= defined


def test_observations_are_clipped_and_new_each_time() -> None:
    observer = Observer(FeatureConfig(("surprisal", "trace", "since_draft", "drafted")), 16, 1000)
    history = History(ConfidenceTrace(99.0, window=8))
    for _ in range(40):
        history.verified(0, 0)
    first = observer.in_draft(history, 4, Reading(surprisal=1e4), -1, n_drafted=100, doubt=Doubt())
    assert first.tolist() == [50.0, 50.0, 32.0, 64.0]
    assert observer.before_scan(history) is not first


def test_agreement_is_unknown_without_a_token_before() -> None:
    observer = Observer(FeatureConfig(("agreement",)), 16, 1000)
    seen = [float(observer.in_scan(History(), 4, Reading(token=3), before)[0]) for before in (-1, 3, 4)]
    assert seen == [0.0, 1.0, -1.0]


@pytest.mark.parametrize(
    "rounds", [[], [(4, 4)], [(0, 0)] * 3, [(3, 1), (0, 0), (2, 2)], [(i, i // 2) for i in range(1, 30)]]
)
def test_history_counts_the_last_rounds_that_drafted(rounds: Sequence[tuple[int, int]]) -> None:
    history = History()
    for drafted, accepted in rounds:
        history.verified(drafted, accepted)
    recent = [r for r in rounds if r[0]][-RECENT_ROUNDS:]
    drafted, accepted = sum(d for d, _ in recent), sum(a for _, a in recent)
    assert history.layers.acceptance == pytest.approx((accepted + 1) / (drafted + 2))
    assert history.layers.ratio == (accepted / drafted if drafted else None)
    since = list(itertools.takewhile(lambda r: not r[0], reversed(rounds)))
    assert history.layers.since == len(since)
