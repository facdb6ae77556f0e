"""Every column of a benchmark's table, on decodes written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lede.bench_cells import exact_cell
from lede.bench_row import BenchRow
from lede.bench_rows import baselines, figures_of, rows
from lede.bench_runs import CONTROL, PLAIN, TRANSFORMERS, PromptRecord, PromptRun, Setup
from lede.bench_speed import is_clear
from lede.intervals import Interval
from tests.lede.bench_examples import COST, baseline_runs, contender, failed, rounds, run, setup


def row(name: str, runs: list[PromptRun], found: Setup, prompts: tuple[PromptRecord, ...] = ()) -> BenchRow:
    return next(each for each in rows(runs, found, prompts) if each.name == name)


DRAFTING = setup(contender("drafting"))


def test_two_requests_pooled_and_by_prompt() -> None:
    """Rounds that accepted [3, 3] and [0] of 4 drafted tokens each."""
    runs = [
        run("drafting", 0, token_ids=range_of(9), rounds=rounds(3, 3), head_reads=12),
        run("drafting", 1, token_ids=range_of(2), rounds=rounds(0), head_reads=4),
    ]
    found = row("drafting", runs, DRAFTING)
    assert found.acceptance_rate == 6 / 12
    assert found.acceptance_rate_by_prompt == (6 / 8 + 0 / 4) / 2
    assert found.mean_accepted_length == 6 / 3
    assert found.mean_length_with_bonus == (6 + 3) / 3 == 3.0
    assert found.mean_accepted_length_by_prompt == (6 / 2 + 0 / 1) / 2 == 1.5
    assert found.mean_length_with_bonus_by_prompt == (8 / 2 + 1 / 1) / 2 == 2.5
    assert found.mean_draft_length == 4.0
    assert (found.full_passes, found.full_passes_a_token) == (3, 3 / 9)
    assert (found.head_reads, found.head_reads_a_token) == (16, 16 / 9)


def range_of(n: int) -> tuple[int, ...]:
    return tuple(range(n))


def test_plain_rounds_count_in_lengths_but_not_in_drafts() -> None:
    """A round that drafted 2 at layer 2, one that drafted 6 at layer 4, a plain pass, and an accepted end."""
    entries = (*rounds(1, drafted=2, layer=2), *rounds(3, drafted=6, layer=4), (0, 0, 1, 0, 0), (2, 2, 2, 4, 0))
    found = row("drafting", [run("drafting", token_ids=range_of(10), rounds=entries)], DRAFTING)
    assert found.mean_draft_length == (2 + 6 + 2) / 3
    assert found.mean_exit_layer == (2 * 2 + 6 * 4 + 2 * 4) / 10
    assert found.mean_accepted_length == (1 + 3 + 0 + 2) / 4
    assert found.mean_length_with_bonus == (2 + 4 + 1 + 2) / 4
    assert found.mean_skipped_share is None


def test_skipped_share_is_of_the_tokens_drafted_with_gaps() -> None:
    """4 of 16 sublayers for 2 tokens, 8 of 16 for 6; a draft at a layer has none."""
    entries = (
        *rounds(1, drafted=2, layer=0, skipped=4),
        *rounds(1, drafted=6, layer=0, skipped=8),
        *rounds(1, drafted=4, layer=3),
    )
    found = row("drafting", [run("drafting", token_ids=range_of(7), rounds=entries)], DRAFTING)
    assert found.mean_skipped_share == (2 * 4 / 16 + 6 * 8 / 16) / 8
    assert found.mean_exit_layer == 3.0


def test_rounds_and_tokens_by_source() -> None:
    """An exit of 4 drafted, copies of 8 and 2, a draft with gaps and two plain passes: 6 rounds, 15 tokens."""
    first = (*rounds(3, drafted=4), (8, 5, 6, 0, 0), (0, 0, 1, 0, 0))
    second = ((2, 0, 1, 0, 0), (0, 0, 1, 0, 0), *rounds(1, drafted=2, layer=0, skipped=4))
    runs = [run("drafting", i, token_ids=range_of(9), rounds=each) for i, each in enumerate((first, second))]
    found = row("drafting", [*runs, run(PLAIN, 0, rounds=((0, 0, 1, 0, 0),) * 4)], DRAFTING)
    assert found.round_shares == {"exit": 1 / 6, "lookup": 2 / 6, "gaps": 1 / 6, "plain": 2 / 6}
    assert found.token_shares == {"exit": 4 / 15, "lookup": 7 / 15, "gaps": 2 / 15, "plain": 2 / 15}
    assert found.acceptance_by_source == {"exit": 3 / 4, "lookup": 5 / 10, "gaps": 1 / 2}
    assert found.mean_exit_layer == 3.0
    assert found.mean_skipped_share == 4 / 16
    plain = row(PLAIN, [run(PLAIN, 0, rounds=((0, 0, 1, 0, 0),) * 4)], DRAFTING)
    assert plain.round_shares == {"exit": 0.0, "lookup": 0.0, "gaps": 0.0, "plain": 1.0}
    assert plain.acceptance_by_source == {}
    external = row(TRANSFORMERS, [run(TRANSFORMERS, 0)], DRAFTING)
    assert (external.round_shares, external.token_shares, external.acceptance_by_source) == (None, None, None)


def test_speed_is_a_ratio_of_sums_with_the_median_beside_it() -> None:
    """4 tokens after the first in 1, 1 and 10 s against 2, 4 and 10 s of plain decoding."""
    seconds = {PLAIN: (2.0, 4.0, 10.0), "drafting": (1.0, 1.0, 10.0)}
    runs = [run(name, i, each) for name, all_of_it in seconds.items() for i, each in enumerate(all_of_it)]
    found = row("drafting", runs, DRAFTING)
    assert found.tokens_per_second is not None
    assert found.tokens_per_second.value == 12 / 12
    assert found.tokens_per_second_with_prefill is not None
    assert found.tokens_per_second_with_prefill.value == pytest.approx(15 / 12.3)
    faster = found.speedup_over_plain
    assert faster is not None
    assert faster.value == pytest.approx(16 / 12)
    assert (faster.median, faster.n_prompts) == (2.0, 3)
    assert faster.lower < 16 / 12 < faster.upper
    assert found.speedup_over_plain_with_prefill is not None
    assert found.speedup_over_plain_with_prefill.value == pytest.approx(16.3 / 12.3)
    assert found.speedup_over_transformers is None
    assert found.speedup_over_best_static is None


def test_a_prompts_seconds_are_the_median_over_repetitions() -> None:
    runs = [run("drafting", 0, each, repeat=i) for i, each in enumerate((1.0, 9.0, 2.0))]
    runs += [run(PLAIN, 0, each, repeat=i) for i, each in enumerate((4.0, 5.0, 100.0))]
    found = row("drafting", runs, DRAFTING)
    assert found.speedup_over_plain is not None
    assert found.speedup_over_plain.value == 2.5
    assert (found.n_prompts, found.tokens) == (1, 5)


def test_repetitions_of_other_lengths_are_averaged_by_seconds_a_token() -> None:
    """Sampled texts: 4 tokens in 2 s, 2 in 2 s and 3 in 6 s are 1 s a token for 3 tokens."""
    runs = [
        run("drafting", 0, seconds, repeat=i, token_ids=range_of(n + 1))
        for i, (n, seconds) in enumerate(((4, 2.0), (2, 2.0), (3, 6.0)))
    ]
    found = row("drafting", runs, DRAFTING)
    assert found.tokens_per_second is not None
    assert found.tokens_per_second.value == pytest.approx(1.0)


def test_a_clear_speedup_is_resolved_and_one_within_the_noise_is_not() -> None:
    """Plain against itself is 10 % off on each prompt: 1.02 without any spread is no claim, 1.5 is."""
    runs = baseline_runs(20, again=1.1)
    runs += [run("a hair faster", i, 1 / 1.02) for i in range(20)] + [run("faster", i, 1 / 1.5) for i in range(20)]
    runs += [run("slower", i, 2.0) for i in range(20)]
    table = {each.name: each for each in rows(runs, setup(*map(contender, ("a hair faster", "faster", "slower"))))}
    over_plain = {name: each.speedup_over_plain for name, each in table.items()}
    resolved = {name: found.resolved for name, found in over_plain.items() if found is not None}
    assert resolved == {
        TRANSFORMERS: True,
        PLAIN: False,
        CONTROL: False,
        "a hair faster": False,
        "faster": True,
        "slower": True,
    }
    control = over_plain[CONTROL]
    assert control is not None
    assert control.lower < 1 < control.upper
    assert not table[CONTROL].ranked
    over_hf = table["faster"].speedup_over_transformers
    assert over_hf is not None
    assert over_hf.value == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("interval", "control", "n_prompts", "clear"),
    [
        ((1.2, 1.1, 1.3), (1.0, 0.9, 1.05), 6, True),
        ((0.8, 0.7, 0.89), (1.0, 0.9, 1.05), 6, True),
        ((1.2, 1.05, 1.3), (1.0, 0.9, 1.05), 6, False),  # they touch
        ((1.01, 1.0, 1.02), (1.0, 0.9, 1.1), 6, False),  # within the control's
        ((1.2, 0.95, 1.4), (0.9, 0.85, 0.93), 6, False),  # clear of a control that is off itself, but not of 1
        ((1.2, 1.1, 1.3), (1.0, 0.9, 1.05), 5, False),  # five prompts
        ((1.2, 1.2, 1.2), (1.0, 1.0, 1.0), 1, False),
        ((1.2, 1.1, 1.3), None, 9, False),
    ],
)
def test_what_is_clear(
    interval: tuple[float, float, float], control: tuple[float, float, float] | None, n_prompts: int, clear: bool
) -> None:
    assert is_clear(Interval(*interval), None if control is None else Interval(*control), n_prompts) is clear


def test_the_best_static_is_the_one_of_the_validation_prompts() -> None:
    """It took 4 s, the runner-up 2 s: other rows are held against both."""
    static = contender("static", "static:exit_layer=3;draft_length=4", cost=COST)
    other = contender("static:exit_layer=2;draft_length=4")
    found = setup(static, other, contender("drafting"))
    runs = [run("static", 0, 4.0), run(other.name, 0, 2.0), run("drafting", 0, 1.0), run(PLAIN, 0, 8.0)]
    drafting = row("drafting", runs, found)
    assert drafting.speedup_over_best_static is not None
    assert drafting.speedup_over_hindsight_static is not None
    assert drafting.speedup_over_best_static.value == 4.0
    assert drafting.speedup_over_hindsight_static.value == 2.0
    assert row("static", runs, found).speedup_over_hindsight_static is not None


def test_lookups_are_held_against_lookups() -> None:
    """The chosen one took 4 s, the runner-up 2 s, transformers' own 3 s or 6 s; static settings are none of them."""
    chosen = contender("lookup", "lookup:draft_length=4", cost=COST)
    other = contender("lookup:draft_length=2")
    own = contender("prompt-lookup:tokens=3", kind="external")
    tuned = contender("prompt-lookup", "prompt-lookup:tokens=8", kind="external", cost=COST)
    static = contender("static", "static:exit_layer=3;draft_length=4", cost=COST)
    runs = [run(PLAIN, 0, 8.0), run("lookup", 0, 4.0), run(other.name, 0, 2.0), run(own.name, 0, 6.0)]
    runs += [run("static", 0, 5.0), run("drafting", 0, 1.0)]
    found = setup(chosen, other, own, static, contender("drafting"))
    drafting = row("drafting", runs, found)
    ratios = [
        drafting.speedup_over_best_lookup,
        drafting.speedup_over_hindsight_lookup,
        drafting.speedup_over_prompt_lookup,
        drafting.speedup_over_best_static,
    ]
    assert [each and each.value for each in ratios] == [4.0, 2.0, 6.0, 5.0]
    both = setup(chosen, other, own, tuned, static, contender("drafting"))
    with_tuned = row("drafting", [*runs, run(tuned.name, 0, 3.0)], both)
    assert with_tuned.speedup_over_prompt_lookup is not None
    assert with_tuned.speedup_over_prompt_lookup.value == 3.0
    (held,) = baselines(figures_of(runs, found), found)
    assert (held.best_lookup, held.hindsight_lookup) == ("lookup", other.name)
    assert (held.prompt_lookup, held.best_static, held.hindsight_static) == (own.name, "static", "static")
    alone = row("drafting", [run(PLAIN), run("drafting")], DRAFTING)
    assert (alone.speedup_over_best_lookup, alone.speedup_over_prompt_lookup) == (None, None)


def test_the_best_in_hindsight_failed_nowhere_and_wrote_the_plain_text() -> None:
    """By the speedup over plain on the same prompts: the fastest are wrong, or failed on the slow prompt."""
    names = ("static", "static:exit_layer=1", "static:exit_layer=2", "static:exit_layer=3")
    found = setup(*(contender(name, name if ":" in name else "static:exit_layer=4", cost=COST) for name in names))
    runs = [run(PLAIN, 0, 8.0), run(PLAIN, 1, 80.0), run("static", 0, 4.0), run("static", 1, 40.0)]
    runs += [run(names[1], 0, 1.0, divergence=(2, 0.5, False)), run(names[1], 1, 10.0)]
    runs += [run(names[2], 0, 1.0), failed(names[2], 1)]
    runs += [run(names[3], 0, 3.0), run(names[3], 1, 30.0, divergence=(2, 1e-7, True))]
    (held,) = baselines(figures_of(runs, found), found)
    assert (held.best_static, held.hindsight_static) == ("static", names[3])


def test_seconds_below_zero_are_in_sums_and_in_no_ratio() -> None:
    """A difference of two calls: 4 tokens in -0.5 s, 4 in 1.5 s, against 1 s each of plain decoding."""
    runs = [run("outside", 0, -0.5), run("outside", 1, 1.5), run(PLAIN, 0), run(PLAIN, 1)]
    found = row("outside", runs, setup(contender("outside", kind="external")))
    assert found.tokens_per_second is not None
    assert found.tokens_per_second.value == 8.0
    assert found.speedup_over_plain is not None
    assert (found.speedup_over_plain.value, found.speedup_over_plain.n_prompts) == (2.0, 2)
    assert found.speedup_over_plain.median == pytest.approx(1 / 1.5)
    lost = [run("outside", 0, -0.5), run("outside", 1, 0.5), run(PLAIN, 0), run(PLAIN, 1)]
    nothing = row("outside", lost, setup(contender("outside", kind="external")))
    assert (nothing.tokens_per_second, nothing.speedup_over_plain) == (None, None)


def test_whose_text_decided_is_told() -> None:
    """Plain decoding stands in where transformers failed; runs without a word of it say nothing."""
    runs = [run("drafting", 0, reference=TRANSFORMERS), run("drafting", 1, reference=TRANSFORMERS)]
    assert row("drafting", runs, DRAFTING).exact_against == TRANSFORMERS
    assert exact_cell(row("drafting", runs, DRAFTING)) == "yes"
    runs[1] = replace(runs[1], reference=PLAIN)
    assert row("drafting", runs, DRAFTING).exact_against == PLAIN
    assert exact_cell(row("drafting", runs, DRAFTING)) == "yes (own)"
    assert row("drafting", [run("drafting")], DRAFTING).exact_against is None


def test_a_single_token_is_no_figure_but_a_prompt() -> None:
    looping = (1, 2, 1, 2, 1, 2, 1)
    runs = [run("drafting", 0, rounds=rounds(3), token_ids=looping), run("drafting", 1, 0.0, token_ids=(7,), text="a")]
    runs += [run(PLAIN, 0), run(PLAIN, 1, text="a")]
    found = row("drafting", runs, DRAFTING)
    assert (found.n_prompts, found.n_failed, found.n_empty) == (2, 0, 1)
    assert found.mean_length_with_bonus_by_prompt == 4.0
    assert found.repetition_share == 2 / 4  # of the other prompt alone
    assert found.rouge_plain is None  # of that one plain decoding has no text
    assert found.speedup_over_plain is not None
    assert found.speedup_over_plain.n_prompts == 1
    assert found.exact == "yes"


def test_nothing_but_single_tokens() -> None:
    found = row("drafting", [run("drafting", i, 0.0, token_ids=(7,)) for i in range(2)], DRAFTING)
    assert (found.n_prompts, found.n_empty, found.tokens) == (2, 2, 2)
    figures = (found.tokens_per_second, found.speedup_over_plain, found.acceptance_rate, found.mean_length_with_bonus)
    assert figures == (None,) * 4
    assert (found.time_shares, found.full_passes, found.modelled_speedup) == (None, None, None)


def test_a_failed_prompt_is_counted_and_in_no_figure() -> None:
    runs = [run("drafting", 0, 0.5), failed("drafting", 1), run(PLAIN, 0), run(PLAIN, 1)]
    found = row("drafting", runs, DRAFTING)
    assert (found.n_prompts, found.n_failed, found.error) == (2, 1, "RuntimeError: no")
    assert found.speedup_over_plain is not None
    assert (found.speedup_over_plain.value, found.speedup_over_plain.n_prompts) == (2.0, 1)


def test_who_never_ran_has_failed_on_all_prompts() -> None:
    found = row("drafting", [run(PLAIN, 0)], setup(contender("drafting", failed="no such layer"), n_prompts=5))
    assert (found.n_prompts, found.n_failed, found.error) == (5, 5, "no such layer")
    assert (found.exact, found.ranked) == (None, False)


def test_verdicts() -> None:
    """Ties are told by position; one divergence without a tie is enough for a NO, and leaves the ranking."""
    names = ("equal", "tied", "wrong", "lossy")
    found = setup(*map(contender, names[:3]), contender("lossy", lossy=True), n_prompts=3)
    tie, wrong = (2, 1e-7, True), (4, 0.3, False)
    runs = [run(name, i) for name in names for i in range(3)]
    runs[3], runs[4] = replace(runs[3], divergence=tie), replace(runs[4], divergence=tie)
    runs.append(replace(runs[4], repeat=1))  # the same place again is no further position
    runs[6], runs[7] = replace(runs[6], divergence=tie), replace(runs[7], divergence=wrong)
    verdicts = {each.name: (each.exact, each.n_ties, each.n_wrong, each.ranked) for each in rows(runs, found)}
    assert verdicts["equal"] == ("yes", 0, 0, True)
    assert verdicts["tied"] == ("ties", 2, 0, True)
    assert verdicts["wrong"] == ("NO", 1, 1, False)
    assert verdicts["lossy"] == ("yes", 0, 0, False)


def test_sampled_texts_are_equal_in_law() -> None:
    found = setup(contender("drafting"), contender("lossy", lossy=True), config={"temperature": 0.6, "seed": 0})
    runs = [run("drafting"), run("lossy"), run(PLAIN)]
    assert [each.exact for each in rows(runs, found) if each.name in ("drafting", "lossy")] == ["law", "NO"]


def test_time_shares_are_of_the_time_after_the_prefill() -> None:
    sections = {"prefill": 9.0, "draft": 0.75, "head": 0.25, "inspect": 0.5, "policy": 0.25, "verify": 2.0}
    sections |= {"other": 0.25, "search": 1.0}
    runs = [run("drafting", i, 5.0, rounds=rounds(3), sections=sections) for i in range(2)]
    runs.append(replace(runs[0], repeat=1))
    found = row("drafting", runs, DRAFTING)
    assert found.time_shares is not None
    assert found.time_shares == pytest.approx(
        {"draft": 0.15, "head": 0.05, "inspect": 0.1, "policy": 0.05, "verify": 0.4, "search": 0.2, "other": 0.05}
    )
    assert found.search_seconds == 2.0


def test_tokens_to_break_even() -> None:
    """10 s beforehand; plain takes 0.25 s a token, the policy 0.125 s: 80 tokens. A slower one never gets there."""
    found = setup(contender("faster", cost=COST), contender("slower", cost=COST))
    runs = [run(PLAIN, 0, 1.0), run("faster", 0, 0.5), run("slower", 0, 2.0)]
    assert row("faster", runs, found).cost_seconds == 10.0
    assert row("faster", runs, found).tokens_to_break_even == pytest.approx(10 / (0.25 - 0.125))
    assert row("slower", runs, found).tokens_to_break_even is None
    assert row("faster", runs, found).cost.evaluations == 24


def test_memory_repetition_and_texts() -> None:
    """4-grams of 1 2 1 2 1 2 1: two of four stood there before."""
    looping = (1, 2, 1, 2, 1, 2, 1)
    prompts = (PromptRecord("code", 0, "", (3, 1, 4), "the cat sat"), PromptRecord("code", 1, "", (2, 7), None))
    runs = [
        run("drafting", 0, token_ids=looping, peak_memory=5, text="the cat"),
        run("drafting", 1, peak_memory=7, text="a dog"),
        run(PLAIN, 0, text="the cat sat"),
        run(PLAIN, 1, text="a dog"),
    ]
    found = row("drafting", runs, DRAFTING, prompts)
    assert found.peak_memory == 7
    assert found.repetition_share == (2 / 4 + 0) / 2
    assert found.rouge_reference is not None
    assert found.rouge_reference.rouge1 == pytest.approx(0.8)  # precision 1, recall 2/3, of the one prompt that has one
    assert found.rouge_plain is not None
    assert found.rouge_plain.rouge1 == pytest.approx((0.8 + 1) / 2)
    assert row(TRANSFORMERS, runs, DRAFTING, prompts).rouge_plain is None


def test_the_order_is_the_setups() -> None:
    names = [each.name for each in rows([], setup(contender("b"), contender("a")))]
    assert names == [TRANSFORMERS, PLAIN, CONTROL, "b", "a"]


def test_suites_do_not_mix() -> None:
    found = setup(contender("drafting"), contender("drafting", suite="prose"))
    runs = [run("drafting", 0, 0.5), run(PLAIN, 0, 1.0), run("drafting", 0, 4.0, suite="prose")]
    runs.append(run(PLAIN, 0, 1.0, suite="prose"))
    speedups = {each.suite: each.speedup_over_plain for each in rows(runs, found) if each.name == "drafting"}
    assert {suite: each and each.value for suite, each in speedups.items()} == {"code": 2.0, "prose": 0.25}


def test_runs_of_strangers_are_refused() -> None:
    with pytest.raises(ValueError, match="contender 'stranger' on suite 'code', which the setup does not name"):
        rows([run("stranger")], DRAFTING)


def test_a_row_survives_json() -> None:
    runs = [*baseline_runs(2), run("drafting", 0, 0.5, rounds=rounds(3), text="a"), run("drafting", 1, 0.5)]
    for each in rows(runs, setup(contender("drafting", cost=COST))):
        assert BenchRow.from_json(each.to_json()) == each
