"""What a search is told, against direct computations on the plain transformers model; the cache must not notice."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DynamicCache

from lede.decoding import prefill
from lede.models import EarlyExitModel, load_model
from lede.policies import SkipSublayers
from lede.statistics import Meter
from lede.text_probe import Measure, TextProbe
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, VOCAB_SIZE, prompt, tiny_hf_model, tiny_model

N_PROMPT, N_IDS = 9, 30
WIDTH = 32
PLANS = [
    SkipSublayers(frozenset({3}), frozenset()),
    SkipSublayers(frozenset(), frozenset({2, 5})),
    SkipSublayers(frozenset({2, 4}), frozenset({4})),
]


def make_probe(model: EarlyExitModel, ids: list[int], meter: Meter | None = None) -> TextProbe:
    """A probe of a text as it stands between two rounds: the last token is not in the cache."""
    cache = prefill(model, ids[:-1], capacity=len(ids) + 4).cache
    return TextProbe(model, cache, ids, N_PROMPT, meter or Meter())


def parts(hf_model: Any) -> tuple[Any, Sequence[Any]]:
    """The family and the layers of a transformers model."""
    family = load_model((hf_model, None)).family
    return family, getattr(getattr(hf_model, family.decoder), family.layers)


def outputs(hf_model: Any, ids: list[int]) -> list[list[torch.Tensor]]:
    """What each layer's attention and MLP add, `(token, width)` each, from hooks on a plain forward pass."""
    family, layers = parts(hf_model)
    found: list[list[torch.Tensor]] = [[] for _ in layers]
    handles = []
    for i, layer in enumerate(layers):
        for names in (family.attention, family.mlp):

            def keep(_: Any, __: Any, out: Any, i: int = i) -> None:
                found[i].append((out[0] if isinstance(out, tuple) else out)[0])

            handles.append(layer.get_submodule(names.norm_after or names.module).register_forward_hook(keep))
    with torch.inference_mode():
        hf_model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return found


def certainty(logits: torch.Tensor) -> float:
    """1 - H / ln(width), mean over rows, in numpy and float64."""
    rows = logits.double().numpy()
    p = np.exp(rows - rows.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return float(np.mean(1 + (p * np.log(p)).sum(-1) / np.log(rows.shape[-1])))


def wanted_confidence(hf_model: Any, ids: list[int], measure: Measure, n_read: int) -> list[list[float]]:
    family, _ = parts(hf_model)
    norm, head = getattr(getattr(hf_model, family.decoder), family.norm), hf_model.get_output_embeddings()
    with torch.inference_mode():
        return [
            [certainty(head(norm(o[-n_read:])) if measure == "head" else o[-n_read:]) for o in layer]
            for layer in outputs(hf_model, ids[:-1])
        ]


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize(
    ("measure", "n_tokens", "probe_tokens", "n_read"),
    [("head", 12, None, 12), ("head", 12, 5, 5), ("head", 3, 16, 3), ("hidden", 12, 5, 12), ("head", 29, 1, 1)],
)
def test_confidence_is_that_of_a_plain_forward_pass(
    family: str, measure: Measure, n_tokens: int, probe_tokens: int | None, n_read: int
) -> None:
    """Fewer and more tokens than the windows of 8, up to the whole cache."""
    model, ids, meter = tiny_model(family), prompt(3, N_IDS), Meter()
    found = make_probe(model, ids, meter).sublayer_confidence(n_tokens, measure, probe_tokens)
    assert found.shape == (N_LAYERS, 2)
    assert found.dtype == np.float32
    wanted = wanted_confidence(model.hf_model, ids, measure, n_read)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)
    assert found.min() > 0
    assert found.max() < 1
    assert np.ptp(found) > 1e-4  # a probe that reads one place twelve times would be found out
    assert meter.head_reads == (2 * N_LAYERS * n_read if measure == "head" else 0)


def test_confidence_of_known_distributions() -> None:
    """All zeros know nothing; one entry far above the others is certain."""
    hf_model = tiny_hf_model("llama")
    with torch.no_grad():
        hf_model.model.layers[2].mlp.down_proj.weight.zero_()
        hf_model.model.layers[4].self_attn.o_proj.weight.zero_()
        hf_model.model.layers[4].self_attn.o_proj.weight[7] = 1e6
        hf_model.model.layers[4].self_attn.o_proj.weight[8] = -1e6  # whatever the sign of the sum is
    probe = make_probe(load_model((hf_model, None)), prompt(3, N_IDS))
    for measure in ("head", "hidden"):
        assert probe.sublayer_confidence(6, measure)[2, 1] == pytest.approx(0, abs=1e-6)
    assert probe.sublayer_confidence(6, "hidden")[4, 0] == pytest.approx(1, abs=1e-6)


class Nothing(nn.Module):
    """Adds nothing in place of a sublayer of a copied model."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        zeros = 0 * (args[0] if args else kwargs["hidden_states"])
        return (zeros, None) if self.pair else zeros


def wanted_matchness(hf_model: Any, ids: list[int], plan: SkipSublayers, start: int, n_tokens: int) -> float:
    """Transformers' own cache of the text before, and a copy of the model whose sublayers are gone behind it."""
    bare = copy.deepcopy(hf_model)
    family, layers = parts(bare)
    for names, left_out, pair in ((family.attention, plan.attention, True), (family.mlp, plan.mlp, False)):
        for layer in left_out:
            setattr(layers[layer - 1], names[1], Nothing(pair))
    known = inspect.signature(hf_model.forward).parameters
    cache: Any = {"cache" if "cache" in known else "past_key_values": DynamicCache(), "use_cache": True}
    with torch.inference_mode():
        hf_model(torch.tensor([ids[:start]]), **cache)
        logits = bare(torch.tensor([ids[start : start + n_tokens]]), **cache).logits[0]
    return float((logits.argmax(-1) == torch.tensor(ids[start + 1 : start + n_tokens + 1])).float().mean())


def text_that_partly_matches(model: EarlyExitModel, plan: SkipSublayers) -> list[int]:
    """Prompt ids, then about as many tokens of the draft's as random ones."""
    ids, luck = prompt(4, N_PROMPT), np.random.default_rng(0)
    while len(ids) < N_IDS:
        with torch.inference_mode():
            block = model.block(model.new_cache(len(ids)), 0, len(ids))
            hidden = model.run_layers(model.embed(torch.tensor([ids]), block), 0, plan.prefix, block)
            drafted = int(model.head(model.run_skipping(hidden, plan, block))[0, -1].argmax())
        ids.append(drafted if luck.random() < 0.6 else int(luck.integers(VOCAB_SIZE)))
    return ids


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_matchness_is_that_of_a_model_without_the_sublayers(family: str, plan: SkipSublayers) -> None:
    model, meter = tiny_model(family), Meter()
    ids = text_that_partly_matches(model, plan)
    probe = make_probe(model, ids, meter)
    assert (probe.n_new, probe.n_prompt, probe.n_layers) == (N_IDS - N_PROMPT, N_PROMPT, N_LAYERS)
    found = []
    for first, n_tokens in ((0, 20), (0, 1), (6, 9), (19, 1), (10, 10)):
        found.append(probe.matchness(plan, first, n_tokens))
        assert found[-1] == pytest.approx(wanted_matchness(model.hf_model, ids, plan, N_PROMPT + first, n_tokens))
    assert any(0.2 < share < 0.9 for share in found)
    assert meter.head_reads == 20 + 1 + 9 + 1 + 10


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_cache_is_bit_for_bit_as_before(family: str) -> None:
    model, ids = tiny_model(family, torch.float32), prompt(5, N_IDS)
    probe = make_probe(model, ids)
    cache = probe._cache
    with torch.inference_mode():
        before = [b.clone() for b in (*cache.keys, *cache.values) if b is not None]
    lengths = list(cache.lengths)
    probe.sublayer_confidence(14, "head", 4)
    probe.sublayer_confidence(29, "hidden")
    probe.matchness(PLANS[2], 3, 12)
    with pytest.raises(ValueError, match="can't be left out"):
        probe.matchness(SkipSublayers(frozenset({1}), frozenset()), 3, 12)
    after = [b for b in (*cache.keys, *cache.values) if b is not None]
    assert cache.lengths == lengths == [N_IDS - 1] * N_LAYERS
    assert len(before) == 2 * N_LAYERS
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_pass_that_fails_leaves_the_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = load_model((tiny_hf_model("llama"), None)), prompt(5, N_IDS)
    probe = make_probe(model, ids)
    with torch.inference_mode():
        before = [b.clone() for b in probe._cache.keys if b is not None]
    monkeypatch.setattr(model, "run_skipping", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probe.matchness(PLANS[0], 0, 5)
    assert probe._cache.lengths == [N_IDS - 1] * N_LAYERS
    assert all(torch.equal(a, b) for a, b in zip(before, probe._cache.keys, strict=True) if b is not None)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda probe: probe.sublayer_confidence(0, "head"), "cannot probe 0 tokens"),
        (lambda probe: probe.sublayer_confidence(30, "head"), "the text has 29 that another one follows"),
        (lambda probe: probe.sublayer_confidence(3, "logits"), "measure must be 'head' or 'hidden', got 'logits'"),
        (lambda probe: probe.sublayer_confidence(3, "head", 0), "probe_tokens must be at least 1, got 0"),
        (lambda probe: probe.matchness(PLANS[0], 0, 0), "cannot probe 0 tokens from position 9"),
        (lambda probe: probe.matchness(PLANS[0], -1, 3), "counts the new tokens from 0, got -1"),
        (lambda probe: probe.matchness(PLANS[0], 15, 6), "cannot probe 6 tokens from position 24"),
    ],
)
def test_questions_beyond_the_text_are_refused(ask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(make_probe(tiny_model("llama"), prompt(3, N_IDS)))
