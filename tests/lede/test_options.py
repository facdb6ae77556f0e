"""Greedy options are those of transformers' `generate`: processors, lengths, ends, in float64 without tolerance."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from lede.generation import GenerateOutput, generate
from lede.models import load_model
from tests.deciding_policies import KINDS, policy_of
from tests.tiny_models import plain_generate, prompt, tiny_hf_model, tiny_model

FAMILIES = ("llama", "gemma3_text", "gpt2")
IDS = prompt(0, 7)
BUDGET = 24


@cache
def plain_text(family: str) -> tuple[int, ...]:
    return tuple(plain_generate(tiny_model(family), IDS, 40))


def options(family: str) -> dict[str, dict[str, Any]]:
    """Settings that change the text, made from the text that they change."""
    text = plain_text(family)
    eos = text[3]
    return {
        "repetition penalty": {"repetition_penalty": 1.4},
        "no repeated n-gram": {"no_repeat_ngram_size": 2},
        "min new tokens": {"min_new_tokens": 12, "eos_token_id": eos},
        "min length": {"min_length": len(IDS) + 9, "eos_token_id": [eos, text[5]]},
        "bad words": {"bad_words_ids": [[text[2]], [text[4], text[5]]]},
        "sequence bias": {"sequence_bias": [[[text[1]], -5.0], [[11, 12], 3.0], [[11], 4.0]]},
        "suppressed": {"suppress_tokens": [text[1], text[6]], "begin_suppress_tokens": [text[0]]},
        "forced end": {"forced_eos_token_id": 9},
        "decaying length": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 77},
        "of the prompt": {"encoder_repetition_penalty": 3.0, "encoder_no_repeat_ngram_size": 2},
        "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
        "all on": {
            **{"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 6, "eos_token_id": eos},
            **{"bad_words_ids": [[text[2]]], "sequence_bias": [[[text[1]], -2.0]], "renormalize_logits": True},
            **{"remove_invalid_values": True, "suppress_tokens": [3]},
        },
    }


def new_tokens(out: GenerateOutput, n_prompt: int = len(IDS)) -> list[int]:
    """The new tokens, after checking that every count agrees with them."""
    new = out.sequences[0, n_prompt:].tolist()
    assert new[1:] == [token for r in out.rounds for token in r.tokens]
    assert out.stats.tokens == len(new)
    assert all(r.accepted <= min(r.drafted, len(r.tokens)) for r in out.rounds)
    return list(new)


@pytest.mark.parametrize("name", options("llama"))
@pytest.mark.parametrize("family", FAMILIES)
def test_a3_6_options_are_those_of_transformers(family: str, name: str) -> None:
    """Each alone and all of them on: penalties depend on tokens inside the draft."""
    model, chosen = tiny_model(family), options(family)[name]
    wanted = plain_generate(model, IDS, BUDGET, **chosen)
    assert wanted != list(plain_text(family)[:BUDGET])
    for kind in KINDS if family == "llama" else ("static", "random gaps", "learned"):
        out = generate(model, input_ids=IDS, policy=policy_of(kind), max_new_tokens=BUDGET, **chosen)
        assert new_tokens(out) == wanted, kind
    given = GenerationConfig(max_new_tokens=BUDGET, **chosen)
    out = generate(model, input_ids=IDS, policy=policy_of("static"), generation_config=given)
    assert new_tokens(out) == wanted


def test_policies_of_these_tests_draft_and_fail() -> None:
    """Else the tests above would say little."""
    chosen = options("llama")["all on"]
    for kind in KINDS[1:]:
        out = generate(tiny_model("llama"), input_ids=IDS, policy=policy_of(kind), max_new_tokens=100, **chosen)
        assert 0 < out.stats.accepted < out.stats.drafted, kind


def test_first_token_can_be_forced() -> None:
    """Behind a prompt of one token, as in transformers."""
    model = tiny_model("llama")
    wanted = plain_generate(model, [5], 8, forced_bos_token_id=17)
    assert wanted[0] == 17
    out = generate(model, input_ids=[5], policy=policy_of("static"), max_new_tokens=8, forced_bos_token_id=17)
    assert new_tokens(out, 1) == wanted


def test_settings_of_the_call_precede_those_of_the_config() -> None:
    model = tiny_model("llama")
    given = GenerationConfig(max_new_tokens=9, repetition_penalty=2.0, no_repeat_ngram_size=2)
    out = generate(model, input_ids=IDS, generation_config=given, repetition_penalty=1.2, max_new_tokens=20)
    assert new_tokens(out) == plain_generate(model, IDS, 20, repetition_penalty=1.2, no_repeat_ngram_size=2)
    assert (given.max_new_tokens, given.repetition_penalty) == (9, 2.0)


def test_own_processors_join_those_of_the_settings() -> None:
    model = tiny_model("llama")
    own = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])
    wanted = plain_generate(model, IDS, BUDGET, repetition_penalty=1.2, no_repeat_ngram_size=2)
    out = generate(
        model,
        input_ids=IDS,
        policy=policy_of("random"),
        logits_processor=own,
        repetition_penalty=1.2,
        max_new_tokens=BUDGET,
    )
    assert new_tokens(out) == wanted


def test_max_length_counts_the_prompt() -> None:
    model = tiny_model("llama")
    out = generate(model, input_ids=IDS, policy=policy_of("static"), max_length=len(IDS) + 5)
    assert new_tokens(out) == list(plain_text("llama")[:5])
    assert out.finish_reason == "length"
    with pytest.raises(ValueError, match=r"max_length is 7, but the prompt has 7 tokens already"):
        generate(model, input_ids=IDS, max_length=len(IDS))
    assert generate(model, input_ids=IDS, max_length=8, max_new_tokens=3).stats.tokens == 3


def test_criteria_for_length_and_end_take_the_place_of_the_settings() -> None:
    """As in transformers, where a criterion of the caller's replaces the one of the same kind."""
    model, text = tiny_model("llama"), plain_text("llama")
    shorter = StoppingCriteriaList([MaxLengthCriteria(len(IDS) + 3)])
    out = generate(model, input_ids=IDS, policy=policy_of("static"), stopping_criteria=shorter, max_new_tokens=10)
    assert (new_tokens(out), out.finish_reason) == (list(text[:3]), "length")
    at = text[4]
    ends = StoppingCriteriaList([EosTokenCriteria(at)])
    out = generate(model, input_ids=IDS, policy=policy_of("static"), stopping_criteria=ends, eos_token_id=text[1])
    assert (new_tokens(out), out.finish_reason) == (list(text[: text.index(at) + 1]), "eos")


def test_a4_6_without_end_of_sequence_it_runs_to_the_budget() -> None:
    model = load_model("demo")
    every: tuple[dict[str, Any], ...] = ({}, {"repetition_penalty": 1.1, "min_new_tokens": 4})
    for settings in every:
        out = generate(model, "x = 1\n", policy=policy_of("static"), max_new_tokens=40, eos_token_id=(), **settings)
        assert (out.stats.tokens, out.finish_reason) == (40, "length")


def test_a1_12_one_token_budget() -> None:
    out = generate(tiny_model("llama"), input_ids=IDS, policy=policy_of("static"), max_new_tokens=1)
    assert (new_tokens(out), out.stats.acceptance_rate) == (list(plain_text("llama")[:1]), None)


class EqualTops(LogitsProcessor):
    """Makes the two likeliest tokens exactly as likely as one another."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        top = scores.topk(2, dim=-1)
        return scores.scatter(1, top.indices, top.values.max(-1, keepdim=True).values.expand(-1, 2))  # type: ignore[return-value]


def test_a3_2_of_two_equal_tops_both_paths_take_the_lowest_id() -> None:
    """At every position, in draft and verification, and as transformers' own greedy decoding."""
    model, ties = tiny_model("llama"), LogitsProcessorList([EqualTops()])
    wanted = plain_generate(model, IDS, BUDGET, logits_processor=ties)
    assert wanted != list(plain_text("llama")[:BUDGET])
    for kind in KINDS:
        out = generate(
            model,
            input_ids=IDS,
            policy=policy_of(kind),
            logits_processor=ties,
            max_new_tokens=BUDGET,
            output_scores=True,
        )
        assert new_tokens(out) == wanted
        for token, scores in zip(wanted, out.scores or (), strict=True):
            assert token == int((scores[0] == scores[0].max()).nonzero()[0])


REFUSED: dict[str, Any] = {
    "num_beams": 3,
    "num_return_sequences": 2,
    "guidance_scale": 1.5,
    "prompt_lookup_num_tokens": 4,
    "assistant_early_exit": 2,
    "constraints": ["x"],
    "force_words_ids": [[1]],
    "cache_implementation": "static",
    "output_attentions": True,
    "output_hidden_states": True,
    "token_healing": True,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "compile_config": {"mode": "default"},
    "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=5, keys=[1, 2, 3]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    hf_model = tiny_hf_model("llama")
    hf_model.model.layers[0].register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    shown = "SynthID" if name == "watermarking_config" else name
    with pytest.raises(ValueError, match=shown):
        generate(load_model((hf_model, None)), input_ids=IDS, **{name: REFUSED[name]})


@pytest.mark.parametrize("value", ["dynamic", "hybrid", None])
def test_caches_that_change_nothing_are_passed_over(value: str | None) -> None:
    given = GenerationConfig(max_new_tokens=4, cache_implementation=value)
    out = generate(tiny_model("llama"), input_ids=IDS, generation_config=given)
    assert new_tokens(out) == list(plain_text("llama")[:4])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_p": 0.1}, "min_p acts on sampling alone"),
        ({"do_sample": False, "temperature": 0.7}, "do_sample=False decodes greedily"),
        ({"repetition_penalty": -1.0}, "penalty"),
        ({"no_repeat_ngram_size": 1.5}, "ngram_size"),
        ({"max_time": 0}, "max_time must be a positive number"),
        ({"stop_strings": ["a"]}, "stop_strings need the model's tokenizer"),
        ({"stop_strings": [""]}, "stop_strings must be texts"),
        ({"exponential_decay_length_penalty": (3, 1.1)}, "set eos_token_id"),
        ({"generation_config": {"max_new_tokens": 3}}, "must be transformers' GenerationConfig, got dict"),
        ({"repetition_penalti": 1.2}, "does not know repetition_penalti"),
    ],
)
def test_settings_out_of_range_are_refused_before_any_work(settings: dict[str, Any], message: str) -> None:
    hf_model = tiny_hf_model("llama")
    hf_model.model.layers[0].register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=message):
        generate(load_model((hf_model, None)), input_ids=IDS, **settings)


@pytest.mark.parametrize("level", ["warning", "warning_once"])
def test_transformers_has_no_doubts_about_what_it_is_asked(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its validation would log flags that it takes for idle."""
    told: list[Any] = []
    monkeypatch.setattr(f"transformers.generation.configuration_utils.logger.{level}", lambda *text: told.append(text))
    every: tuple[dict[str, Any], ...] = (
        {"output_scores": True, "output_logits": True},
        {"temperature": 0.7, "top_k": 3, "min_p": 0.1, "output_scores": True},
        {"temperature": 0.0},
        {"generation_config": GenerationConfig(do_sample=True, top_p=0.5, typical_p=0.9)},
    )
    for settings in every:
        generate(tiny_model("llama"), input_ids=IDS, max_new_tokens=2, **settings)
    assert told == []


def test_a_decided_setting_of_the_models_own_config_is_not_warned_about() -> None:
    hf_model = tiny_hf_model("llama")
    hf_model.generation_config.repetition_penalty = 1.3
    model = load_model((hf_model, None))
    wanted = plain_generate(tiny_model("llama"), IDS, 6, repetition_penalty=1.3)
    assert new_tokens(generate(model, input_ids=IDS, max_new_tokens=6, repetition_penalty=1.3)) == wanted
    generate(model, input_ids=IDS, max_new_tokens=6, generation_config=GenerationConfig(repetition_penalty=1.0))


def test_a_temperature_takes_top_k_and_top_p_from_the_config() -> None:
    config = GenerationConfig(top_k=2, top_p=0.9)
    by_config = [
        new_tokens(
            generate(
                tiny_model("llama"), input_ids=IDS, generation_config=config, temperature=1.5, max_new_tokens=20, seed=s
            )
        )
        for s in range(3)
    ]
    by_name = [
        new_tokens(
            generate(tiny_model("llama"), input_ids=IDS, temperature=1.5, top_k=2, top_p=0.9, max_new_tokens=20, seed=s)
        )
        for s in range(3)
    ]
    assert by_config == by_name
    alone = [
        new_tokens(generate(tiny_model("llama"), input_ids=IDS, temperature=1.5, max_new_tokens=20, seed=s))
        for s in range(3)
    ]
    assert alone != by_name


def test_own_processors_know_their_row_of_a_batch() -> None:
    """The number of the row is what a prefix function is asked with."""
    rows = [IDS[:4], IDS]
    allowed = [[3, 4, 5], [50, 60]]
    own = LogitsProcessorList([PrefixConstrainedLogitsProcessor(lambda row, ids: allowed[row], 1)])
    outs = generate(tiny_model("llama"), input_ids=rows, logits_processor=own, max_new_tokens=8)
    for out, row, ids in zip(outs, rows, allowed, strict=True):
        assert set(out.sequences[0, len(row) :].tolist()) <= set(ids)


def test_numbers_of_sampling_may_be_of_numpy() -> None:
    model = tiny_model("llama")
    given: dict[str, Any] = {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "seed": 3, "max_new_tokens": 6}
    wanted = generate(model, input_ids=IDS, **given).sequences
    every: tuple[dict[str, Any], ...] = ({}, {"repetition_penalty": 1.0001})
    for more in every:
        arrays: dict[str, Any] = {name: np.asarray(value)[()] for name, value in given.items()}
        assert torch.equal(generate(model, input_ids=IDS, **arrays, **more).sequences, wanted)


def test_end_of_sequence_ids_may_be_of_numpy_or_torch() -> None:
    wanted = plain_generate(tiny_model("llama"), IDS, 6)
    for end in (np.int64(wanted[2]), torch.tensor(wanted[2]), torch.tensor([wanted[2]])):
        out = generate(tiny_model("llama"), input_ids=IDS, max_new_tokens=20, eos_token_id=end)
        assert out.finish_reason == "eos"
