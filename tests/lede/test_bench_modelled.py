"""Rounds priced by a cost model whose every operation has a round number, and break-even acceptances."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from lede.bench_figures import prompt_figures
from lede.bench_lineup import policy_folder
from lede.bench_modelled import Observed, RoundCosts, modelled_seconds, observed
from lede.bench_runs import PromptRun, RoundCounts
from lede.break_even import break_even_acceptance, layers_in_use
from lede.cost_model import CostModel, Costs
from lede.features import FeatureConfig
from lede.policies import Lookup, ThresholdPolicy
from tests.lede.bench_examples import N_LAYERS, contender, failed, rounds, run

LAYER, HEAD, POLICY = 1.0, 10.0, 100.0
"""Seconds; a layer costs as much for a block as for one token."""
PLAIN = N_LAYERS * LAYER + HEAD


def costs(**given: float) -> RoundCosts:
    zero = dict.fromkeys((field.name for field in fields(Costs)), 0.0)
    return RoundCosts(CostModel(N_LAYERS, (None,) * N_LAYERS, Costs(**{**zero, "layer": LAYER, "head": HEAD, **given})))


def seconds(entries: tuple[RoundCounts, ...], head_reads: int, features: FeatureConfig | None = None) -> float:
    seen = Observed(features, features is not None and "in_scan" in features.names)
    n_tokens = 1 + sum(entry[2] for entry in entries)
    done = run("drafting", token_ids=tuple(range(n_tokens)), rounds=entries, head_reads=head_reads)
    return costs(policy=POLICY).seconds(done, seen)


def test_a_blind_round_is_its_layers_heads_and_verification() -> None:
    """4 tokens at layer 3: 5 positions through 3 layers, 4 heads, then the other 5 layers and the last head once."""
    assert seconds(rounds(2), head_reads=4) == 5 * 3 + 4 * HEAD + 5 + HEAD


def test_an_accepted_end_runs_no_further_position() -> None:
    assert seconds(((4, 4, 4, 3, 0),), head_reads=4) == 4 * 3 + 4 * HEAD + 5 + HEAD


def test_a_plain_round_and_a_look_at_two_candidates() -> None:
    assert seconds(((0, 0, 1, 0, 0),), head_reads=0) == PLAIN
    assert seconds(((0, 0, 1, 0, 0),), head_reads=2) == PLAIN + 2 * HEAD


def test_every_read_of_a_policy_with_features_is_a_decision() -> None:
    blind = seconds(rounds(2), head_reads=4)
    assert seconds(rounds(2), head_reads=6, features=FeatureConfig()) == blind + 2 * HEAD + 6 * POLICY
    asked_before = FeatureConfig(names=("trace", "in_scan"))
    assert seconds(rounds(2), head_reads=6, features=asked_before) == blind + 2 * HEAD + 7 * POLICY


def test_a_draft_with_gaps_is_charged_the_share_that_runs() -> None:
    """4 of 16 sublayers left out: 3 tokens of 6 layers and a head, then all layers and the last head."""
    assert seconds(rounds(1, drafted=3, layer=0, skipped=4), head_reads=3) == 3 * (6 + HEAD) + PLAIN


COPIED: tuple[RoundCounts, ...] = ((4, 2, 3, 0, 0), (0, 0, 1, 0, 0), (2, 2, 2, 0, 0))
"""Copies of 4 tokens and of 2, the last of which ended the text, and a plain pass between them."""
PRICES = {"index": 1000.0, "propose": 2000.0, "layer_token": 4.0, "head_token": 3.0}


def copied(head_reads: int) -> PromptRun:
    return run("copies", token_ids=tuple(range(7)), rounds=COPIED, head_reads=head_reads)


def test_copied_tokens_run_through_all_layers_at_once() -> None:
    """Blocks of 5 tokens, 1 and 2; each further token 4 s a layer and 3 s of the head; 6 tokens are indexed."""
    blocks = 3 * PLAIN + (4 + 0 + 1) * (4 * N_LAYERS + 3)
    assert costs(**PRICES).seconds(copied(0), Observed(indexed=True)) == blocks + 2 * 2000 + 6 * 1000


def test_copies_cut_at_a_layer_are_charged_their_full_length_below_it() -> None:
    """Plans of 4 tokens cut at layer 2, by 15 reads three of them: one left nothing and looks like a plain pass."""
    below, read = 3 * 2 * (1 + 4 * 4), 3 * (HEAD + 4 * 3)
    above = 3 * (6 + HEAD) + (4 + 0 + 1) * (4 * 6 + 3)
    found = costs(**PRICES).seconds(copied(15), Observed(indexed=True, pruned=Lookup(4, 2)))
    assert found == below + read + above + 3 * 2000 + 6 * 1000


def test_a_search_is_left_out() -> None:
    done = run(rounds=rounds(2), head_reads=400, sections={"search": 1.0}, token_ids=(1, 2, 3, 4))
    assert costs().seconds(done, Observed()) == 5 * 3 + 4 * HEAD + 5 + HEAD


def test_contexts_grow_with_the_text() -> None:
    """A second a layer and token of context: 3 tokens of prompt, then 4, then 5."""
    done = run(token_ids=(1, 2, 3, 4), rounds=((0, 0, 1, 0, 0),) * 3)
    by_context = costs(layer_context=1.0)
    assert by_context.seconds(done, Observed()) == by_context.plain_seconds(done) == 3 * PLAIN + N_LAYERS * (3 + 4 + 5)


def test_modelled_seconds_are_means_over_repetitions() -> None:
    found = modelled_seconds(
        [
            run("drafting", 0, token_ids=(1, 2, 3, 4), rounds=rounds(2), head_reads=4),
            run("drafting", 0, token_ids=(1, 2, 3, 4), rounds=((0, 0, 1, 0, 0),) * 3, repeat=1),
            run("drafting", 1, token_ids=(1,)),
            failed("drafting", 2),
        ],
        costs(),
        Observed(),
    )
    assert found == {0: ((5 * 3 + 4 * HEAD + 5 + HEAD + 3 * PLAIN) / 2, 3 * PLAIN)}


def test_what_policies_observe() -> None:
    assert observed(contender("static", "static:exit_layer=2;draft_length=3")) == Observed()
    assert observed(contender("plain", kind="plain")) == Observed()
    assert observed(contender("gone", "/no/such/folder")) == Observed(FeatureConfig())
    assert observed(contender("copies", "lookup:draft_length=3")) == Observed(indexed=True)
    cut = observed(contender("cuts", "lookup:draft_length=3;prune_at=2"))
    assert cut == Observed(indexed=True, pruned=Lookup(3, 2))
    threshold = observed(contender("threshold", "threshold:candidates=2,4")).features
    assert threshold is not None
    assert len(threshold.names) == 1


def test_the_copy_that_decoded_tells_what_it_observes(tmp_path: Path) -> None:
    """What was given has changed since; a copy that can't be read is passed over."""
    found = contender("mine", "static:exit_layer=2;draft_length=3")
    copy = policy_folder(tmp_path, "code", "mine")
    ThresholdPolicy(measure="entropy", thresholds=0.5).save_pretrained(str(copy))
    features = observed(found, tmp_path).features
    assert features is not None
    assert features.names == ("entropy",)
    (copy / "config.json").write_text("{")
    assert observed(found, tmp_path) == Observed()


def test_break_even_of_free_blocks() -> None:
    """Passes cost the same for any number of tokens and the draft a quarter of one a token: 1 + a = 2/4 + 3/4."""
    assert break_even_acceptance([1.0] * 4, 2, 8, 1) == pytest.approx(0.25)


def test_drafts_that_never_pay() -> None:
    """A pass over 4 tokens takes as long as 8 passes over one."""
    assert break_even_acceptance([1.0, 3.0, 5.0, 8.0], 2, 8, 3) is None


def test_layers_in_use() -> None:
    entries = (
        *rounds(1, layer=6),
        *rounds(1, 1, layer=2),
        *rounds(1, drafted=9, layer=4),
        *rounds(0, drafted=1, layer=5),
    )
    [[figures]] = prompt_figures([run("drafting", rounds=entries)]).values()
    assert layers_in_use([figures], N_LAYERS) == [2, 4, 6]
    assert layers_in_use([], N_LAYERS) == [2, 4, 6]
    assert layers_in_use([], 2) == [1]
