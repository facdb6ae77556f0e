"""On a pretended GPU: no devices meet, texts are the CPU's, and the host waits for decisions alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from lede.generation import generate
from lede.models import EarlyExitModel, load_model
from lede.policies import LookupPolicy, Policy, RandomPolicy, StaticPolicy, ThresholdPolicy
from lede.policies.base import Lookup
from lede.request import Request
from lede.verification import TorchSource
from tests.forecasts import made_up_sources, made_up_survival
from tests.pretend_cuda import pretended_cuda
from tests.pretend_device import GPU, PretendedDevice, on_device
from tests.tiny_models import FAMILY_NAMES, prompt, tiny_hf_model, tiny_model

ROWS = [prompt(0, 9), prompt(1, 5)]
LAYERS = (1, 2, 3, 5)
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 1}
POLICIES: dict[str, Callable[[], Policy | None]] = {
    "plain": lambda: None,
    "static": lambda: StaticPolicy(exit_layer=3, draft_length=4),
    "threshold": lambda: ThresholdPolicy(thresholds=0.0103),
    "random": lambda: RandomPolicy(seed=4, lookup_probability=0.4),
    "pruned lookup": lambda: LookupPolicy(draft_length=9, max_suffix=1, prune_at=4),
    "survival": lambda: made_up_survival(3, LAYERS),
    "both sources": lambda: made_up_sources(3, LAYERS, (Lookup(4), Lookup(8, prune_at=2))),
}


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    with pretended_cuda() as pretended:
        yield pretended


def moved(family: str = "llama", dtype: torch.dtype = torch.float64) -> EarlyExitModel:
    return load_model((tiny_hf_model(family, dtype).to("cuda"), None))


def texts(outs: Any) -> list[list[int]]:
    return [out.sequences[0].tolist() for out in (outs if isinstance(outs, list) else [outs])]


def checked(device: PretendedDevice, model: EarlyExitModel, kind: str, ids: Any, **settings: Any) -> list[Any]:
    """Outputs of the pretended device, whose texts are those of the CPU with the same luck."""
    device.forget()
    outs = generate(model, input_ids=ids, policy=POLICIES[kind](), **settings)
    counted = device.waits.copy(), device.sent.copy(), device.sent_along.copy()
    own = Request.chooser
    with device.off(), mock.patch.object(Request, "chooser", lambda request, row, _: own(request, row, GPU)):
        reference = tiny_model(str(model.config.model_type), model.dtype)
        wanted = generate(reference, input_ids=ids, policy=POLICIES[kind](), **settings)
        assert texts(outs) == texts(wanted), (kind, settings)
    device.waits, device.sent, device.sent_along = counted
    return outs if isinstance(outs, list) else [outs]


def by_place(counts: Counter[tuple[str, str]]) -> Counter[str]:
    """Counts by module, without those of a whole call: its processors and its output."""
    places = Counter[str]()
    for (_, line), count in counts.items():
        module = line.partition(":")[0]
        if module not in ("lede/processors.py", "lede/request.py") and not module.startswith("tests"):
            places[module] += count
    return places


def test_a_device_refuses_what_a_gpu_refuses(device: PretendedDevice) -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    meetings: tuple[Callable[[], object], ...] = (
        lambda: here + there,
        lambda: torch.cat([here, there]),
        lambda: torch.nn.functional.linear(there, torch.ones(2, 3)),
        lambda: here[there.long()],
        lambda: there.index_select(0, torch.tensor([0])),
        lambda: here + torch.ones((), device="cuda"),
    )
    for meet in meetings:
        with pytest.raises(RuntimeError, match="device"):
            meet()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with pytest.raises(TypeError, match="numpy"):
        np.asarray(there)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device="cuda", generator=torch.Generator())
    assert on_device(there * torch.tensor(2.0)), "a number of the CPU may meet a tensor of the device"
    assert not device.waits
    assert bool((there == 1).all())
    assert there[there > 0].tolist() == [1, 1, 1]
    assert Counter(name for name, _ in device.waits.elements()) == {"__bool__": 1, "__getitem__": 1, "tolist": 1}
    host = torch.empty(3, pin_memory=True)
    host.copy_(there, non_blocking=True)
    assert not (host == 1).any(), "nobody has waited for it"
    torch.cuda.synchronize()
    assert (host == 1).all()


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_host_waits_for_one_number_a_decision(device: PretendedDevice, settings: dict[str, Any]) -> None:
    model = moved()
    for kind in ("static", "survival"):
        (out,) = checked(device, model, kind, ROWS[0], max_new_tokens=12, **settings)
        waits, stats = by_place(device.waits), out.stats
        assert stats.drafted > 5
        assert not by_place(device.sent), "a copy that the host waits for"
        if kind == "static":  # a drafted token, a round and the first token; sampled, acceptance is asked for at once
            most = stats.drafted + stats.rounds + 1 + (stats.rounds if settings else 0)
            assert waits.total() <= most
        else:  # the reading of a candidate has the token as well, but for luck
            most = stats.head_reads + stats.rounds + 1 + (stats.drafted + stats.rounds if settings else 0)
            assert waits.total() - waits["lede/primitives.py"] <= most
            assert waits["lede/primitives.py"] <= stats.rounds + 1, "the trace, once a round"


def test_rows_of_a_batch_are_sent_without_a_wait(device: PretendedDevice) -> None:
    outs = checked(device, moved(), "random", ROWS, max_new_tokens=12)
    assert sum(out.stats.drafted for out in outs) > 8
    assert not by_place(device.sent)


@pytest.mark.parametrize("window", [False, True])
def test_masks_begin_where_attention_can_load_them(device: PretendedDevice, window: bool) -> None:
    """Half precision is particular: blocks behind every kind of position."""
    model = moved("mistral" if window else "llama", torch.bfloat16)
    for n_prompt in (5, 6):
        policy = StaticPolicy(exit_layer=3, draft_length=3)
        out = generate(model, input_ids=prompt(0, n_prompt), policy=policy, max_new_tokens=10)
        assert out.stats.drafted


def test_tables_of_padded_blocks_stand_still(device: PretendedDevice) -> None:
    """Shapes decide strides and offsets, or a CUDA graph would be recorded anew for every position."""
    model = moved("mistral")
    cache = model.new_cache(600)
    seen = set()
    for start in (1, 9, 10, 255):
        block = model.block(cache, start, 8)
        block.extent = 512
        hidden = torch.zeros(1, 8, 32, dtype=torch.float64, device="cuda")
        arguments = model.tables.arguments(block, 0, hidden)
        tensors = [arguments["attention_mask"], *arguments["position_embeddings"], arguments["position_ids"]]
        seen.add(tuple((each.shape, each.stride(), each.storage_offset()) for each in tensors))
    assert len(seen) == 1


def test_a_draw_is_torchs_own_and_refuses_what_is_no_distribution(device: PretendedDevice) -> None:
    p = torch.softmax(torch.randn(50, generator=torch.Generator().manual_seed(0)), 0)
    there, draws = p.to("cuda"), []
    source = TorchSource(torch.Generator("cuda").manual_seed(3), torch.Generator().manual_seed(5))
    device.forget()
    for _ in range(20):
        draws.append(source.draw(there))
    assert source.accept(1.0)
    assert device.waits.total() == 20
    own = TorchSource(torch.Generator().manual_seed(3))
    assert draws == [own.draw(p) for _ in range(20)]
    for broken in (there * float("nan"), there * 0):
        with pytest.raises(RuntimeError, match="a distribution to draw from"):
            source.draw(broken)


@pytest.mark.parametrize("collector", ["teacher", "rollout"])
def test_collecting_waits_for_whole_tables(device: PretendedDevice, collector: Any, tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    pytest.importorskip("gymnasium")
    from lede.buffers import open_store
    from lede.collectors import CollectConfig, collect

    stores: list[Any] = []
    for place, model in (("there", moved()), ("here", tiny_model("llama"))):
        branches: dict[str, Any] = {"branches": 1.0} if collector == "teacher" else {}
        config = CollectConfig(
            tmp_path / place, collector=collector, max_new_tokens=10, temperature=0.8, batch_size=2, **branches
        )
        device.forget()
        collect(config, model, ROWS)
        stores.append(open_store(tmp_path / place))
        if place == "there":
            waits, sent = by_place(device.waits), by_place(device.sent)
    assert sent.keys() <= {"lede/fingerprints.py"}
    for mine, wanted in zip(*stores, strict=True):
        assert mine.token_ids.tolist() == wanted.token_ids.tolist()
    if collector == "teacher":  # the texts, their tables, and each step of the branches
        assert waits.keys() <= {"lede/collectors/host_copies.py", "lede/fingerprints.py"}
        assert waits.total() < 40
    else:  # what the agent sees at a layer, the token that follows, and whether it agrees
        steps = sum(len(each.actions) for each in stores[0])
        assert waits["lede/envs/walk.py"] <= steps + 3 * 10


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("kind", POLICIES)
def test_every_family_decodes_on_one_device(device: PretendedDevice, family: str, kind: str) -> None:
    model = moved(family)
    scored = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "output_scores": True, "output_logits": True}
    for ids in (ROWS[0], ROWS):
        for settings in ({}, SAMPLED, scored):
            checked(device, model, kind, ids, max_new_tokens=24, **settings)
            assert by_place(device.sent).keys() <= {"lede/models.py"}
