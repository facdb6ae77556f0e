"""With sampling, wrong drafts and what follows them have the laws that deployment gives them."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import torch

from lede.buffers import PromptTrace
from lede.collectors import BranchRules, collect_teacher
from lede.collectors.branch_walk import draw_tokens
from lede.envs import Rules
from lede.features import primitives
from lede.models import EarlyExitModel
from lede.verification import Warp
from tests.ending_models import ending_model, layer_logits
from tests.table_model import Law, chi_square_z
from tests.tiny_models import prompt, tiny_model

MODEL = tiny_model("llama")
IDS = tuple(prompt(0, 5))


@cache
def logits_after(ids: tuple[int, ...]) -> torch.Tensor:
    """Logits `(layer, vocabulary)` at the last position, from transformers' own forward."""
    return layer_logits(MODEL, list(ids))[:, -1]


@cache
def reading(ids: tuple[int, ...], layer: int) -> tuple[float, float, float]:
    """Entropy, top-1 and top-2 log-probability of a layer at the last position."""
    read = primitives(logits_after(ids)[layer - 1])
    return float(read.entropy), float(read.top1), float(read.top2)


def sampled(
    rules: Rules, n: int, depth: int = 11, model: EarlyExitModel = MODEL, batch: int = 100
) -> list[PromptTrace]:
    prompts = [(i, IDS) for i in range(n)]
    return list(collect_teacher(model, prompts, rules, 7, batch, branching=BranchRules(1, depth)))


def token_run(trace: PromptTrace, branch: int, step: int, before: tuple[int, ...], options: list[int]) -> int:
    """Which of the tokens was run at a position of a branch, told by what the branch then saw."""
    layer = int(trace.branch_layer[branch])
    seen = [trace.branch_entropy[branch, step], trace.branch_top1[branch, step], trace.branch_top2[branch, step]]
    fits = [t for t in options if np.allclose(seen, reading((*before, t), layer), rtol=1e-5, atol=1e-6)]
    assert len(fits) == 1, "one token, out of those that can be drawn, explains what the branch saw"
    return fits[0]


def test_the_wrong_token_has_the_law_of_a_rejected_draft() -> None:
    warp, n = Warp(1.0, top_k=4), 600
    found = sampled(Rules((1, 2), 2, warp=warp), n)
    contexts = Counter(int(trace.token_ids[0]) for trace in found)
    seen: dict[tuple[int, int], Counter[int]] = {}
    for trace in found:
        first = int(trace.token_ids[0])
        p, *_ = warp.probabilities(logits_after((*IDS, first))[-1:])
        for b in range(trace.n_branches):
            assert (trace.branch_row[b], trace.branch_length[b]) == (0, 1)
            layer = int(trace.branch_layer[b])
            q = warp.probabilities(logits_after((*IDS, first))[layer - 1 : layer])[0]
            token = token_run(trace, b, 0, (*IDS, first), torch.nonzero(q > p).flatten().tolist())
            seen.setdefault((first, layer), Counter())[token] += 1
    spread = 0
    for (first, layer), counts in seen.items():
        both = warp.probabilities(logits_after((*IDS, first)))
        excess = (both[layer - 1] - both[-1]).clamp_min(0)
        rejected, total = float(excess.sum()), contexts[first]
        drawn = sum(counts.values())
        assert abs(drawn - total * rejected) <= 4 * (total * rejected * (1 - rejected)) ** 0.5 + 1e-9
        law: Law = {(token,): float(excess[token] / rejected) for token in torch.nonzero(excess).flatten().tolist()}
        drawn_law: Law = {(token,): float(count) for token, count in counts.items()}
        assert chi_square_z(drawn_law, law) < 5
        spread += len(law) > 1 and drawn > 50
    assert spread >= 2, "there were laws to tell apart"


def test_a_branch_goes_on_with_draws_from_its_layer() -> None:
    warp = Warp(1.0, top_k=2)
    found = sampled(Rules((2,), 7, warp=warp), 36, depth=4, batch=12)
    surplus = variance = together = pairs = 0.0
    for trace in found:
        for b in range(trace.n_branches):
            row = int(trace.branch_row[b])
            text = (*IDS, *trace.token_ids[: row + 1].tolist())
            before = 0.0
            for step in range(trace.branch_length[b]):
                q = warp.probabilities(logits_after(text)[1:2])[0]
                options = torch.nonzero(q).flatten().tolist()
                token = token_run(trace, b, step, text, options)
                if step > 0:  # the wrong draft itself is the other test's
                    likelier = float(q.max())
                    surplus += float(q[token] == likelier) - likelier
                    variance += likelier * (1 - likelier)
                    chance = float(q[options[0]])
                    drawn = ((token == options[0]) - chance) / (chance * (1 - chance)) ** 0.5
                    together += before * drawn
                    pairs += before != 0
                    before = drawn
                text = (*text, token)
                at = logits_after(text).argmax(-1)
                np.testing.assert_array_equal(trace.branch_token[b, step, :2], at[:2].numpy())
    assert min(variance, pairs) > 10
    assert abs(surplus) < 4 * variance**0.5
    assert abs(together) < 4 * pairs**0.5, "draws at successive positions have nothing to do with each other"


def test_sampled_content_depends_on_neither_batch_nor_order() -> None:
    rules = Rules((1, 2, 4), 10, warp=Warp(0.8, top_k=5))
    prompts = [(i, prompt(i, 4 + i % 3)) for i in range(6)]
    alone, together, backwards = (
        sorted(
            collect_teacher(tiny_model("mistral"), prompts[::step], rules, 3, batch, branching=BranchRules(0.5)),
            key=lambda trace: trace.prompt_index,
        )
        for step, batch in ((1, 1), (1, 4), (-1, 3))
    )
    assert sum(trace.n_branches for trace in alone) > 20
    for other in (together, backwards):
        for a, b in zip(alone, other, strict=True):
            for name in ("branch_row", "branch_layer", "branch_length", "branch_token"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
            np.testing.assert_allclose(a.branch_entropy, b.branch_entropy, atol=1e-4)


def test_drawn_eos_ends_a_branch() -> None:
    rules = Rules((1,), 12, warp=Warp(1.0, top_k=4))
    endless = sampled(rules, 20)
    tokens = Counter(int(t) for trace in endless for t in set(trace.branch_token[:, 1, 0].tolist()))
    texts = {int(t) for trace in endless for t in trace.token_ids}
    eos = next(token for token, _ in tokens.most_common() if token not in texts and token >= 0)
    found = sampled(rules, 20, model=ending_model(eos))
    early = 0
    for trace, old in zip(found, endless, strict=True):
        np.testing.assert_array_equal(trace.token_ids, old.token_ids)
        kept = dict(zip(zip(old.branch_row, old.branch_layer, strict=True), range(old.n_branches), strict=True))
        for b in range(trace.n_branches):
            before = kept[trace.branch_row[b], trace.branch_layer[b]]
            n = int(trace.branch_length[b])
            np.testing.assert_array_equal(trace.branch_token[b, :n], old.branch_token[before, :n])
            early += n < old.branch_length[before]
    assert early > 0


def test_draws_are_looked_up_in_the_law() -> None:
    weights = torch.tensor([[0.0, 0.2, 0.0, 0.6, 0.0]]).expand(1000, 5)
    drawn = draw_tokens(weights, torch.from_numpy((np.arange(1000) + 0.5) / 1000))
    assert torch.bincount(drawn, minlength=5).tolist() == [0, 250, 0, 750, 0]
    edges = draw_tokens(weights[:2], torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert edges.tolist() == [1, 3]
