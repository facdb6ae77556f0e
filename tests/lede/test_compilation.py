"""Compiled layers and fast linear layers: the same text, and eager runs where they can't be had."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lede import compilation, compiled_layers, fast_linear
from lede.compiled_layers import CompiledLayers
from lede.fast_linear import FastConv1D, FastLinear, accelerated, stands_for
from lede.generation import generate
from lede.models import EarlyExitModel, load_model
from lede.policies import parse_policy
from tests.exactness import is_exact
from tests.tiny_models import plain_generate, prompt, tiny_hf_model, tiny_model

pytestmark = pytest.mark.filterwarnings(
    # raised by torch's compiler about itself, while it compiles
    "ignore::DeprecationWarning:torch",
    "ignore::FutureWarning:torch",
)

POLICIES = (
    "static:exit_layer=2;draft_length=3",
    "random:seed=3",
    "random:seed=4;skip_probability=0;blind_probability=0;gap_probability=0.9",
)


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three numbers of rows instead of seven, to compile less."""
    monkeypatch.setattr(compiled_layers, "ROW_BUCKETS", (1, 4, 16))
    monkeypatch.setattr(compilation, "ROW_BUCKETS", (1, 4, 16))
    yield
    torch._dynamo.reset()


def check_exact(model: EarlyExitModel, policies: tuple[str, ...] = POLICIES) -> None:
    for seed, policy in enumerate(policies):
        ids = prompt(seed, 9)
        out = generate(model, input_ids=ids, policy=parse_policy(policy), max_new_tokens=24)
        is_exact(model, ids, out.sequences[0, len(ids) :].tolist(), plain_generate(model, ids, 24))
        assert out.stats.full_passes < 23 or seed, "the static policy must save passes, or nothing was verified"


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fixed", [False, True])
def test_the_text_is_the_plain_model_s(dtype: torch.dtype, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes left open, as on the CPU, and standing still, as for CUDA graphs."""
    if fixed:
        monkeypatch.setattr(compilation, "_stand_still", lambda model: True)
    model = load_model((tiny_hf_model("mistral", dtype), None))  # a window of 8, crossed inside blocks
    assert model.compile()
    assert model.compiled is not None
    assert model.compiled.fixed == fixed
    assert model.compile_seconds > 0
    check_exact(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2", "gpt_neox"])
def test_the_text_of_every_family(family: str) -> None:
    model = load_model((tiny_hf_model(family), None))
    assert model.compile()
    check_exact(model)


def test_compiled_layers_run_where_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks behind the prompt are compiled; prompts, and what is watched, are not."""
    seen: list[int] = []
    run = CompiledLayers.run

    def spy(self: CompiledLayers, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(hidden.shape[1])
        return run(self, hidden, *rest)

    model = load_model((tiny_hf_model("llama"), None))
    assert model.compile()
    monkeypatch.setattr(CompiledLayers, "run", spy)
    generate(
        model, input_ids=prompt(0, 20), policy=parse_policy("static:exit_layer=2;draft_length=3"), max_new_tokens=8
    )
    assert seen
    assert 20 not in seen
    assert {1, 4} <= set(seen) <= {1, 2, 3, 4}


def test_what_cannot_be_compiled_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr(compilation, "CompiledLayers", fail)
    model = load_model((tiny_hf_model("llama"), None))
    with pytest.warns(UserWarning, match="could not be compiled and run eagerly: RuntimeError: no C\\+\\+ compiler$"):
        assert not model.compile()
    assert model.compiled is None
    check_exact(model)


def test_hooked_layers_run_eagerly() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = load_model((accelerate.dispatch_model(tiny_hf_model("llama"), {"": "cpu"}, force_hooks=True), None))
    assert model.places is not None
    with pytest.warns(UserWarning, match="run eagerly: accelerate's hooks"):
        assert not model.compile()
    check_exact(model, POLICIES[:2])


def test_a_compiler_that_computes_something_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(CompiledLayers):
        def run(self, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
            return 1.01 * super().run(hidden, *rest)

    monkeypatch.setattr(compilation, "CompiledLayers", Wrong)
    model = load_model((tiny_hf_model("llama"), None))
    with pytest.warns(UserWarning, match="states differ by"):
        assert not model.compile()
    assert model.compiled is None


def test_other_modules_in_the_model_are_noticed() -> None:
    """An adapter put into the live model acts at once, though the layers are copies."""
    hf_model = tiny_hf_model("llama", torch.float32)
    model = load_model((hf_model, None))
    ids = prompt(1, 6)
    before = generate(model, input_ids=ids, max_new_tokens=8).sequences.tolist()
    layer = hf_model.model.layers[0].mlp
    layer.down_proj = nn.Sequential(layer.down_proj, nn.Dropout(0.0), _Negated())
    changed = generate(model, input_ids=ids, max_new_tokens=8).sequences.tolist()
    assert changed != before
    assert changed[0][6:] == plain_generate(model, ids, 8)


def test_weights_are_shared_and_seen_when_they_change() -> None:
    linear = nn.Linear(5, 3)
    twin = accelerated(linear)
    assert isinstance(twin, FastLinear)
    assert twin.weight is linear.weight
    assert stands_for(twin, linear)
    linear.weight = nn.Parameter(torch.ones(3, 5))
    with torch.no_grad():
        assert torch.allclose(twin(torch.ones(1, 5)), linear(torch.ones(1, 5)))
    assert stands_for(twin, linear)
    assert not stands_for(twin, nn.Linear(5, 3))


def test_what_is_not_a_plain_linear_layer_stays_as_it_is() -> None:
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, args, out: out + 1)
    own = _Negated()
    assert accelerated(hooked) is hooked
    assert accelerated(own) is own
    assert accelerated(nn.Sequential(hooked, own))[0] is hooked
    model = tiny_model("gpt2")
    assert any(isinstance(part, FastConv1D) for layer in model._layers for part in layer.modules())
    assert not any(isinstance(part, FastConv1D) for part in model.hf_model.modules())


@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 5, 24), (3, 24)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_fast_products_are_products(shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    linear = nn.Linear(24, 7, bias=bias).to(dtype)
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        found, wanted = accelerated(linear)(rows), linear(rows)
    assert found.shape == wanted.shape
    assert found.dtype == dtype
    assert torch.equal(found, wanted) or dtype == torch.float32
    assert torch.allclose(found, wanted, atol=1e-5)
    assert accelerated(linear)(rows).requires_grad, "gradients go through torch's own product"


def test_without_onednn_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    fast_linear.onednn_works.cache_clear()
    linear = nn.Linear(3, 3)
    assert accelerated(linear) is linear
    monkeypatch.undo()
    fast_linear.onednn_works.cache_clear()


def test_the_cache_of_a_compiled_model_has_room_for_padding() -> None:
    """A block at the very end of the budget is padded beyond it."""
    model = load_model((tiny_hf_model("llama"), None))
    assert model.compile()
    ids = prompt(2, 5)
    for budget in range(2, 8):
        out = generate(
            model, input_ids=ids, policy=parse_policy("static:exit_layer=2;draft_length=5"), max_new_tokens=budget
        )
        assert out.sequences[0, 5:].tolist() == plain_generate(model, ids, budget)


class _Negated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The negative."""
        return -x
