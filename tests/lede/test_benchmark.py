"""Benchmark rows, verdicts and reports, on runs made by hand and on a real model."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lede.bench_runs import PLAIN, TRANSFORMERS
from lede.benchmark import Benchmark, as_json, repetition_share
from lede.exactness import Divergence, compare
from lede.interleaving import Call, Contender, Decode, lede_contender, prepare, take_turns
from lede.models import load_model
from lede.policies import StaticPolicy
from lede.reports import coloured, markdown, plot_agreement, plot_speed, table
from lede.rivals import Rival, rival_contender
from lede.statistics import Round
from tests.tiny_models import plain_generate, prompt, tiny_hf_model, tiny_model


def fixed(name: str, seconds: dict[int, float], rounds: tuple[Round, ...] = ()) -> Contender:
    """Answers prompts of one token with 4 tokens, in the given seconds."""
    return Contender(name, lambda call: Decode((1, 2, 3, 4), 0.0, seconds[call.ids[0]], rounds))


def test_ratios_are_medians_of_pairs() -> None:
    rounds = (Round((2, 3), 3, 1, 2), Round((4,), 0, 0, None))
    benchmark = Benchmark(
        tiny_model("llama"),
        [
            fixed(TRANSFORMERS, {5: 8.0, 6: 8.0, 7: 80.0}),
            fixed(PLAIN, {5: 4.0, 6: 6.0, 7: 60.0}),
            fixed("drafting", {5: 2.0, 6: 2.0, 7: 60.0}, rounds),
        ],
    )
    done: list[int] = []
    benchmark.measure([[5], [6], [7]], lambda: done.append(1))
    transformers, plain, drafting = benchmark.rows()
    assert len(done) == 3
    assert plain.speedup == 1.0
    assert plain.speedup_over_transformers == pytest.approx(4 / 3)
    assert (drafting.speedup, drafting.speedup_over_transformers) == (2.0, 4.0)
    assert transformers.speedup == pytest.approx(0.75)
    assert drafting.tokens_per_second == 12 / 64
    assert drafting.acceptance_rate == pytest.approx(1 / 3)
    assert drafting.mean_accepted_length == 0.5
    assert drafting.mean_exit_layer == 2.0
    assert plain.acceptance_rate is None


def test_prompts_answered_by_one_token_decode_nothing() -> None:
    """They are left out of the ratios, and nothing is divided when there is no other."""

    def answering(name: str, seconds: dict[int, float]) -> Contender:
        return Contender(name, lambda c: Decode((1,) if c.ids[0] == 5 else (1, 2), 0.0, seconds[c.ids[0]]))

    one, other = answering(PLAIN, {5: 4.0, 6: 4.0}), answering("other", {5: 1.0, 6: 2.0})
    benchmark = Benchmark(tiny_model("llama"), [one, other])
    benchmark.measure([[5]])
    assert [row.speedup for row in benchmark.rows()] == [None, None]
    benchmark.measure([[6]])
    assert [row.speedup for row in benchmark.rows()] == [1.0, 2.0]


def test_nobody_always_follows_the_same_one() -> None:
    """Over many prompts each is before each other about as often as after, and right before it about as often."""
    names, n = "abcd", 600

    def orders(seed: int) -> list[str]:
        model = tiny_model("llama")
        contenders = [Contender(name, lambda call: Decode((1,), 0.0, 1.0)) for name in names]
        call = replace(prepare(model, [1]), seed=seed)
        turns = [list(take_turns(model, contenders, call, number)) for number in range(n)]
        assert all([turn for turn, _, _ in each] == [0, 1, 2, 3] for each in turns)
        return ["".join(contender.name for _, contender, _ in each) for each in turns]

    found = orders(0)
    assert found == orders(0)
    assert found != orders(1)
    for one, other in itertools.permutations(names, 2):
        before = sum(order.index(one) < order.index(other) for order in found)
        right_before = sum(one + other in order for order in found)
        assert abs(before - n / 2) < 4 * math.sqrt(n / 4)
        assert abs(right_before - n / 4) < 4 * math.sqrt(n * 3 / 16)


def test_a_contender_that_fails_ends_it() -> None:
    def decode(call: Call) -> Decode:
        raise ValueError("no such layer")

    with pytest.raises(RuntimeError, match="odd failed on prompt 1: ValueError: no such layer"):
        Benchmark(tiny_model("llama"), [Contender("odd", decode)]).measure([[1]])


def test_verdicts_on_a_real_model() -> None:
    model = tiny_model("llama")
    wanted = plain_generate(model, prompt(0, 5), 12)
    wrong = [*wanted[:7], (wanted[7] + 1) % 128, *wanted[8:]]
    contenders = [
        rival_contender(model, Rival(TRANSFORMERS), 12),
        lede_contender(model, PLAIN, None, 12),
        lede_contender(model, "static", StaticPolicy(exit_layer=3, draft_length=3), 12),
        Contender("wrong", lambda call: Decode(tuple(wrong), 0.0, 1.0)),
        Contender("short", lambda call: Decode(tuple(wanted[:5]), 0.0, 1.0)),
    ]
    benchmark = Benchmark(model, contenders)
    benchmark.measure([prompt(0, 5)])
    assert [row.exact for row in benchmark.rows()] == ["yes", "yes", "yes", "NO", "NO"]
    assert set(as_json(benchmark)["runs"]) == {TRANSFORMERS, PLAIN, "static", "wrong", "short"}


def test_a_tie_is_told_from_a_failure() -> None:
    """Two equal rows in the head: float32 may fall either way there, and nowhere else; float64 never."""
    for dtype, tie in ((torch.float32, True), (torch.float64, False)):
        hf_model = tiny_hf_model("llama", dtype)
        wanted = plain_generate(load_model((hf_model, None)), prompt(0, 5), 4)
        twin = (wanted[2] + 1) % 128
        with torch.no_grad():
            hf_model.lm_head.weight[twin] = hf_model.lm_head.weight[wanted[2]]
        model = load_model((hf_model, None))
        wanted = plain_generate(model, prompt(0, 5), 4)
        at = next(i for i, token in enumerate(wanted) if token in (twin, wanted[2]))
        other = twin if wanted[at] != twin else wanted[2]
        apart = compare(model, prompt(0, 5), [*wanted[:at], other, *wanted[at + 1 :]], wanted)
        assert apart is not None
        assert apart.position == at
        assert apart.tie == tie
        third = next(token for token in range(128) if token not in (twin, wanted[at], other))
        wrong = compare(model, prompt(0, 5), [*wanted[:at], third, *wanted[at + 1 :]], wanted)
        assert wrong is not None
        assert not wrong.tie  # a token that is neither of the two is no matter of rounding
    assert compare(model, prompt(0, 5), wanted, wanted) is None


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_difference_where_logits_are_no_numbers_is_an_error(odd: float) -> None:
    hf_model = tiny_hf_model("llama", torch.float32)
    model, ids = load_model((hf_model, None)), prompt(0, 5)
    with torch.no_grad():
        hf_model.lm_head.weight.fill_(odd)
    apart = compare(model, ids, [1, 2], [1, 3])
    assert apart == Divergence(1, 1.0, False)


def test_a_token_that_no_logit_allows_is_no_tie() -> None:
    """A logit of minus infinity is as far away as can be, and not what others are measured by."""
    model, ids = load_model((tiny_hf_model("llama", torch.float32), None)), prompt(0, 5)
    head = model.hf_model.lm_head
    head.register_forward_hook(lambda module, args, out: out.index_fill(-1, torch.tensor([7]), -torch.inf))
    wanted = plain_generate(model, ids, 1)
    assert compare(model, ids, [7], wanted) == Divergence(0, 1.0, False)
    other = next(token for token in range(128) if token not in (7, wanted[0]))
    apart = compare(model, ids, [other], wanted)
    assert apart is not None
    assert 0 < apart.margin < 3


def test_repetition_share() -> None:
    assert repetition_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repetition_share(list(range(20))) == 0
    assert repetition_share([1, 1]) == 0


def test_reports_render(tmp_path: Path) -> None:
    from rich.console import Console

    model = load_model("demo")
    benchmark = Benchmark(
        model,
        [
            fixed(PLAIN, {5: 4.0}),
            fixed("drafting", {5: 2.0}, (Round((2, 3), 3, 1, 2),)),
            fixed(TRANSFORMERS, {5: 4.0}),
        ],
    )
    benchmark.measure([[5]])
    rows = benchmark.rows()
    console = Console(width=80, record=True)
    console.print(table(rows, "Title"))
    shown = console.export_text()
    assert "drafting" in shown
    assert "2.00x" in shown
    assert "…" not in shown  # nothing is cut off on 80 columns
    assert "| drafting |" in markdown(rows)
    plot_speed(rows, tmp_path / "speed.png")
    plot_agreement([0.2, 0.5, 1.0], [1, 2], tmp_path / "agreement.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("speed.png", "agreement.png"))


def test_coloured_text_is_the_whole_text() -> None:
    """Characters of several tokens that end in another span are kept whole."""
    model = load_model("demo")
    text = "x = 'é€🙂'\n"
    ids = model.tokenizer(text)["input_ids"]
    rounds = [Round((token,), 1, 1, 2 + i % 2) for i, token in enumerate(ids[3:])]
    shown = coloured(model.tokenizer, ids[:2], ids[2], rounds)
    assert shown.plain.startswith(text)
    assert "\ufffd" not in shown.plain
    assert "drafted at layer: 2 3" in shown.plain


def test_coloured_text_of_drafts_with_gaps() -> None:
    model = load_model("demo")
    ids = model.tokenizer("def f(x):\n    return x\n")["input_ids"]
    rounds = [Round((token,), 1, 1, None if i % 2 else 3, 5 * (i % 2)) for i, token in enumerate(ids[3:])]
    shown = coloured(model.tokenizer, ids[:2], ids[2], [*rounds, Round((ids[0],), 0, 0, None)])
    assert shown.plain.endswith("drafted at layer: without 5 sublayers 3 ")
    styles = {str(span.style) for span in shown.spans}
    assert len(styles - {"dim", ""}) == 2
