"""Scores and logits: one entry a token, the whole model's, whoever drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lede.generation import generate
from tests.deciding_policies import KINDS, policy_of
from tests.tiny_models import prompt, tiny_model

IDS = prompt(0, 7)


def teacher_forced(model: Any, ids: list[int]) -> torch.Tensor:
    """Raw logits `(new token, vocabulary)` of transformers' own forward over the finished text."""
    with torch.no_grad():
        logits: torch.Tensor = model.hf_model(torch.tensor([ids])).logits[0, len(IDS) - 1 : -1]
    return logits.float()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a3_8_scores_are_those_of_a_teacher_forced_pass(kind: str, family: str) -> None:
    model = tiny_model(family, torch.float32)
    out = generate(
        model, input_ids=IDS, policy=policy_of(kind), max_new_tokens=30, output_scores=True, output_logits=True
    )
    wanted = teacher_forced(model, out.sequences[0].tolist())
    assert out.scores is not None
    assert out.logits is not None
    for found in (out.scores, out.logits):
        assert len(found) == out.stats.tokens == 30
        assert all(entry.shape == (1, model.vocab_size) and entry.dtype == torch.float32 for entry in found)
        assert float((torch.cat(found) - wanted).abs().max()) < 1e-5


def test_greedy_scores_are_those_of_transformers_with_processors() -> None:
    model = tiny_model("llama")
    settings: dict[str, Any] = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "max_new_tokens": 20}
    wanted = model.hf_model.generate(
        torch.tensor([IDS]), return_dict_in_generate=True, output_scores=True, output_logits=True, **settings
    )
    out = generate(model, input_ids=IDS, policy=policy_of("random"), output_scores=True, output_logits=True, **settings)
    assert torch.equal(out.sequences, wanted.sequences)
    torch.testing.assert_close(torch.cat(out.scores or ()), torch.cat(wanted.scores))
    torch.testing.assert_close(torch.cat(out.logits or ()), torch.cat(wanted.logits))


SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top-k, top-p": {"temperature": 1.3, "top_k": 20, "top_p": 0.8},
    "min-p": {"temperature": 0.8, "min_p": 0.97},
    "typical": {"temperature": 1.0, "typical_p": 0.5},
    "cutoffs": {"temperature": 1.0, "epsilon_cutoff": 7e-3, "eta_cutoff": 9e-3},
    "all with penalties": {
        **{"temperature": 0.7, "top_k": 90, "top_p": 0.9, "min_p": 0.2, "typical_p": 0.9, "epsilon_cutoff": 1e-3},
        **{"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "renormalize_logits": True},
    },
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampled_scores_are_those_that_transformers_would_draw_from(name: str) -> None:
    """At every prefix: warpers in its order, processors before them; -inf where it never draws."""
    model, settings = tiny_model("llama"), SAMPLING[name]
    out = generate(
        model,
        input_ids=IDS,
        policy=policy_of("static"),
        max_new_tokens=12,
        output_scores=True,
        seed=3,
        **settings,
    )
    ids = out.sequences[0].tolist()
    assert out.scores is not None
    for n, found in enumerate(out.scores):
        one = model.hf_model.generate(
            torch.tensor([ids[: len(IDS) + n]]),
            max_new_tokens=1,
            do_sample=True,
            return_dict_in_generate=True,
            output_scores=True,
            **{"top_k": 0, **settings},
        )
        torch.testing.assert_close(found, one.scores[0])
        assert found[0, ids[len(IDS) + n]] > -float("inf")


def test_kept_scores_can_be_written_into() -> None:
    """They are no tensors of inference mode, nor parts of a block that would stay in memory."""
    out = generate(tiny_model("llama"), input_ids=IDS, policy=policy_of("static"), output_scores=True, max_new_tokens=9)
    assert out.scores is not None
    for scores in out.scores:
        assert not scores.is_inference()
        assert scores.untyped_storage().nbytes() <= 8 * scores.numel() * 4
        scores.requires_grad_().sum().backward()


def test_nothing_is_kept_unasked() -> None:
    out = generate(tiny_model("llama"), input_ids=IDS, max_new_tokens=3)
    assert (out.scores, out.logits) == (None, None)
    only = generate(tiny_model("llama"), input_ids=IDS, max_new_tokens=3, output_logits=True)
    assert only.scores is None
    assert len(only.logits or ()) == 3
