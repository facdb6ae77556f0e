"""Every branch is what the drafter would see: against a fresh prefill of its text through its layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from lede.buffers import PromptTrace
from lede.collectors import BranchRules, collect_teacher
from lede.envs import Rules
from lede.features import primitives
from lede.models import EarlyExitModel
from tests.ending_models import ending_model, model_that_ends
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, VOCAB_SIZE, prompt, tiny_model

CANDIDATES = (1, 2, 4)
RULES = Rules(CANDIDATES, 14)
PROMPTS = [prompt(i, 4 + 3 * (i % 3)) for i in range(6)]
FLOATS = ("confidence", "entropy", "top1", "top2")


def traces(
    model: EarlyExitModel,
    branching: BranchRules | None,
    batch_size: int = 4,
    order: Any = range(6),
    prompts: list[list[int]] = PROMPTS,
) -> list[PromptTrace]:
    found = collect_teacher(model, [(i, prompts[i]) for i in order], RULES, 3, batch_size, branching=branching)
    return sorted(found, key=lambda trace: trace.prompt_index)


def branch_keys(trace: PromptTrace) -> list[tuple[int, int]]:
    return list(zip(trace.branch_row.tolist(), trace.branch_layer.tolist(), strict=True))


def wrong_drafts(trace: PromptTrace, candidates: tuple[int, ...] = CANDIDATES) -> list[tuple[int, int]]:
    """Row and layer of every wrong draft of a greedy text."""
    wrong = trace.token != trace.token_ids[1:, None]
    return [(row, layer) for row in range(trace.n_decided) for layer in candidates if wrong[row, layer - 1]]


def drafted(trace: PromptTrace, branch: int) -> list[int]:
    """The tokens that a greedy branch runs, the wrong draft first, as far as it says, and the one after them."""
    row, layer = branch_keys(trace)[branch]
    after = trace.branch_token[branch, : trace.branch_length[branch], layer - 1]
    return [int(trace.token[row, layer - 1]), *after.tolist()]


@torch.no_grad()
def fresh_prefill(model: EarlyExitModel, ids: list[int], layer: int) -> torch.Tensor:
    """Logits `(layer, position, vocabulary)` of layers 1..layer."""
    cache = model.new_cache(len(ids))
    block = model.block(cache, 0, len(ids))
    hidden = model.embed(torch.tensor([ids]), block)
    logits = []
    for i in range(layer):
        hidden = model.run_layers(hidden, i, i + 1, block)
        logits.append(model.head(hidden)[0])
    return torch.stack(logits)


def assert_branches_are_true(model: EarlyExitModel, trace: PromptTrace, depth: int = 11, budget: int = 14) -> None:
    for b, (row, layer) in enumerate(branch_keys(trace)):
        length = int(trace.branch_length[b])
        tokens = drafted(trace, b)
        before = [*trace.prompt_ids.tolist(), *trace.token_ids[: row + 1].tolist()]
        logits = fresh_prefill(model, [*before, *tokens[:-1]], layer)[:, len(before) :]
        read = primitives(logits[-1])
        for name in FLOATS:
            seen = getattr(trace, f"branch_{name}")[b]
            np.testing.assert_allclose(seen[:length], getattr(read, name).numpy(), rtol=1e-5, atol=1e-6, err_msg=name)
            assert not seen[length:].any()
        # also says that each token run was the layer's own, from the wrong draft on
        np.testing.assert_array_equal(trace.branch_token[b, :length, :layer].T, logits.argmax(-1).numpy())
        assert (trace.branch_token[b, :, layer:] == -1).all()
        assert (trace.branch_token[b, length:] == -1).all()
        ends = tokens[length] in model.eos_token_ids
        assert ends or length == min(depth, budget - 1 - row), "only EOS, the depth and the budget end a branch"


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_wrong_draft_has_a_true_branch(family: str, batch_size: int) -> None:
    model = tiny_model(family)
    found = traces(model, BranchRules(share=1), batch_size)
    for trace in found:
        assert branch_keys(trace) == wrong_drafts(trace)
        assert trace.branch_token.shape == (trace.n_branches, 11, N_LAYERS)
        assert_branches_are_true(model, trace)
    assert {layer for trace in found for _, layer in branch_keys(trace)} == set(CANDIDATES)
    last = [b for trace in found for b in range(trace.n_branches) if trace.branch_row[b] == trace.n_decided - 1]
    assert last, "some last decision is wrong"
    lengths = {int(n) for trace in found for n in trace.branch_length}
    assert {1, 11} <= lengths, "the budget's end and the depth both end branches"


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_content_depends_on_neither_batch_nor_order_nor_chunks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    branching = BranchRules(0.4, depth=5)
    alone = traces(model, branching, 1)
    others = [traces(model, branching, 4), traces(model, branching, 3, range(5, -1, -1))]
    monkeypatch.setattr("lede.collectors.branches.LOGITS_AT_ONCE", 3 * VOCAB_SIZE)
    others.append(traces(model, branching, 6))
    monkeypatch.setattr("lede.collectors.branches.NUMBERS_AT_ONCE", 1)
    others.append(traces(model, branching, 6))
    assert sum(trace.n_branches for trace in alone) > 20
    for other in others:
        for a, b in zip(alone, other, strict=True):
            for name, value in vars(a).items():
                if name.startswith("branch"):
                    close = {"rtol": 1e-5, "atol": 1e-6} if value.dtype.kind == "f" else {"rtol": 0}
                    np.testing.assert_allclose(getattr(b, name), value, **close, err_msg=name)
    again = traces(model, branching, 1)
    for a, b in zip(alone, again, strict=True):
        assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in vars(a))


def test_without_a_share_there_are_none() -> None:
    model = tiny_model("llama")
    for branching in (None, BranchRules(share=0)):
        for trace, full in zip(traces(model, branching), traces(model, BranchRules(share=1)), strict=True):
            assert trace.n_branches == 0
            assert full.n_branches > 0
            np.testing.assert_array_equal(trace.match, full.match)  # the rest is the same
            np.testing.assert_array_equal(trace.entropy, full.entropy)


def test_every_layer_gets_its_share_and_every_draft_the_same_chance() -> None:
    n, share = 300, 0.3
    found = traces(tiny_model("llama"), BranchRules(share, 1), 100, range(n), prompts=[PROMPTS[1]] * n)
    wrong = wrong_drafts(found[0])
    per_layer = Counter(layer for _, layer in wrong)
    assert set(per_layer) == set(CANDIDATES)
    for trace in found:
        counts = Counter(layer for _, layer in branch_keys(trace))
        assert all(abs(counts[layer] - share * total) < 1 for layer, total in per_layer.items())
        assert set(branch_keys(trace)) <= set(wrong)
    chosen = Counter(key for trace in found for key in branch_keys(trace))
    z = [(chosen[key] - n * share) / (n * share * (1 - share)) ** 0.5 for key in wrong]
    assert max(map(abs, z)) < 4
    # streams of layers and prompts are apart: drafts at one row are not chosen together
    assert len({tuple(branch_keys(trace)) for trace in found}) > n / 4


def test_a_drafted_eos_ends_a_branch() -> None:
    endless = traces(tiny_model("llama"), BranchRules(share=1))
    texts = {int(token) for trace in endless for token in trace.token_ids}
    tokens = Counter(t for trace in endless for b in range(trace.n_branches) for t in set(drafted(trace, b)) - texts)
    eos, n_ended = tokens.most_common(1)[0]
    assert n_ended > 3
    model = ending_model(eos)
    lengths: list[int] = []
    for trace, old in zip(traces(model, BranchRules(share=1)), endless, strict=True):
        np.testing.assert_array_equal(trace.token_ids, old.token_ids)
        assert_branches_are_true(model, trace)
        kept = [b for b in range(old.n_branches) if drafted(old, b)[0] != eos]
        assert branch_keys(trace) == [branch_keys(old)[b] for b in kept], "nothing follows an EOS as wrong draft"
        for b, before in enumerate(kept):
            run = drafted(old, before)
            length = run.index(eos) if eos in run[:-1] else int(old.branch_length[before])
            assert trace.branch_length[b] == length
            np.testing.assert_array_equal(trace.branch_token[b, :length], old.branch_token[before, :length])
            lengths += [length] if eos in run[:-1] else []
    assert lengths, "EOS came inside a branch"


def test_branches_go_on_behind_a_text_that_ends_early() -> None:
    model, n_tokens = model_that_ends(PROMPTS[0], 5)
    for batch_size in (1, 4):
        found = traces(model, BranchRules(share=1), batch_size)
        trace = found[0]
        assert (trace.ended_by_eos, trace.token_ids.size) == (True, n_tokens)
        keys = branch_keys(trace)
        wrong = [
            (row, layer) for row, layer in wrong_drafts(trace) if trace.token[row, layer - 1] != trace.token_ids[-1]
        ]
        assert keys == wrong
        at_last = [b for b, (row, _) in enumerate(keys) if row == trace.n_decided - 1]
        assert at_last
        assert max(int(trace.branch_length[b]) for b in at_last) > 1
        for each in found:
            assert_branches_are_true(model, each)


def test_only_the_layers_of_the_branches_run() -> None:
    model = ending_model(VOCAB_SIZE)
    tokens = dict.fromkeys(range(1, N_LAYERS + 1), 0)

    def count(layer: int, shape: torch.Size) -> None:
        tokens[layer] += shape[0] * shape[1]

    plain = traces(model, None, 6)
    for i, layer in enumerate(model.hf_model.model.layers, start=1):
        layer.register_forward_hook(lambda _, inputs, __, i=i: count(i, inputs[0].shape))
    traces(model, None, 6)
    without = dict(tokens)
    found = traces(model, BranchRules(share=1), 6)
    assert [trace.token_ids.tolist() for trace in found] == [trace.token_ids.tolist() for trace in plain]
    for layer in tokens:
        extra = tokens[layer] - 2 * without[layer]
        assert extra == sum(int(t.branch_length[t.branch_layer >= layer].sum()) for t in found), f"layer {layer}"


@pytest.mark.parametrize(("share", "depth"), [(-0.1, 11), (1.1, 11), (0.1, 0), (0.1, 2**15), (float("nan"), 11)])
def test_rules_out_of_range_are_refused(share: float, depth: int) -> None:
    with pytest.raises(ValueError, match="branch"):
        BranchRules(share, depth)
