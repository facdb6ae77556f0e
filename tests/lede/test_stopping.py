"""Where texts end: EOS and stops inside and across accepted blocks, caps, time; every count is cut there too."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from lede.generation import GenerateOutput, generate
from lede.generation_settings import resolve
from lede.models import EarlyExitModel, load_model
from lede.policies import StaticPolicy
from lede.request_building import build_request
from tests.deciding_policies import KINDS, policy_of
from tests.stop_at import StopAt
from tests.tiny_models import N_LAYERS, plain_generate, prompt, tiny_hf_model, tiny_model

HEAD = "def merge_sort(items):\n"


@cache
def agreeing_model() -> EarlyExitModel:
    """Layer L-1 says what the whole model says, so every draft from there is accepted."""
    hf_model = tiny_hf_model("llama")
    last = hf_model.model.layers[-1]
    with torch.no_grad():
        last.self_attn.o_proj.weight.zero_()
        last.mlp.down_proj.weight.zero_()
    return load_model((hf_model, None))


@cache
def varied_text() -> tuple[list[int], list[int]]:
    """A prompt and its plain text, whose tokens 2 to 6 stand there for the first time."""
    texts = ((ids, plain_generate(agreeing_model(), ids, 9)) for ids in (prompt(seed, 9) for seed in range(200)))
    return next((i, text) for i, text in texts if all(text[n] not in text[:n] for n in range(2, 7)))


def block_of_five(**settings: Any) -> GenerateOutput:
    """The prefill's token, then a round that drafts five, all accepted."""
    ids, _ = varied_text()
    policy = StaticPolicy(exit_layer=N_LAYERS - 1, draft_length=5)
    return generate(agreeing_model(), input_ids=ids, policy=policy, output_scores=True, output_logits=True, **settings)


def check_cut(out: GenerateOutput, wanted: list[int]) -> None:
    """The text, and that counts, rounds and scores end with it."""
    assert out.sequences[0, len(varied_text()[0]) :].tolist() == wanted
    assert [t for r in out.rounds for t in r.tokens] == wanted[1:]
    assert out.stats.tokens == len(wanted) == len(out.scores or ()) == len(out.logits or ())


@pytest.mark.parametrize("position", [2, 3, 5])
def test_a4_1_end_of_sequence_accepted_inside_a_block_ends_the_text(position: int) -> None:
    _, text = varied_text()
    out = block_of_five(max_new_tokens=9, eos_token_id=text[position])
    check_cut(out, text[: position + 1])
    assert out.finish_reason == "eos"
    assert [(r.drafted, r.accepted) for r in out.rounds] == [(position, position)]


def test_a4_2_stop_inside_an_accepted_block() -> None:
    """Three of five accepted tokens stay, with a cap of five and with a wide one; nobody asks about tokens behind."""
    ids, text = varied_text()
    for budget in (5, 9):
        stop = StopAt(text[2])
        out = block_of_five(max_new_tokens=budget, stopping_criteria=StoppingCriteriaList([stop]))
        check_cut(out, text[:3])
        assert out.finish_reason == "stop"
        assert out.rounds[-1].accepted == len(out.rounds[-1].tokens) == 2
        assert stop.asked == [len(ids) + n for n in (1, 2, 3)]


def test_a4_2_stop_at_the_cap_and_beyond_it() -> None:
    _, text = varied_text()
    at = block_of_five(max_new_tokens=5, stopping_criteria=StoppingCriteriaList([StopAt(text[4])]))
    assert (at.stats.tokens, at.finish_reason) == (5, "stop")
    beyond = block_of_five(max_new_tokens=5, stopping_criteria=StoppingCriteriaList([StopAt(text[6])]))
    assert (beyond.stats.tokens, beyond.finish_reason) == (5, "length")


def test_a_stop_at_the_first_token_needs_no_round() -> None:
    _, text = varied_text()
    out = block_of_five(max_new_tokens=9, stopping_criteria=StoppingCriteriaList([StopAt(text[0])]))
    check_cut(out, text[:1])
    assert (out.finish_reason, out.rounds) == ("stop", ())


def test_a_stop_that_is_an_end_of_sequence_too_is_one() -> None:
    _, text = varied_text()
    stop = StoppingCriteriaList([StopAt(text[3])])
    assert block_of_five(max_new_tokens=9, eos_token_id=text[3], stopping_criteria=stop).finish_reason == "eos"


def test_a4_3_counts_sum_to_the_tokens_returned() -> None:
    """Every policy, every token as the stop; the policy is told what verification said, not where the text was cut."""
    model, ids = tiny_model("llama"), prompt(3, 6)
    wanted = plain_generate(model, ids, 20)
    for kind in KINDS:
        for token in dict.fromkeys(wanted[1:]):
            stop = StoppingCriteriaList([StopAt(token)])
            out = generate(model, input_ids=ids, policy=policy_of(kind), max_new_tokens=20, stopping_criteria=stop)
            cut = wanted[: wanted.index(token) + 1]
            assert out.sequences[0, len(ids) :].tolist() == cut
            assert out.stats.tokens == 1 + sum(len(r.tokens) for r in out.rounds) == len(cut)
            assert out.stats.accepted == sum(r.accepted for r in out.rounds)
            assert all(r.accepted <= len(r.tokens) for r in out.rounds)


def test_a3_5_after_a_rejection_nothing_is_accepted() -> None:
    """Right, wrong, right, right: one accepted."""
    from lede.verification import Chooser, TorchSource, Warp

    logits = torch.nn.functional.one_hot(torch.tensor([5, 6, 7, 8, 9]), 12).double()
    chooser = Chooser(Warp(), TorchSource(torch.Generator()))
    assert chooser.verify(logits, [5, 0, 7, 8], [None] * 4, [1]) == (1, 6)


@cache
def demo_model() -> EarlyExitModel:
    return load_model("demo")


@cache
def code_text() -> tuple[list[int], str]:
    """What the bundled model writes behind the head, as ids and as text."""
    out = generate(demo_model(), HEAD, max_new_tokens=40)
    return out.sequences[0, -40:].tolist(), out.text or ""


def spanning_stop(model: EarlyExitModel) -> tuple[str, int]:
    """A stop string made of the ends of two neighbouring rounds, and after how many tokens it is complete."""
    ids, _ = code_text()
    out = generate(model, HEAD, policy=StaticPolicy(exit_layer=4, draft_length=4), max_new_tokens=40)
    done = 1
    for r in out.rounds:
        left, right = (model.tokenizer.decode(ids[n : n + 1]) for n in (done - 1, done))
        stop = left[-1:] + right[:1]
        before = model.tokenizer.decode(ids[:done])
        if len(left) > 1 and len(right) > 1 and stop.strip() == stop and stop not in HEAD + before and done > 8:
            return stop, done + 1
        done += len(r.tokens)
    raise AssertionError("no two rounds of this text make a stop string")


def test_a4_2_stop_string_across_two_blocks() -> None:
    """It begins in the last token of a round and ends in the first of the next."""
    model = demo_model()
    stop, n_tokens = spanning_stop(model)
    wanted = plain_stopped(model, [stop])
    assert len(wanted) == n_tokens
    policy = StaticPolicy(exit_layer=4, draft_length=4)
    out = generate(model, HEAD, policy=policy, max_new_tokens=40, stop_strings=stop)
    assert out.sequences[0, -n_tokens:].tolist() == wanted
    assert (out.finish_reason, out.stats.tokens) == ("stop", n_tokens)


def plain_stopped(model: EarlyExitModel, stops: list[str]) -> list[int]:
    """New tokens of transformers' own `generate` with stop strings."""
    ids = model.tokenizer(HEAD)["input_ids"]
    eos = list(model.eos_token_ids)
    return plain_generate(model, ids, 40, stop_strings=stops, tokenizer=model.tokenizer, eos_token_id=eos)


def test_stop_strings_are_those_of_transformers() -> None:
    """Pieces of words, several strings; the text is cut after the token that completes one."""
    model = demo_model()
    _, text = code_text()
    words = [word for word in text.split() if len(word) > 3]
    for stops in ([words[3][1:], words[5][:-1]], ["never written"]):
        wanted = plain_stopped(model, stops)
        for kind in ("static", "random gaps"):
            policy = policy_of(kind)
            out = generate(model, HEAD, policy=policy, max_new_tokens=40, stop_strings=stops)
            assert out.sequences[0, len(model.tokenizer(HEAD)["input_ids"]) :].tolist() == wanted, (stops, kind)
            assert out.finish_reason == ("length" if stops == ["never written"] else "stop")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes whenever transformers' criterion looks at the time."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: float(next(ticks)))


@pytest.mark.usefixtures("clock")
def test_max_time_ends_the_text_behind_a_whole_round() -> None:
    model, ids = tiny_model("llama"), prompt(3, 6)
    wanted = plain_generate(model, ids, 60)
    out = generate(model, input_ids=ids, policy=StaticPolicy(exit_layer=3), max_new_tokens=60, max_time=4.5)
    assert out.finish_reason == "time"
    assert len(out.rounds) == 4  # the first token and three rounds are in time
    new = out.sequences[0, len(ids) :].tolist()
    assert new == wanted[: 1 + sum(len(r.tokens) for r in out.rounds)]
    assert all(len(r.tokens) == r.accepted + 1 for r in out.rounds)


@pytest.mark.usefixtures("clock")
def test_time_is_no_reason_where_another_one_holds() -> None:
    model, ids = tiny_model("llama"), prompt(3, 6)
    text = plain_generate(model, ids, 3)
    stop = StoppingCriteriaList([StopAt(text[0])])
    assert generate(model, input_ids=ids, max_time=0.5, stopping_criteria=stop).finish_reason == "stop"
    assert generate(model, input_ids=ids, max_time=1e6, max_new_tokens=3).finish_reason == "length"


class StopOnScores(StoppingCriteria):
    """Ends the text after as many scores as given."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        return scores is not None and len(scores) >= self.n  # an older criterion: a bool for all rows


def test_criteria_see_the_scores_up_to_their_token() -> None:
    _, text = varied_text()
    out = block_of_five(max_new_tokens=9, stopping_criteria=StoppingCriteriaList([StopOnScores(3)]))
    check_cut(out, text[:3])


def test_a_plain_call_has_no_step_for_options() -> None:
    """No processor, criterion or record, hence no work a token; sampling by temperature, top-k and top-p included."""
    model, ids = tiny_model("llama"), prompt(3, 6)
    every: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.0, "min_length": 0, "max_length": 20, "eos_token_id": 3},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    )
    for settings in every:
        config, rest = resolve(None, settings)
        request = build_request(model, [ids], config, rest, None, None)
        chooser = request.chooser(0, model.device)
        assert (chooser.processors, chooser.record, request.stopping(0, chooser, model.device)) == (None, None, None)
        assert request.warp == config.warp
