"""`generate` of a batch: what it takes, refuses and returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TextStreamer

from lede.batch_generation import batch_stats
from lede.generation import GenerateOutput, generate, prefill
from lede.models import load_model
from lede.policies import (
    ConfLayersPolicy,
    DraftVerifyPolicy,
    DynamicExitLayerPolicy,
    Policy,
    PreScan,
    RandomPolicy,
    StaticPolicy,
    SwiftPolicy,
)
from lede.policies.base import PreScanState, SkipSublayers
from tests.tiny_models import plain_generate, prompt, tiny_hf_model, tiny_model

ROWS = [prompt(seed, length) for seed, length in ((0, 5), (1, 11), (2, 2))]
PAD = 0


def batch(rows: Any = ROWS, **arguments: Any) -> list[GenerateOutput]:
    outputs = generate(tiny_model("llama"), input_ids=rows, **{"max_new_tokens": 8, **arguments})
    assert isinstance(outputs, list)
    return outputs


def sequences(outputs: list[GenerateOutput]) -> list[list[int]]:
    return [out.sequences[0].tolist() for out in outputs]


def test_a_tensor_padded_on_the_left_is_the_list() -> None:
    """Positions come from the mask, so rows are those of unpadded single runs."""
    width = max(map(len, ROWS))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in ROWS])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ROWS])
    policy = StaticPolicy(exit_layer=3, draft_length=3)
    wanted = sequences(batch(policy=policy))
    assert sequences(batch(ids, attention_mask=mask, policy=policy)) == wanted
    assert wanted == [[*row, *plain_generate(tiny_model("llama"), row, 8)] for row in ROWS]


def test_padding_on_the_right_is_refused_before_any_work() -> None:
    hf_model = tiny_hf_model("llama")
    hf_model.model.layers[0].register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    ids, mask = torch.tensor([[5, 6, 7], [8, PAD, PAD]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    with pytest.raises(ValueError, match="row 1 is padded on the right"):
        generate(load_model((hf_model, None)), input_ids=ids, attention_mask=mask)


REFUSED: dict[str, tuple[Any, str]] = {
    "draft-verify": (DraftVerifyPolicy, "draft-verify policy learns from the text"),
    "del": (DynamicExitLayerPolicy, "del policy learns from the text"),
    "swift": (lambda: SwiftPolicy(bayes_interval=0), "swift policy learns from the text"),
    "conflayers": (ConfLayersPolicy, "conflayers policy learns from the text"),
    "random gaps": (lambda: RandomPolicy(gap_probability=0.5), "random policy drafts with gaps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_policies_of_one_text_are_refused_by_name_before_any_work(name: str) -> None:
    make, message = REFUSED[name]
    hf_model = tiny_hf_model("llama")
    hook = hf_model.model.layers[0].register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    model = load_model((hf_model, None))
    with pytest.raises(ValueError, match=rf"{message}.*decode the prompts one by one"):
        generate(model, input_ids=ROWS, policy=make(), max_new_tokens=8)
    hook.remove()
    out = generate(model, input_ids=ROWS[:1], policy=make(), max_new_tokens=8)  # one text is no batch
    assert sequences(out) == [[*ROWS[0], *plain_generate(model, ROWS[0], 8)]]


class Answers(Policy):
    """Answers what it is told to."""

    kind = "answers"

    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.plan = plan

    def pre_scan(self, state: PreScanState) -> Any:
        return self.plan

    def scan(self, state: object) -> bool:
        return False

    draft = scan


@pytest.mark.parametrize("plan", [SkipSublayers(frozenset({2}), frozenset()), "scan"], ids=["gaps", "word"])
def test_plans_that_no_batch_can_follow_are_refused_by_name(plan: Any) -> None:
    with pytest.raises(
        ValueError, match="pre_scan of the answers policy must answer SKIP, SCAN, ExitAt or Lookup in a batch"
    ):
        batch(policy=Answers(plan))
    assert sequences(batch(policy=Answers(PreScan.SCAN))) == sequences(batch())


@pytest.mark.parametrize("name", ["streamer", "prefilled"])
def test_what_is_for_one_prompt_is_refused_with_several(name: str) -> None:
    given: dict[str, Any] = {
        "streamer": TextStreamer(load_model("demo").tokenizer),
        "prefilled": prefill(tiny_model("llama"), ROWS[0]),
    }
    with pytest.raises(ValueError, match=f"{name} is for one prompt, got a batch of 3"):
        batch(**{name: given[name]})


def test_a_batch_of_one_takes_the_loop_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lede.batch_generation.BatchDecoder", lambda *_: pytest.fail("the loop for many"))
    out = batch(ROWS[:1], policy=StaticPolicy(exit_layer=3, draft_length=3))
    alone = generate(
        tiny_model("llama"), input_ids=ROWS[0], policy=StaticPolicy(exit_layer=3, draft_length=3), max_new_tokens=8
    )
    assert isinstance(alone, GenerateOutput)
    assert (len(out), out[0].rounds) == (1, alone.rounds)


def test_seconds_are_the_batchs_and_rates_add_up() -> None:
    outputs = batch(policy=StaticPolicy(exit_layer=3, draft_length=3), max_new_tokens=16)
    assert len({out.stats.seconds for out in outputs}) == 1
    whole = batch_stats(outputs)
    assert whole.seconds == outputs[0].stats.seconds
    assert whole.tokens == sum(out.stats.tokens for out in outputs) == 3 * 16
    assert whole.rounds == sum(out.stats.rounds for out in outputs)
    assert whole.head_reads == sum(out.stats.head_reads for out in outputs) > 0
    rates = [out.stats.tokens_per_second for out in outputs]
    assert whole.tokens_per_second == pytest.approx(sum(rate for rate in rates if rate is not None))
    spent = whole.seconds
    assert min(spent.prefill, spent.draft, spent.policy, spent.verify) > 0


def test_statistics_of_several_calls_are_not_pooled() -> None:
    with pytest.raises(ValueError, match="at least one output"):
        batch_stats([])
    with pytest.raises(ValueError, match="of several calls"):
        batch_stats([*batch(), *batch()])


def test_a_failing_policy_leaves_the_model_as_it_was() -> None:
    class Broken(StaticPolicy):
        def draft(self, state: Any) -> bool:
            raise RuntimeError("broken")

    wanted = sequences(batch())
    with pytest.raises(RuntimeError, match="broken"):
        batch(policy=Broken(exit_layer=2, draft_length=3))
    assert sequences(batch()) == wanted
