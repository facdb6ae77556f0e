"""Decoding and collecting on a CUDA device: `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lede.exactness import compare
from lede.generation import generate
from lede.models import EarlyExitModel, load_model
from lede.policies import Policy, RandomPolicy, StaticPolicy, ThresholdPolicy
from tests.tiny_models import FAMILY_NAMES, prompt, tiny_hf_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

POLICIES: dict[str, Policy | None] = {
    "plain": None,
    "static": StaticPolicy(exit_layer=3, draft_length=4),
    "threshold": ThresholdPolicy(thresholds=0.0103),
    "random": RandomPolicy(seed=0),
}


def on_gpu(family: str, dtype: torch.dtype) -> EarlyExitModel:
    return load_model((tiny_hf_model(family, dtype).cuda(), None))


def wanted_tokens(model: EarlyExitModel, ids: list[int], n_tokens: int) -> list[int]:
    inputs = torch.tensor([ids], device="cuda")
    out = model.hf_model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=n_tokens, do_sample=False, pad_token_id=0
    )
    return [int(token) for token in out[0, len(ids) :]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_greedy_text_is_the_plain_models(family: str, dtype: torch.dtype) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    model = on_gpu(family, dtype)
    for length in (5, 17):
        ids = prompt(0, length)
        wanted = wanted_tokens(model, ids, 48)
        for policy in POLICIES.values():
            out = generate(model, input_ids=ids, policy=policy, max_new_tokens=48)
            apart = compare(model, ids, out.sequences[0, length:].tolist(), wanted)
            assert apart is None or apart.tie, apart


def test_sampling_is_seeded() -> None:
    model = on_gpu("llama", torch.float32)
    policy = StaticPolicy(exit_layer=3, draft_length=4)
    texts = [
        generate(model, input_ids=prompt(0, 5), policy=policy, max_new_tokens=32, temperature=1.0, seed=seed).sequences
        for seed in (1, 1, 2)
    ]
    assert texts[0].device.type == "cuda"
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


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
