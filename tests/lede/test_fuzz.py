"""Any family, policy, settings, prompt and budget: greedy text is that of transformers' `generate`, in float64."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lede.generation import generate
from tests.deciding_policies import KINDS, policy_of
from tests.tiny_models import FAMILY_NAMES, VOCAB_SIZE, plain_generate, prompt, tiny_model

TOKENS = st.integers(0, VOCAB_SIZE - 1)
RECENT = st.integers(1, VOCAB_SIZE - 1)


@st.composite
def generation_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Up to four of the options that change greedy text, or none."""
    options: dict[str, st.SearchStrategy[Any]] = {
        "repetition_penalty": st.sampled_from([0.8, 1.05, 1.3, 2.0]),
        "no_repeat_ngram_size": st.integers(1, 4),
        "encoder_repetition_penalty": st.sampled_from([0.5, 2.0]),
        "encoder_no_repeat_ngram_size": st.integers(2, 3),
        "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=2), min_size=1, max_size=20),
        "suppress_tokens": st.lists(TOKENS, min_size=1, max_size=40),
        "begin_suppress_tokens": st.lists(TOKENS, min_size=1, max_size=40),
        "sequence_bias": st.lists(
            st.tuples(st.lists(TOKENS, min_size=1, max_size=2), st.sampled_from([-3.0, -0.2, 0.2, 1.0])),
            min_size=1,
            max_size=12,
            unique_by=lambda entry: tuple(entry[0]),
        ).map(lambda entries: [[ids, bias] for ids, bias in entries]),
        "forced_eos_token_id": TOKENS,
        "renormalize_logits": st.just(True),
        "remove_invalid_values": st.just(True),
        "min_length": st.integers(1, 24),
        "min_new_tokens": st.integers(1, 12),
        "exponential_decay_length_penalty": st.tuples(st.integers(1, 8), st.sampled_from([1.05, 1.5])),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(options)), max_size=4, unique=True))
    found = {name: draw(options[name]) for name in chosen}
    if draw(st.booleans()) or "exponential_decay_length_penalty" in found:
        found["eos_token_id"] = draw(st.lists(RECENT, min_size=1, max_size=12, unique=True))
    return found


def check(family: str, kind: str, seed: int, length: int, budget: int, chosen: dict[str, Any]) -> None:
    model, ids = tiny_model(family), prompt(seed, length)
    if "min_new_tokens" in chosen:
        chosen = {name: value for name, value in chosen.items() if name != "min_length"}  # one makes the other idle
    if chosen.get("forced_eos_token_id") in chosen.get("suppress_tokens", ()):
        chosen = {name: value for name, value in chosen.items() if name != "suppress_tokens"}  # refused by transformers
    wanted = plain_generate(model, ids, budget, **chosen)
    out = generate(model, input_ids=ids, policy=policy_of(kind, seed), max_new_tokens=budget, **chosen)
    found = out.sequences[0, length:].tolist()
    assert found == wanted
    assert found[1:] == [token for r in out.rounds for token in r.tokens]
    assert out.finish_reason == ("eos" if found[-1] in chosen.get("eos_token_id", ()) else "length")


CASES = given(
    family=st.sampled_from(FAMILY_NAMES),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 40),
    length=st.integers(1, 20),
    budget=st.integers(1, 20),
    chosen=generation_settings(),
)
CALM = (HealthCheck.too_slow, HealthCheck.data_too_large)


@settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=CALM)
@CASES
def test_hundred_cases_equal_transformers(
    family: str, kind: str, seed: int, length: int, budget: int, chosen: dict[str, Any]
) -> None:
    check(family, kind, seed, length, budget, chosen)


@pytest.mark.slow
@settings(max_examples=2_000, deadline=None, derandomize=True, database=None, suppress_health_check=CALM)
@CASES
def test_two_thousand_cases_equal_transformers(
    family: str, kind: str, seed: int, length: int, budget: int, chosen: dict[str, Any]
) -> None:
    check(family, kind, seed, length, budget, chosen)
