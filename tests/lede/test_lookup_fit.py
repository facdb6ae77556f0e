"""Static lookups played on recorded texts: by hand, against the decoder, and tuned by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lede.buffers.records import PromptTrace
from lede.collectors.teacher import collect_teacher
from lede.cost_model import CostModel
from lede.envs import Rules
from lede.generation import generate
from lede.lookup import LookupConfig
from lede.lookup_fit import (
    LENGTHS,
    RACED,
    fit_lookups,
    play_all,
    worth_racing,
)
from lede.lookup_player import LookupPlayer, LookupSetting, Played
from lede.lookup_table import LookupTable
from lede.policies import Lookup, LookupPolicy, parse_policy
from lede.threshold_fit import layer_costs
from lede.trace_table import TraceTable
from lede.tuning import Tuner
from tests.matched_texts import matched_text
from tests.tiny_models import N_LAYERS, prompt, tiny_model

HEAD = 0.5
PLAIN = N_LAYERS + HEAD


def costs(**given: float) -> CostModel:
    """A block runs through a layer for 1 however many tokens it has, a head read costs a half."""
    model = layer_costs(N_LAYERS, HEAD)
    return replace(model, costs=replace(model.costs, **given))


def text_of(prompt_ids: list[int], token_ids: list[int], said: dict[int, list[int]] | None = None) -> PromptTrace:
    """A text as given, and what some layers say at its decisions."""
    trace = matched_text(np.ones((len(token_ids) - 1, N_LAYERS)))
    tokens = np.full((len(token_ids) - 1, N_LAYERS), -1, dtype=np.int32)
    tokens[:, -1] = token_ids[1:]
    for layer, each in (said or {}).items():
        tokens[:, layer - 1] = each
    return replace(trace, prompt_ids=np.asarray(prompt_ids), token_ids=np.asarray(token_ids), token=tokens)


def play(trace: PromptTrace, plan: Lookup, model: CostModel, budget: int = 9, eos: tuple[int, ...] = ()) -> Played:
    table = TraceTable.from_traces([trace], budget, vocab_size=64)
    return LookupPlayer(LookupTable.from_table(table, LookupConfig(), eos=eos), model).play(plan)


def test_a_text_by_hand() -> None:
    """Behind 1 2 3 4 1 the copy 2 3 4 is right in two, and 9 corrects it; 9 is new, and the last token has no room."""
    trace = text_of([1, 2, 3, 4], [1, 2, 3, 9, 5, 7])
    found = play(trace, Lookup(3), costs(propose=0.25, index=0.125), budget=6)
    assert (found.rounds, found.drafting, found.tokens) == (3, 1, 5)
    seconds = 3 * PLAIN + 0.25 + 5 * 0.125  # blocks cost what one token does
    assert found.rate == pytest.approx(5 / seconds)
    assert found.speedup == pytest.approx(5 * PLAIN / seconds)


def test_a_copied_end_is_verified_and_ends_the_text() -> None:
    """The copy 2 3 ends at the EOS 3: two rows, two tokens, no bonus, though four might be copied."""
    trace = replace(text_of([1, 2, 3, 4], [1, 2, 3]), ended_by_eos=True)
    found = play(trace, Lookup(4), costs(layer_token=1.0), eos=(3,))
    assert (found.rounds, found.drafting, found.tokens) == (1, 1, 2)
    assert found.rate == pytest.approx(2 / (PLAIN + N_LAYERS))


def test_the_budget_shortens_a_copy() -> None:
    """Of 8 tokens 2 fit in, so that the bonus does too: three rows."""
    trace = text_of([1, 2, 3, 4, 5, 6], [1, 2, 3, 4])
    found = play(trace, Lookup(8), costs(layer_token=1.0), budget=4)
    assert (found.rounds, found.tokens) == (1, 3)
    assert found.rate == pytest.approx(3 / (PLAIN + 2 * N_LAYERS))


def test_pruning_spares_the_tail_and_may_leave_nothing() -> None:
    """Layer 2 says 2 and then 8 where the copy is 2 3 4: one is kept. Layer 3 agrees to nothing."""
    trace = text_of([1, 2, 3, 4], [1, 2, 9], {2: [2, 8], 3: [7, 7]})
    model = costs(layer_token=1.0, choose=0.25)
    kept = play(trace, Lookup(1), model, budget=6)
    assert (kept.rounds, kept.tokens) == (1, 2)
    cut = play(trace, Lookup(3, prune_at=2), model, budget=6)
    below, above = 2 + 2 * 3 + HEAD, (N_LAYERS - 2) * 2 + HEAD
    assert (cut.rounds, cut.drafting, cut.tokens) == (1, 1, 2)
    assert cut.rate == pytest.approx(2 / (below + 0.25 + above))
    nothing = play(trace, Lookup(3, prune_at=3), model, budget=6)
    assert (nothing.rounds, nothing.tokens) == (2, 2)


@pytest.mark.parametrize("prune_at", [None, 2, 4])
def test_rounds_are_the_decoders(prune_at: int | None) -> None:
    """On the texts of a tiny model; what is cut at a layer may differ behind a token that fooled it."""
    model, budget = tiny_model("llama"), 48
    prompts = [(n, prompt(n, 8)) for n in range(4)]
    traces = list(collect_teacher(model, prompts, Rules((2,), budget)))
    table = TraceTable.from_traces(traces, budget, model.vocab_size)
    for config in (LookupConfig(), LookupConfig(4, 2, "frequent")):
        player = LookupPlayer(LookupTable.from_table(table, config), costs())
        for length in (1, 3, 16):
            found = player.play(Lookup(length, prune_at))
            policy = LookupPolicy(
                draft_length=length,
                max_suffix=config.max_suffix,
                min_suffix=config.min_suffix,
                continuation=config.continuation,
                prune_at=prune_at,
            )
            outs = [generate(model, input_ids=ids, policy=policy, max_new_tokens=budget) for _, ids in prompts]
            assert found.tokens == sum(out.stats.tokens - 1 for out in outs)
            assert found.rounds == sum(len(out.rounds) for out in outs)


def test_every_setting_is_played_once_and_parses() -> None:
    trace = text_of([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3, 5, 4, 1])
    found = play_all([trace], costs(layer_token=0.05), 8, (), (2, 3))
    texts = [each.setting.text for each in found]
    assert len(texts) == len(set(texts)) > 1000
    assert [each.rate for each in found] == sorted((each.rate for each in found), reverse=True)
    for each in found[::50]:
        policy = parse_policy(each.setting.text)
        assert isinstance(policy, LookupPolicy)
        assert (policy.lookup, policy.plan) == (each.setting.config, each.setting.plan)
    assert {each.setting.plan.length for each in found} == set(LENGTHS)


def made(length: int, rate: float, prune_at: int | None = None, longest: int = 3) -> Played:
    return Played(LookupSetting(LookupConfig(longest), Lookup(length, prune_at)), rate, rate / 100, 9, 5, 20)


def test_the_clock_decides_between_lengths_and_not_between_searches() -> None:
    played = [made(4, 150, longest=4), made(4, 149), made(5, 140), *(made(n, 130 - n) for n in (6, 7, 8, 9, 10, 12))]
    found = worth_racing(played)
    assert [each.setting.plan.length for each in found] == [4, 5, 6, 7, 8, 9]
    assert len(found) == RACED
    assert found[0].setting.config.max_suffix == 4


def test_pruning_is_raced_only_where_it_clearly_pays() -> None:
    played = [made(8, 160, prune_at=2), made(4, 151, prune_at=3), made(4, 150), made(5, 140)]
    assert [each.setting.plan for each in worth_racing(played)] == [Lookup(8, 2), Lookup(4), Lookup(5)]


def test_a_text_of_one_token_tells_nothing() -> None:
    with pytest.raises(ValueError, match="answered by at least 2 tokens"):
        play_all([text_of([1, 2], [3])], costs(), 8)


def test_lookup_by_name_is_played_and_raced_on_a_real_model() -> None:
    model, prompts = tiny_model("llama"), [prompt(n, 6) for n in range(3)]
    found = fit_lookups(model, prompts, 24, layers=(2,))
    assert 1 < len(found.texts) <= RACED
    assert found.evaluations % 3 == 0
    tuned = Tuner(model, prompts, 24).tune("lookup")
    assert isinstance(tuned.policy, LookupPolicy)
    assert tuned.settings.startswith("lookup:draft_length=")
    assert tuned.cost.evaluations >= found.evaluations
    assert tuned.cost.collecting_seconds > 0
    assert "played on traces" in tuned.cost.note
    assert {point.settings.partition(":")[0] for point in tuned.points} == {"lookup"}
