"""Decoding and collecting on a CUDA device: `pytest -m gpu`."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_shapes import tiny_llama
from benchmarks.planted_model import planted_llama
from lede.exactness import compare
from lede.features import FEATURES, FeatureConfig
from lede.generation import generate
from lede.head_reading import HeadReader
from lede.models import EarlyExitModel, load_model
from lede.policies import LearnedPolicy, Policy, RandomPolicy, StaticPolicy, ThresholdPolicy
from lede.policies.base import LayerState
from tests.forecasts import every_feature
from tests.tiny_models import FAMILY_NAMES, prompt, tiny_hf_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
EVERYTHING = every_feature((1, 2, 4))
BUDGET = 32


def learned_policy() -> LearnedPolicy:
    """Random weights that decide the pre-scan, the scan and the draft by every feature."""
    rng, sizes = np.random.default_rng(3), [len(FEATURES), 16, 5]
    layers = [(rng.normal(size=(b, a)), rng.normal(size=b)) for a, b in pairwise(sizes)]
    return LearnedPolicy.from_network(layers, features=EVERYTHING, candidates=(1, 2, 4))


POLICIES: dict[str, Policy | None] = {
    "plain": None,
    "static": StaticPolicy(exit_layer=3, draft_length=4),
    "threshold": ThresholdPolicy(thresholds=0.0103),
    "random": RandomPolicy(seed=0),
    "learned": learned_policy(),
}


class Watched(RandomPolicy):
    """Random decisions; keeps what it could have seen."""

    def __init__(self) -> None:
        super().__init__(seed=0, skip_probability=0.0, candidates=(1, 2, 4))
        self.seen: list[np.ndarray] = []

    @property
    def features(self) -> FeatureConfig:
        return EVERYTHING

    def scan(self, state: LayerState) -> bool:
        self.seen.append(state.observation.copy())
        return super().scan(state)

    def draft(self, state: LayerState) -> bool:
        self.seen.append(state.observation.copy())
        return super().draft(state)


def on_gpu(family: str, dtype: torch.dtype) -> EarlyExitModel:
    return load_model((tiny_hf_model(family, dtype).to(DEVICE), None))


@cache
def planted_on_gpu(dtype: torch.dtype) -> EarlyExitModel:
    shape = tiny_llama()
    return load_model((planted_llama(shape.config, shape.plan, DEVICE, dtype), None))


def wanted_tokens(model: EarlyExitModel, ids: list[int], n_tokens: int) -> list[int]:
    inputs = torch.tensor([ids], device=DEVICE)
    out = model.hf_model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=n_tokens, do_sample=False, pad_token_id=0
    )
    return [int(token) for token in out[0, len(ids) :]]


def new_tokens(model: EarlyExitModel, ids: list[int], policy: Policy | None, n_tokens: int = BUDGET) -> list[int]:
    out = generate(model, input_ids=ids, policy=policy, max_new_tokens=n_tokens)
    return [int(token) for token in out.sequences[0, len(ids) :]]


def test_float32_products_are_not_rounded_to_tf32() -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    left, right = (torch.rand(256, 256, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    exact = left.double() @ right.double()
    found = (left.to(DEVICE) @ right.to(DEVICE)).cpu().double()
    assert float(((found - exact).abs() / exact).max()) < 1e-5  # TF32 has ten bits: about 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_greedy_text_is_the_plain_models(family: str, dtype: torch.dtype) -> None:
    model, ids = on_gpu(family, dtype), prompt(0, 9)
    wanted = wanted_tokens(model, ids, BUDGET)
    for name, policy in POLICIES.items():
        apart = compare(model, ids, new_tokens(model, ids, policy), wanted)
        assert apart is None or apart.tie, (name, apart)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_texts_with_clear_margins_are_equal(dtype: torch.dtype, policy: str) -> None:
    model = planted_on_gpu(dtype)
    for seed in range(2):
        ids = torch.randint(512, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
        assert new_tokens(model, ids, POLICIES[policy]) == wanted_tokens(model, ids, BUDGET)


def test_a_planted_text_is_the_same_on_every_device() -> None:
    """Though the random weights, which are drawn where they are, differ."""
    shape, ids = tiny_llama(), [7, 70, 170, 300]
    reference = load_model((planted_llama(shape.config, shape.plan), None))
    wanted = new_tokens(reference, ids, None)
    assert all(new_tokens(planted_on_gpu(dtype), ids, None) == wanted for dtype in (torch.float32, torch.bfloat16))


def test_features_are_those_of_the_cpu() -> None:
    logits = 5 * torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    reader = HeadReader(EVERYTHING)
    for row in logits:
        here, there = reader.read(row), reader.read(row.to(DEVICE))
        assert there.token == here.token
        assert there == pytest.approx(here, abs=1e-4)


def test_policies_see_what_they_see_on_the_cpu() -> None:
    gpu, cpu = on_gpu("llama", torch.float64), load_model((tiny_hf_model("llama", torch.float64), None))
    seen, texts = [], []
    for model in (gpu, cpu):
        policy = Watched()
        texts.append(new_tokens(model, prompt(0, 9), policy))
        seen.append(np.stack(policy.seen))
    assert texts[0] == texts[1]
    assert len(seen[0]) > 20
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-4, atol=1e-4)


def test_sampling_is_seeded() -> None:
    model = on_gpu("llama", torch.float32)
    policy = StaticPolicy(exit_layer=3, draft_length=4)
    texts = [
        generate(model, input_ids=prompt(0, 5), policy=policy, max_new_tokens=32, temperature=1.0, seed=seed).sequences
        for seed in (1, 1, 2)
    ]
    assert texts[0].device.type == DEVICE
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


@pytest.mark.skipif(find_spec("lede.batch_generation") is None, reason="no batches in this version")
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_of_a_batch_are_single_runs(policy: str) -> None:
    model = planted_on_gpu(torch.float32)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(512, (length,), generator=draw).tolist() for length in (5, 12, 9)]
    batch: Any = generate
    outs = batch(model, input_ids=rows, policy=POLICIES[policy], max_new_tokens=BUDGET)
    for ids, out in zip(rows, outs, strict=True):
        assert out.sequences.reshape(-1)[len(ids) :].tolist() == wanted_tokens(model, ids, BUDGET)


@pytest.mark.filterwarnings("default")  # torch's compiler has warnings of its own
@pytest.mark.parametrize("policy", ["plain", "static", "learned"])
def test_the_compiled_engine_writes_the_same_text(policy: str) -> None:
    model, engine = planted_on_gpu(torch.float32), compiled_planted()
    assert engine.compile_seconds > 0, "it runs eagerly; the warning says why"
    ids = prompt(0, 9)
    assert new_tokens(engine, ids, POLICIES[policy]) == wanted_tokens(model, ids, BUDGET)


@cache
def compiled_planted() -> EarlyExitModel:
    load: Any = load_model
    engine: EarlyExitModel = load((planted_on_gpu(torch.float32).hf_model, None), compile=True)
    return engine


def test_both_collectors_agree(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    pytest.importorskip("gymnasium")
    from lede.buffers import TraceStore, TransitionStore, open_store
    from lede.collectors import CollectConfig, collect

    model = on_gpu("llama", torch.float32)
    prompts = [prompt(seed, 5 + seed) for seed in range(4)]
    traces = open_store(collect(CollectConfig(tmp_path / "t", collector="teacher", max_new_tokens=12), model, prompts))
    rollouts = open_store(collect(CollectConfig(tmp_path / "r", max_new_tokens=12), model, prompts))
    assert isinstance(traces, TraceStore)
    assert isinstance(rollouts, TransitionStore)
    for trace, rollout in zip(traces, rollouts, strict=True):
        assert trace.token_ids.tolist() == rollout.token_ids.tolist()
