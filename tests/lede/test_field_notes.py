"""What users of early exits met elsewhere, row by row: positions, exit layers, acceptance, roll-back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lede.generation import generate
from lede.models import load_model
from lede.policies import StaticPolicy
from tests.tiny_models import N_LAYERS, plain_generate, prompt, tiny_hf_model, tiny_model

IDS = prompt(0, 7)


def test_a1_2_no_exit_layer_given_and_positions_of_drafts_are_those_of_plain_decoding() -> None:
    """Rotary positions, more than three rounds, the default exit layer."""
    hf_model = tiny_hf_model("llama")
    seen: list[list[int]] = []

    def hook(_: Any, __: Any, kwargs: Any) -> None:
        seen.append(kwargs["position_ids"][0].tolist())

    hf_model.model.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
    out = generate(load_model((hf_model, None)), input_ids=IDS, policy=StaticPolicy(), max_new_tokens=30)
    assert out.sequences[0, len(IDS) :].tolist() == plain_generate(tiny_model("llama"), IDS, 30)
    assert sum(r.drafted > 0 for r in out.rounds) > 3
    wanted, at = [list(range(len(IDS)))], len(IDS)
    for r in out.rounds:
        wanted += [[at + i] for i in range(1 + r.drafted)]
        at += len(r.tokens)
    assert seen == wanted


@pytest.mark.parametrize("layer", [-1, 0, N_LAYERS, N_LAYERS + 1])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a1_6_an_exit_layer_outside_the_range_is_refused_and_changes_nothing(family: str, layer: int) -> None:
    hf_model = tiny_hf_model(family)
    model = load_model((hf_model, None))
    wanted, config = plain_generate(tiny_model(family), IDS, 8), hf_model.config.to_dict()
    with pytest.raises(ValueError, match=r"outside 1\.\.5|exit_layer must be at least 1"):
        generate(model, input_ids=IDS, policy=StaticPolicy(exit_layer=layer), max_new_tokens=8)
    assert hf_model.config.to_dict() == config
    assert plain_generate(model, IDS, 8) == wanted


class Fails(StaticPolicy):
    """Fails at its third question."""

    asked = 0

    def draft(self, state: Any) -> bool:
        self.asked += 1
        if self.asked == 3:
            raise RuntimeError("failed while drafting")
        return super().draft(state)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a1_6_after_an_exception_while_drafting_the_model_is_as_before(family: str) -> None:
    model = load_model((tiny_hf_model(family), None))
    wanted = plain_generate(tiny_model(family), IDS, 12)
    with pytest.raises(RuntimeError, match="failed while drafting"):
        generate(model, input_ids=IDS, policy=Fails(exit_layer=2, draft_length=4), max_new_tokens=12)
    assert plain_generate(model, IDS, 12) == wanted
    again = generate(model, input_ids=IDS, policy=StaticPolicy(exit_layer=2, draft_length=4), max_new_tokens=12)
    assert again.sequences[0, len(IDS) :].tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a1_7_a_draft_by_the_whole_model_is_accepted_to_the_last_token(dtype: torch.dtype) -> None:
    """The last layer adds nothing, so the draft from layer L-1 is the whole model's; prompts go through all layers."""
    hf_model = tiny_hf_model("llama", dtype)
    last = hf_model.model.layers[-1]
    with torch.no_grad():
        last.self_attn.o_proj.weight.zero_()
        last.mlp.down_proj.weight.zero_()
    policy = StaticPolicy(exit_layer=N_LAYERS - 1, draft_length=6)
    out = generate(load_model((hf_model, None)), input_ids=IDS, policy=policy, max_new_tokens=40)
    assert out.stats.drafted > 20
    assert out.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("removed", [0, 1, 3, 9])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_a2_1_after_a_rewind_the_logits_are_those_of_a_fresh_prefill(family: str, removed: int) -> None:
    """None, one, some and all of the tokens are taken back; with windows of 8, the window was passed before."""
    model, ids = tiny_model(family), prompt(5, 9)
    following = prompt(6, 4)
    with torch.inference_mode():
        cache = model.new_cache(32)
        block = model.block(cache, 0, len(ids))
        model.run_layers(model.embed(torch.tensor([ids]), block), 0, model.n_layers, block)
        cache.rewind(len(ids) - removed)
        assert cache.lengths == [len(ids) - removed] * model.n_layers
        block = model.block(cache, len(ids) - removed, len(following))
        hidden = model.run_layers(model.embed(torch.tensor([following]), block), 0, model.n_layers, block)
        wanted = model.hf_model(torch.tensor([[*ids[: len(ids) - removed], *following]])).logits[0, -len(following) :]
        torch.testing.assert_close(model.head(hidden)[0], wanted, rtol=0, atol=1e-10)
