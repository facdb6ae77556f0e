"""What the code of a compiled layer depends on."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lede.kernel_inputs import tensors_in, told_inputs, with_tensors
from lede.kernel_source import Head, KernelSource, UnknownPartError
from lede.kernels import Kernels
from lede.models import EarlyExitModel, load_model
from lede.skeletons import skeleton
from tests.tiny_models import FAMILY_NAMES, tiny_hf_model


def fresh(family: str) -> EarlyExitModel:
    """A model of the test's own: transformers leaves hooks on one whose outputs it has collected."""
    return load_model((tiny_hf_model(family), None))


@pytest.mark.parametrize("family", [*FAMILY_NAMES, "gemma2", "gpt_oss", "mixtral", "opt", "phi3", "smollm3"])
def test_layers_made_alike_share_their_code(family: str) -> None:
    """As many kinds of layers as a model has, and no code for each layer of its own."""
    model = fresh(family)
    texts = {KernelSource(layer).text for _, layer in model.steps}
    kinds = {(model.layer_types[i], type(layer.mlp) if hasattr(layer, "mlp") else 0) for i, layer in model.steps}
    assert len(texts) <= len(kinds) + (family == "smollm3")  # some of its layers do without rotation
    assert KernelSource(Head(model.readout)).text not in texts


def _other_norm(layer: Any) -> None:
    layer.input_layernorm.variance_epsilon = 1e-3


def _other_scale(layer: Any) -> None:
    layer.self_attn.scaling *= 2


def _no_rotation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def _other_width(layer: Any) -> None:
    layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight[:, :-1].contiguous())


def _other_order(layer: Any) -> None:
    layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight.t().contiguous().t())


def _other_dtype(layer: Any) -> None:
    layer.self_attn.o_proj.weight = nn.Parameter(layer.self_attn.o_proj.weight.bfloat16())


def _bias(layer: Any) -> None:
    layer.self_attn.o_proj.bias = nn.Parameter(torch.zeros(layer.self_attn.o_proj.weight.shape[0]))


def _training(layer: Any) -> None:
    layer.self_attn.train()


def _eager_attention(layer: Any) -> None:
    layer.self_attn.config._attn_implementation = "eager"


def _packed(layer: Any) -> None:
    layer.mlp.up_proj.packed_number = torch.tensor(3)


CHANGES = (
    _other_norm,
    _other_scale,
    _no_rotation,
    _other_width,
    _other_order,
    _other_dtype,
    _bias,
    _training,
    _eager_attention,
    _packed,
)


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_code_depends_on_is_told(change: Any) -> None:
    layer: Any = copy.deepcopy(fresh("llama").steps[0][1])
    before = KernelSource(layer)
    text, weights = before.text, before.tensors()
    assert before.fits(weights)
    change(layer)
    after = KernelSource(layer)
    assert after.text != text
    replaced = change in (_other_width, _other_order, _other_dtype)
    assert replaced != before.fits(before.tensors()), "other weights are noticed by the source that was made before"
    assert replaced == before.holds(), "and so are other settings"


# peft 0.21 asks transformers 5.24 for a name that it deprecates
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_that_are_switched_off_or_merged_in_place_are_noticed() -> None:
    """By peft, which changes neither modules nor hooks nor the shapes of weights then."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(tiny_hf_model("llama")), settings).eval()
    source = KernelSource(load_model((adapted, None)).steps[0][1])
    assert source.holds()
    with adapted.disable_adapter():
        assert not source.holds()
    assert source.holds()
    adapted.merge_adapter()
    assert source.fits(source.tensors())
    assert not source.holds()


def test_weights_that_are_taken_away_are_noticed() -> None:
    layer: Any = copy.deepcopy(fresh("llama").steps[0][1])
    layer.mlp.up_proj.packed_number = torch.tensor(3)
    source = KernelSource(layer)
    layer.mlp.up_proj.packed_number = None
    assert not source.fits(source.tensors())
    del layer.mlp.up_proj.packed_number
    assert not source.holds()


def test_another_number_of_threads_has_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is made for one, and would take as many after torch was told to take fewer."""
    kernels = Kernels(fresh("llama"))
    layer = fresh("llama").steps[0][1]
    kernels._fit(layer)
    kernels.renew()
    assert layer in kernels._fitted
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    kernels.renew()
    assert layer not in kernels._fitted


def test_layers_are_not_kept_alive_and_looked_at_once_a_text() -> None:
    """Each plan with gaps has layers of its own, and a text may try many plans."""
    model = load_model((tiny_hf_model("llama"), None))
    kernels = Kernels(model)
    layers: list[Any] = [copy.copy(layer) for _, layer in model.steps]
    for layer in layers:
        kernels._fit(layer)
    assert len(kernels._fitted) == len(layers)
    layers[0].input_layernorm.variance_epsilon = 0.25
    kernels.renew()
    assert layers[0] not in kernels._fitted, "its settings were changed in place"
    alive = [weakref.ref(each) for each in layers]
    del layers, layer
    gc.collect()
    assert not any(each() for each in alive)
    assert not kernels._fitted


def test_numbers_and_places_are_not_part_of_it() -> None:
    layer: Any = copy.deepcopy(fresh("llama").steps[0][1])
    source = KernelSource(layer)
    text = source.text
    layer.self_attn.layer_idx = 4
    layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight + 1)
    assert KernelSource(layer).text == text
    assert any(tensor is layer.mlp.up_proj.weight for tensor in source.tensors()), "weights are read where they are"


def _hook(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda module, args, out: -out)


def _forward(layer: Any) -> None:
    layer.mlp.forward = lambda x: -x


def _local_class(layer: Any) -> None:
    class Activation(nn.Module):
        """As a factory makes it: two of one name may compute different things."""

    layer.mlp.act_fn = Activation()


def _stranger(layer: Any) -> None:
    layer.mlp.secret = object()


def _closure(layer: Any) -> None:
    layer.mlp.function = lambda x: x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_hook, "has hooks"),
        (_forward, "forward of its own"),
        (_stranger, "is a object"),
        (_closure, "is a function"),
        (_local_class, "not what its module has under that name"),
    ],
)
def test_what_code_makes_of_a_part_must_be_known(change: Any, message: str) -> None:
    layer = copy.deepcopy(fresh("llama").steps[0][1])
    change(layer)
    with pytest.raises(UnknownPartError, match=message):
        KernelSource(layer)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_a_skeleton_weighs_nothing_and_computes_the_same(family: str) -> None:
    model = load_model((tiny_hf_model(family, torch.float32), None))
    head = Head(model.readout)
    source = KernelSource(head)
    carried = pickle.dumps(skeleton(head))
    assert len(carried) < 20_000
    twin = pickle.loads(carried)
    assert {tensor.device.type for tensor in twin.parameters()} == {"meta"}
    KernelSource(twin).place(source.tensors())
    hidden = torch.randn(1, 3, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(twin(hidden), model.readout(hidden))
    for _, layer in model.steps:
        whole = KernelSource(layer)
        bare = KernelSource(skeleton(layer))
        assert [tensor.shape for tensor in bare.tensors()] == [tensor.shape for tensor in whole.tensors()]
        assert not {id(tensor) for tensor in bare.tensors()} & {id(tensor) for tensor in whole.tensors()}


def test_inputs_are_taken_apart_and_put_together() -> None:
    one, two, three = torch.zeros(1, 1, 2, 9), torch.ones(2), torch.ones(3)
    arguments = {"attention_mask": one, "use_cache": True, "tables": (two, [three, None])}
    parts = tensors_in(arguments)
    assert [part.shape for part in parts] == [one.shape, two.shape, three.shape]
    others = [part + 1 for part in parts]
    again = with_tensors(arguments, iter(others))
    assert again["use_cache"] is True
    assert again["tables"][1] == [others[2], None]
    assert tensors_in(again) == others


def test_inputs_are_told_but_for_the_length_of_the_text() -> None:
    hidden, slots = torch.zeros(1, 2, 8), torch.zeros(1, 4, 30, 16)

    def told(n_seen: int, n_slots: int, dtype: torch.dtype = torch.float32) -> str:
        arguments = {"attention_mask": torch.zeros(1, 1, 2, n_seen, dtype=dtype), "position_ids": torch.zeros(1, 2)}
        return told_inputs(hidden, arguments, (slots[:, :, :n_slots], slots[:, :, :n_slots]))

    assert told(9, 20) == told(12, 30)
    assert told(9, 20) != told(9, 20, torch.float64)
    assert told_inputs(hidden, None, None) != told_inputs(hidden[:, :1], None, None)
