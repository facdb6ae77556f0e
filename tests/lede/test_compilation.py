"""Compiled layers and fast linear layers: the same text, and eager runs where they can't be had."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lede import compilation, compiled_layers
from lede.compiled_layers import SLOT_BUCKET, CompiledLayers
from lede.fast_linear import FastConv1D, FastLinear, accelerated
from lede.generation import generate, prefill
from lede.models import EarlyExitModel, load_model
from lede.onednn import onednn_works
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
    "lookup:draft_length=16;max_suffix=1",
    "random:seed=5;lookup_probability=0.6",
)


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three numbers of rows instead of seven, to compile less."""
    monkeypatch.setattr(compiled_layers, "ROW_BUCKETS", (1, 4, 17))
    yield
    torch._dynamo.reset()


def check_exact(model: EarlyExitModel, policies: tuple[str, ...] = POLICIES) -> None:
    for seed, policy in enumerate(policies):
        ids = prompt(seed, 9)
        out = generate(model, input_ids=ids, policy=parse_policy(policy), max_new_tokens=24)
        is_exact(model, ids, out.sequences[0, len(ids) :].tolist(), plain_generate(model, ids, 24))
        assert out.stats.full_passes < 23 or seed, "the static policy must save passes, or nothing was verified"


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fixed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_text_is_the_plain_model_s(dtype: torch.dtype, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes left open, as on the CPU, and standing still, as for CUDA graphs."""
    if fixed:
        monkeypatch.setattr(compilation, "_stand_still", lambda model: True)
        if dtype == torch.float64:  # slow to compile: every block is padded to the longest
            monkeypatch.setattr(compiled_layers, "GPU_ROW_BUCKETS", (17,))
    model = load_model((tiny_hf_model("mistral", dtype), None))  # a window of 8, crossed inside blocks
    assert model.compile()
    assert model.compiled is not None
    assert model.compiled.fixed == fixed
    assert model.compile_seconds > 0
    check_exact(model)
    ids = prompt(2, 5)
    for budget in range(2, 8):  # a block at the very end of the budget is padded beyond it
        policy = parse_policy("static:exit_layer=2;draft_length=5")
        out = generate(model, input_ids=ids, policy=policy, max_new_tokens=budget)
        assert is_exact(model, ids, out.sequences[0, 5:].tolist(), plain_generate(model, ids, budget))


@pytest.mark.slow
def test_graphs_are_told_of_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph is recorded for every combination of the numbers that it is given: none may move with the text."""
    told: set[int] = set()
    own = torch.compile

    def note(module: Any, inputs: list[Any]) -> Any:
        told.update(each.node.hint for each in inputs if isinstance(each, torch.SymInt))
        return module.forward

    monkeypatch.setattr(torch, "compile", lambda function, **_: own(function, dynamic=True, backend=note))
    monkeypatch.setattr(compilation, "_stand_still", lambda model: True)
    model = load_model((tiny_hf_model("mistral"), None))
    assert model.compile()
    slots = (SLOT_BUCKET, 2 * SLOT_BUCKET)
    assert set(slots) <= told <= {*slots, *compiled_layers.GPU_ROW_BUCKETS}


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


@pytest.mark.parametrize("factor", [1.01, pytest.param(float("nan"), marks=pytest.mark.slow)])
def test_a_compiler_that_computes_something_else_is_not_trusted(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(CompiledLayers):
        def run(self, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
            return factor * super().run(hidden, *rest)

    monkeypatch.setattr(compilation, "CompiledLayers", Wrong)
    model = load_model((tiny_hf_model("llama"), None))
    with pytest.warns(UserWarning, match="states differ by"):
        assert not model.compile()
    assert model.compiled is None


def _other_projection(hf_model: Any) -> None:
    mlp = hf_model.model.layers[0].mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Dropout(0.0), _Negated())


def _other_norm(hf_model: Any) -> None:
    hf_model.model.layers[0].input_layernorm = nn.Sequential(hf_model.model.layers[0].input_layernorm, _Negated())


def _same_class_of_norm(hf_model: Any) -> None:
    own = hf_model.model.layers[0].post_attention_layernorm
    other = type(own)(own.weight.shape[0])
    other.weight.data = -own.weight.data.clone()
    hf_model.model.layers[0].post_attention_layernorm = other


def _other_head(hf_model: Any) -> None:
    hf_model.lm_head = nn.Sequential(hf_model.lm_head, _Negated())


def _other_layer(hf_model: Any) -> None:
    layer = copy.deepcopy(hf_model.model.layers[1])
    layer.self_attn.layer_idx = 0
    hf_model.model.layers[0] = layer


def _hook(hf_model: Any) -> None:
    hf_model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: -out)


def _other_forward(hf_model: Any) -> None:
    projection = hf_model.model.layers[0].mlp.up_proj
    own = projection.forward
    projection.forward = lambda x: -own(x)


CHANGES = (_other_projection, _other_norm, _same_class_of_norm, _other_head, _other_layer, _hook, _other_forward)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_the_model_acts_at_once(change: Any) -> None:
    """Adapters, hooks and other modules, though the layers are copies."""
    hf_model = tiny_hf_model("llama", torch.float32)
    model = load_model((hf_model, None))
    ids = prompt(1, 6)
    policy = parse_policy("static:exit_layer=2;draft_length=2")
    before = generate(model, input_ids=ids, policy=policy, max_new_tokens=12).sequences.tolist()
    filled = prefill(model, ids)
    change(hf_model)
    changed = generate(model, input_ids=ids, policy=policy, max_new_tokens=12).sequences.tolist()
    assert changed != before
    assert is_exact(model, ids, changed[0][6:], plain_generate(model, ids, 12))
    with pytest.raises(ValueError, match="was changed since the prefill"):
        generate(model, input_ids=ids, prefilled=filled, max_new_tokens=12)


def test_a_changed_model_is_no_longer_compiled() -> None:
    model = load_model((tiny_hf_model("llama"), None))
    assert model.compile()
    _other_head(model.hf_model)
    with pytest.warns(UserWarning, match="was changed, so its layers run eagerly"):
        check_exact(model, POLICIES[:1])
    assert model.compiled is None


def test_a_model_put_into_training_is_refused() -> None:
    hf_model = tiny_hf_model("gpt2", torch.float32)
    model = load_model((hf_model, None))
    generate(model, input_ids=[1, 2], max_new_tokens=2)
    hf_model.train()
    with pytest.raises(ValueError, match="training mode"):
        generate(model, input_ids=[1, 2], max_new_tokens=2)


def test_a_cast_model_has_other_tables() -> None:
    """Rotary frequencies that went through bfloat16 are rounded, for decoded positions as for the prompt."""
    hf_model = tiny_hf_model("llama", torch.float32)
    model = load_model((hf_model, None))
    ids = prompt(3, 6)
    generate(model, input_ids=ids, max_new_tokens=16)
    hf_model.bfloat16()
    hf_model.float()
    found = generate(model, input_ids=ids, max_new_tokens=16).sequences[0, 6:].tolist()
    assert is_exact(model, ids, found, plain_generate(model, ids, 16))


def test_autocast_and_gradients_go_through_torch_s_products() -> None:
    model = load_model((tiny_hf_model("llama", torch.float32), None))
    with torch.autocast("cpu", torch.bfloat16):
        generate(model, input_ids=prompt(0, 5), max_new_tokens=6)
    cache = model.new_cache(8)
    for start in (0, 4):  # behind a text, whose tables are kept
        block = model.block(cache, start, 4)
        with torch.no_grad():
            hidden = model.embed(torch.tensor([[1, 2, 3, 4]]), block)
        states = model.run_layers(hidden.requires_grad_(), 0, 1, block)
        states.sum().backward()
        assert hidden.grad is not None
        cache = cache.clone(8) if start else cache
        for buffers in (cache.keys, cache.values):
            buffers[0] = None if buffers[0] is None else buffers[0].detach()


def test_weights_are_shared_and_seen_when_they_change() -> None:
    linear = nn.Linear(5, 3)
    twin = accelerated(linear)
    assert isinstance(twin, FastLinear)
    assert twin.weight is linear.weight
    linear.weight = nn.Parameter(torch.ones(3, 5))
    with torch.no_grad():
        assert torch.allclose(twin(torch.ones(1, 5)), linear(torch.ones(1, 5)))
    assert torch.equal(twin.weight, torch.ones(3, 5))


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
    onednn_works.cache_clear()
    linear = nn.Linear(3, 3)
    assert accelerated(linear) is linear
    monkeypatch.undo()
    onednn_works.cache_clear()


class _Negated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The negative."""
        return -x
