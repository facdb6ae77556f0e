"""Packed weights: the same products, never of weights that are no longer those of the model."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lede import compiled_layers, onednn, packed_weights
from lede.fast_linear import FAST_CLASSES, FastLinear, accelerated
from lede.generation import generate, prefill
from lede.models import EarlyExitModel, load_model
from lede.packed_weights import PackedWeights
from lede.policies import parse_policy
from tests.exactness import is_exact
from tests.tiny_models import plain_generate, prompt, tiny_hf_model

POLICY = "static:exit_layer=2;draft_length=3"
NEEDS_BFLOAT16 = pytest.mark.skipif(
    not onednn.packing_works(torch.bfloat16), reason="the processor has no products of bfloat16"
)
CHANGES = ["replaced", "in place", "through data", "other data", "loaded"]


def packed_model(family: str = "llama", **options: Any) -> EarlyExitModel:
    return load_model((tiny_hf_model(family, torch.float32), None), pack_weights=True, **options)


def packed_linear(linear: nn.Module) -> tuple[Any, PackedWeights]:
    twin = accelerated(linear)
    return twin, PackedWeights([twin])


def check_exact(model: EarlyExitModel) -> None:
    ids = prompt(0, 9)
    out = generate(model, input_ids=ids, policy=parse_policy(POLICY), max_new_tokens=16)
    is_exact(model, ids, out.sequences[0, 9:].tolist(), plain_generate(model, ids, 16))


def change(linear: nn.Module, how: str) -> None:
    weight: Any = linear.weight
    new = torch.full(weight.shape, 2.0)
    with torch.no_grad():
        if how == "replaced":
            linear.weight = nn.Parameter(new)
        elif how == "in place":
            weight.fill_(2)
        elif how == "through data":
            weight.data.fill_(2)  # past torch's count of versions, as some adapters merge themselves
        elif how == "other data":
            weight.data = new
        else:
            linear.load_state_dict({"weight": new, "bias": linear.bias})


@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 5, 9, 17, 40])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NEEDS_BFLOAT16)], ids=str)
def test_products_are_products(n_rows: int, transposed: bool, dtype: torch.dtype) -> None:
    linear: Any = Conv1D(70, 33) if transposed else nn.Linear(33, 70)
    nn.init.normal_(linear.bias)
    linear.to(dtype)
    twin, packed = packed_linear(linear)
    assert packed.n_packed == 1
    assert packed.n_bytes == dtype.itemsize * 33 * 70
    rows = torch.randn(2, n_rows, 33, generator=torch.Generator().manual_seed(0)).to(dtype)[:1]
    with torch.inference_mode():
        found, wanted = twin(rows), linear(rows)
        plain = accelerated(linear)(rows)
    for each in (found, plain):
        assert each.shape == wanted.shape
        assert each.is_contiguous()
        assert torch.allclose(each, wanted, atol=1e-4 if dtype == torch.float32 else 0.03)
    assert twin(rows).requires_grad, "gradients go through torch's own product"


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NEEDS_BFLOAT16)], ids=str)
def test_the_packed_copy_is_what_is_multiplied_by(dtype: torch.dtype) -> None:
    """Or every other test here would pass without packing."""
    twin, packed = packed_linear(nn.Linear(32, 32, bias=False, dtype=dtype))
    rows = torch.ones(1, 32, dtype=dtype)
    with torch.no_grad():
        twin.weight.data.fill_(2)
        before = twin(rows)
        assert packed.renew() == 1
        assert not torch.allclose(before, twin(rows))


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("transposed", [False, True])
def test_changed_weights_are_packed_anew(how: str, transposed: bool) -> None:
    linear: Any = Conv1D(64, 64) if transposed else nn.Linear(64, 64)
    twin, packed = packed_linear(linear)
    assert packed.renew() == 0, "nothing has changed"
    change(linear, how)
    assert packed.renew() == 1
    assert packed.renew() == 0
    with torch.no_grad():
        assert torch.allclose(twin(torch.ones(3, 64)), torch.full((3, 64), 128.0) + linear.bias)


@NEEDS_BFLOAT16
def test_weights_that_are_bfloat16_now_are_packed_as_such() -> None:
    linear = nn.Linear(64, 6)
    twin, packed = packed_linear(linear)
    linear.bfloat16()
    assert packed.renew() == 1
    assert (packed.n_packed, packed.n_bytes) == (1, 2 * 64 * 6)
    with torch.no_grad():
        rows = torch.ones(3, 64, dtype=torch.bfloat16)
        assert torch.allclose(twin(rows), linear(rows), atol=0.03)


def test_weights_that_can_t_be_packed_any_more_are_computed_as_they_are() -> None:
    linear = nn.Linear(8, 6)
    twin, packed = packed_linear(linear)
    rows = torch.ones(3, 8)
    linear.double()
    assert packed.renew() == 1
    assert (packed.n_packed, packed.n_bytes) == (0, 0)
    with torch.no_grad():
        assert torch.equal(twin(rows.double()), linear(rows.double()))
    linear.float()
    assert packed.renew() == 1
    assert packed.n_packed == 1
    linear.to("meta")
    assert packed.renew() == 1
    assert packed.n_packed == 0


def test_a_weight_that_is_nan_is_packed_once() -> None:
    linear = nn.Linear(8, 6)
    nn.init.constant_(linear.weight, float("nan"))
    _, packed = packed_linear(linear)
    assert packed.renew() == 0


def test_weights_made_in_inference_mode_have_no_versions() -> None:
    with torch.inference_mode():
        linear = nn.Linear(64, 6)
        twin, packed = packed_linear(linear)
        assert packed.renew() == 0
        linear.weight.fill_(2)
        assert packed.renew() == 1
        assert torch.allclose(twin(torch.ones(1, 64)), 128 + linear.bias)


def test_copies_go_with_the_model() -> None:
    before = len(packed_weights._PACKED)
    twin, packed = packed_linear(nn.Linear(8, 8))
    assert len(packed_weights._PACKED) == before + 1
    del twin, packed
    gc.collect()
    assert len(packed_weights._PACKED) == before


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_text_is_the_plain_model_s(family: str) -> None:
    model = packed_model(family)
    assert model.packed is not None
    parts = [part for _, layer in model.steps for part in layer.modules() if isinstance(part, FAST_CLASSES)]
    assert model.packed.n_packed == len(parts) + 1, "all of the layers, and the head"
    assert model.packed.seconds > 0
    check_exact(model)
    assert not any(isinstance(part, FAST_CLASSES) for part in model.hf_model.modules()), "the live model was touched"


def test_the_next_text_is_of_the_weights_as_they_are_then() -> None:
    model = packed_model()
    check_exact(model)
    with torch.no_grad():
        for layer in model.hf_model.model.layers:
            layer.mlp.down_proj.weight.data.mul_(-3)
    check_exact(model)


def test_a_prefill_by_weights_that_have_changed_since_is_refused() -> None:
    model, ids = packed_model(), prompt(0, 9)
    ready = prefill(model, ids)
    generate(model, input_ids=ids, prefilled=ready, max_new_tokens=4)
    with torch.no_grad():
        model.hf_model.model.layers[1].mlp.down_proj.weight.data.mul_(-3)
    with pytest.raises(ValueError, match="was changed since the prefill was made"):
        generate(model, input_ids=ids, prefilled=ready, max_new_tokens=4)


def test_a_model_whose_modules_change_is_packed_again() -> None:
    model = packed_model()
    assert model.packed is not None
    before = model.packed
    down = model.hf_model.model.layers[0].mlp.down_proj
    model.hf_model.model.layers[0].mlp.down_proj = nn.Linear(down.in_features, down.out_features, bias=False)
    check_exact(model)
    assert model.packed is not before
    assert model.packed.n_packed == before.n_packed
    model.hf_model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, out: out)
    check_exact(model)
    assert model.packed.n_packed == before.n_packed - 1, "a hooked layer stays as it is"


@NEEDS_BFLOAT16
def test_texts_in_bfloat16_are_the_plain_model_s_up_to_its_rounding() -> None:
    hf_model = tiny_hf_model("llama", torch.bfloat16)
    model = load_model((hf_model, None), pack_weights=True)
    assert model.packed is not None
    assert model.packed.n_bytes > 0
    ids = prompt(0, 9)
    out = generate(model, input_ids=ids, policy=parse_policy(POLICY), max_new_tokens=16)
    new = out.sequences[0, 9:].tolist()
    with torch.no_grad():
        said = hf_model(torch.tensor([[*ids, *new]])).logits[0, 8:-1].float()
    behind = said.max(-1).values - said[torch.arange(16), new]
    assert (behind <= 2 * said.abs().max() * torch.finfo(torch.bfloat16).eps).all(), "a tie within rounding at most"


def test_other_dtypes_are_not_packed() -> None:
    reason = "they are float64, and packing is for float32 and bfloat16"
    with pytest.warns(UserWarning, match=f"could not be packed and are read as they are: {reason}"):
        model = load_model((tiny_hf_model("llama", torch.float64), None), pack_weights=True)
    assert model.packed is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_processor_can_t_is_said(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "packing_works", lambda _: False)
    with pytest.warns(UserWarning, match=f"multiplies by packed {str(dtype).removeprefix('torch.')} weights"):
        model = load_model((tiny_hf_model("llama", dtype), None), pack_weights=True)
    assert model.packed is None


def test_a_model_elsewhere_is_not_packed() -> None:
    model = load_model((tiny_hf_model("llama", torch.float32), None))
    model.hf_model.to("meta")
    with pytest.warns(UserWarning, match="the model is on meta, and packing is for the CPU"):
        assert not model.pack_weights()


def test_without_the_operators_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model()
    monkeypatch.setattr(onednn, "_REORDER", None)
    onednn.packing_works.cache_clear()
    with pytest.warns(UserWarning, match="no oneDNN that multiplies by packed float32 weights"):
        assert not model.pack_weights()
    monkeypatch.undo()
    onednn.packing_works.cache_clear()
    assert model.packed is None
    assert all(p.packed is None for _, layer in model.steps for p in layer.modules() if isinstance(p, FastLinear))
    check_exact(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
def test_compiled_layers_multiply_by_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "ROW_BUCKETS", (1, 4, 17))
    model = packed_model(compile=True)
    assert model.compiled is not None
    check_exact(model)
    with torch.no_grad():
        for layer in model.hf_model.model.layers:
            layer.mlp.down_proj.weight.mul_(-3)
    check_exact(model)
    assert model.compiled is not None, "weights alone have changed"
    assert model.pack_weights(), "also after compiling"
    assert model.compiled is not None
    check_exact(model)
    torch._dynamo.reset()
