"""The teacher on a CUDA device: `pytest -m gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lede.buffers import PromptTrace
from lede.collectors import BranchRules, collect_teacher, teacher_batch
from lede.collectors.host_copies import fetch, send
from lede.collectors.teacher_batch import TeacherBatch
from lede.envs import Rules
from lede.models import EarlyExitModel, load_model
from lede.verification import Warp
from tests.tiny_models import prompt, tiny_hf_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = list(enumerate(prompt(i, 4 + 3 * (i % 3)) for i in range(6)))
GREEDY, SAMPLED = Rules((1, 2, 4), 40), Rules((1, 2, 4), 40, warp=Warp(0.8, top_k=40))


def model_on(device: str, dtype: torch.dtype = torch.float64) -> EarlyExitModel:
    return load_model((tiny_hf_model("llama", dtype).to(device), None))


def traces(model: EarlyExitModel, rules: Rules) -> list[PromptTrace]:
    return list(collect_teacher(model, PROMPTS, rules, 3, 6, branching=BranchRules(1.0, 4)))


@pytest.mark.parametrize("rules", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_content_is_that_of_the_cpu(rules: Rules) -> None:
    for a, b in zip(traces(model_on("cpu"), rules), traces(model_on("cuda"), rules), strict=True):
        for name, value in vars(a).items():
            other = np.asarray(getattr(b, name))
            if other.dtype.kind == "f":
                np.testing.assert_allclose(value, other, atol=1e-4, err_msg=name)
            else:
                np.testing.assert_array_equal(value, other, err_msg=name)


@pytest.mark.parametrize("rules", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_token_makes_nobody_wait(rules: Rules) -> None:
    """torch raises where the host would wait for the device; a look every 16 tokens is outside of that."""
    batch = TeacherBatch(model_on("cuda"), PROMPTS, rules)
    with torch.inference_mode():
        newest = batch._prefill()
        newest = batch._choose(*batch._step(newest, 1), 1)  # whatever is made once is made here
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for n_written in range(2, 12):
                newest = batch._choose(*batch._step(newest, n_written), n_written)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert teacher_batch.LOOK_EVERY["cuda"] > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_float32_features(dtype: torch.dtype) -> None:
    for trace in traces(model_on("cuda", dtype), GREEDY):
        assert trace.entropy.dtype == trace.confidence.dtype == np.float32
        assert np.isfinite(trace.entropy).all()


def test_copies_go_there_and_back() -> None:
    values = np.arange(6, dtype=np.int64).reshape(2, 3)
    there = send(values, torch.device("cuda"))
    assert there.device.type == "cuda"
    np.testing.assert_array_equal(fetch(there), values)
