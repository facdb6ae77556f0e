"""Texts that are read while they are written: against a pass over the finished text, and alone against together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lede.buffers import PromptTrace, same_record
from lede.collectors import BranchRules, collect_teacher, head_table, read_traces, teacher_batch
from lede.collectors.head_table import COLUMNS, read_heads, unpacked
from lede.collectors.texts import Text
from lede.envs import Rules
from lede.features import primitives
from lede.models import EarlyExitModel
from lede.onednn import packing_works
from lede.packed_weights import PackedWeight
from lede.verification import Warp
from tests.ending_models import ending_model, model_that_ends
from tests.host_watcher import HostWatcher
from tests.tiny_models import FAMILY_NAMES, N_LAYERS, VOCAB_SIZE, prompt, tiny_model

PROMPTS = [prompt(i, 4 + 3 * (i % 3)) for i in range(6)]
GREEDY = Rules((1, 2, 4), 12)
SAMPLED = replace(GREEDY, warp=Warp(0.8, top_k=40))
EVERY_BRANCH = BranchRules(1.0, 4)


def traces(
    model: EarlyExitModel, rules: Rules = GREEDY, batch_size: int = 6, prompts: Any = PROMPTS, **settings: Any
) -> list[PromptTrace]:
    return list(collect_teacher(model, list(enumerate(prompts)), rules, 3, batch_size, **settings))


def assert_same(a: PromptTrace, b: PromptTrace) -> None:
    for name, value in vars(a).items():
        other = np.asarray(getattr(b, name))
        if other.dtype.kind == "f":
            np.testing.assert_allclose(value, other, atol=1e-4, err_msg=name)
        else:
            np.testing.assert_array_equal(value, other, err_msg=name)


def text_of(trace: PromptTrace) -> Text:
    return Text(trace.prompt_index, trace.prompt_ids.tolist(), trace.token_ids.tolist(), trace.ended_by_eos)


@pytest.mark.parametrize("rules", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_what_is_read_on_the_way_is_what_a_pass_over_the_text_reads(family: str, rules: Rules) -> None:
    model = tiny_model(family)
    written = traces(model, rules, branching=EVERY_BRANCH)
    assert sum(trace.n_branches for trace in written) > 20
    passed = read_traces(model, [text_of(trace) for trace in written], rules, 3, EVERY_BRANCH)
    for a, b in zip(written, passed, strict=True):
        assert_same(a, b)


def test_texts_of_unequal_ends_keep_their_branches() -> None:
    """Rows that go on change places with those that have ended, whose branches still find their text."""
    model = ending_models()
    together = traces(model, branching=EVERY_BRANCH)
    assert len({len(trace.token_ids) for trace in together}) > 2
    ended = [trace for trace in together if trace.ended_by_eos]
    assert any(trace.n_branches for trace in ended)
    assert [trace.prompt_index for trace in together] == list(range(6))
    for a, b in zip(together, traces(model, batch_size=1, branching=EVERY_BRANCH), strict=True):
        assert_same(a, b)
    for a, b in zip(together, read_traces(model, [text_of(t) for t in together], GREEDY, 3, EVERY_BRANCH), strict=True):
        assert_same(a, b)


def ending_models() -> EarlyExitModel:
    """A model with several ids that end a text, so that the texts of the prompts end here and there."""
    plain = traces(tiny_model("llama"))
    model = ending_model(VOCAB_SIZE)
    ends = [int(plain[0].token_ids[2]), int(plain[2].token_ids[5]), int(plain[4].token_ids[8])]
    model.hf_model.generation_config.eos_token_id = ends
    return model


@pytest.mark.parametrize("rules", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("every", [3, 16])
def test_how_often_the_host_looks_changes_nothing(monkeypatch: pytest.MonkeyPatch, every: int, rules: Rules) -> None:
    model = ending_models()
    wanted = traces(model, rules, branching=EVERY_BRANCH)
    monkeypatch.setitem(teacher_batch.LOOK_EVERY, "cpu", every)
    counted: list[int] = []
    found = traces(model, rules, branching=EVERY_BRANCH, on_tokens=counted.append)
    for a, b in zip(wanted, found, strict=True):
        assert_same(a, b)
    assert sum(counted) == sum(len(trace.token_ids) for trace in found)
    assert len(counted) <= -(-12 // every)


def crossings(n_tokens: int, rules: Rules) -> int:
    model = tiny_model("llama")
    with HostWatcher() as watcher:
        traces(model, replace(rules, max_new_tokens=n_tokens))
    return sum(watcher.counts.values())


@pytest.mark.parametrize("rules", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_token_crosses_to_the_host_by_itself(monkeypatch: pytest.MonkeyPatch, rules: Rules) -> None:
    each_token = crossings(28, rules) - crossings(12, rules)
    assert each_token >= 16, "the watcher sees that the host looks at every token on a CPU"
    monkeypatch.setitem(teacher_batch.LOOK_EVERY, "cpu", 100)
    assert crossings(28, rules) == crossings(12, rules)


def test_features_of_all_layers_come_from_one_call_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def noted(logits: torch.Tensor, top_k: int, powers: torch.Tensor) -> Any:
        shapes.append(tuple(logits.shape))
        return primitives(logits, top_k, powers)

    monkeypatch.setattr(head_table, "primitives", noted)
    traces(tiny_model("llama"))
    chunk = head_table.positions_at_once(tiny_model("llama"))
    assert {shape[1:] for shape in shapes} == {(N_LAYERS, VOCAB_SIZE)}
    assert sum(shape[0] for shape in shapes) == 6 * 12
    assert len(shapes) == -(-6 * 12 // chunk)


def test_the_memory_of_chunks_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setitem(head_table.LOGITS_AT_ONCE, "cpu", 4 * N_LAYERS * VOCAB_SIZE)
    monkeypatch.setattr(head_table, "ROWS_AT_ONCE", 1)
    places: set[int] = set()
    sizes: list[int] = []

    def noted(logits: torch.Tensor, top_k: int, powers: torch.Tensor) -> Any:
        places.add(powers.data_ptr())
        sizes.append(len(logits))
        return primitives(logits, top_k, powers)

    wanted = traces(model)
    monkeypatch.setattr(head_table, "primitives", noted)
    for a, b in zip(wanted, traces(model), strict=True):
        assert_same(a, b)
    assert len(places) == 1
    assert set(sizes) == {3}, "chunks of six rows, four at once, are even"


@pytest.mark.parametrize("every_at_once", [True, False])
def test_the_last_layer_is_read_once(monkeypatch: pytest.MonkeyPatch, every_at_once: bool) -> None:
    """Where a position fills a chunk its next tokens come from the table; otherwise the head is asked for them."""
    model = tiny_model("llama")
    shapes: list[tuple[int, ...]] = []
    wanted = traces(model)
    monkeypatch.setitem(head_table.LOGITS_AT_ONCE, "cpu", (4 if every_at_once else 8) * N_LAYERS * VOCAB_SIZE)
    monkeypatch.setattr(head_table, "ROWS_AT_ONCE", 1)
    head = model.head

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(hidden.shape))
        return head(hidden)

    monkeypatch.setattr(model, "head", noted)
    for a, b in zip(wanted, traces(model), strict=True):
        assert_same(a, b)
    # the prompts' ends, then eleven choices
    assert sum(shape[1] == 1 for shape in shapes) == (1 if every_at_once else 12)


@pytest.mark.parametrize("rules", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_alone_a_text_is_the_same_bit_by_bit(rules: Rules) -> None:
    model = tiny_model("mistral", torch.float32)
    row = traces(model, rules, batch_size=1, branching=EVERY_BRANCH)
    for i in (4, 1):
        (alone,) = collect_teacher(model, [(i, PROMPTS[i])], rules, 3, 8, branching=EVERY_BRANCH)
        assert same_record(alone, row[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_give_float32_features(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype)
    for trace in traces(model):
        assert trace.entropy.dtype == trace.confidence.dtype == trace.closing_top1.dtype == np.float32
        assert len(np.unique(trace.entropy)) > 0.9 * trace.entropy.size, "half precision would fall together"
    states = torch.randn(3, N_LAYERS, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        columns = unpacked(read_heads(model, states, GREEDY).numpy())
        wanted = primitives(model.head(states).double())
    for name in ("confidence", "entropy", "top1", "top2"):
        np.testing.assert_allclose(columns[name], getattr(wanted, name), rtol=1e-4, err_msg=name)
    np.testing.assert_array_equal(columns["token"], wanted.token)


@pytest.mark.skipif(not packing_works(torch.float32), reason="needs oneDNN")
def test_a_packed_copy_of_the_head_says_the_same_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", torch.float32, seed=1)  # its weights are changed
    copies: list[PackedWeight] = []

    def noted(weight: torch.Tensor, transposed: bool) -> PackedWeight:
        copies.append(PackedWeight(weight, transposed))
        return copies[-1]

    monkeypatch.setattr(head_table, "PackedWeight", noted)
    states = torch.randn(9, N_LAYERS, 32, generator=torch.Generator().manual_seed(0))

    def both_ways(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = read_heads(model, states, GREEDY)
        with monkeypatch.context() as without:
            without.setattr(head_table, "is_packable", lambda weight: False)
            return found, read_heads(model, states, GREEDY)

    with torch.no_grad():
        before, plain = both_ways(states)
        assert torch.equal(before, plain)
        assert len(copies) == 1
        assert getattr(model.readout.head, "packed", None) is None, "the model itself is left alone"
        model.readout.head.weight.mul_(2.0)  # type: ignore[operator]
        after, plain = both_ways(states)
        assert torch.equal(after, plain)
        assert not torch.equal(after, before), "weights that changed are read"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_would_round_otherwise_is_not_packed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_table, "PackedWeight", None)
    traces(tiny_model("llama", dtype))


def test_packed_tokens_keep_every_bit() -> None:
    ids = torch.tensor([[0, 1, 2**24 + 1, 2**31 - 1]], dtype=torch.int32)
    packed = torch.stack([*[torch.zeros(1, 4)] * (len(COLUMNS) - 1), ids.view(torch.float32)])
    assert unpacked(packed.numpy())["token"].tolist() == ids.tolist()


def test_a_text_that_ends_with_its_first_token_leaves_the_others_alone() -> None:
    first = int(traces(tiny_model("llama"))[0].token_ids[0])
    model = ending_model(first)
    found = traces(model)
    assert found[0].token_ids.tolist() == [first]
    assert found[0].n_rows == 0
    for a, b in zip(found, traces(model, batch_size=1), strict=True):
        assert_same(a, b)


def test_layers_run_once_a_token() -> None:
    model, n_tokens = model_that_ends(PROMPTS[0], 5)
    ran: list[int] = []
    for i, layer in enumerate(model.hf_model.model.layers, start=1):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    traces(model, prompts=PROMPTS[:1])
    assert [ran.count(i) for i in range(1, N_LAYERS + 1)] == [n_tokens] * N_LAYERS
    ran.clear()
    model.hf_model.generation_config.eos_token_id = None
    traces(model)
    # the prompt, eleven decided tokens and the closing position
    assert [ran.count(i) for i in range(1, N_LAYERS + 1)] == [13] * N_LAYERS
