"""Models spread over devices, or offloaded, by accelerate's hooks: what layers are given is where they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lede
from lede.devices import home_of
from lede.families import UnsupportedModelError
from lede.models import EarlyExitModel, load_model
from lede.policies import RandomPolicy, StaticPolicy
from tests.tiny_models import N_LAYERS, plain_generate, prompt, tiny_hf_model, tiny_model

accelerate = pytest.importorskip("accelerate")

META, CPU = torch.device("meta"), torch.device("cpu")


def new_tokens(model: EarlyExitModel, ids: list[int], policy: Any) -> list[int]:
    out = lede.generate(model, input_ids=ids, policy=policy, max_new_tokens=20)
    return out.sequences[0, len(ids) :].tolist()


def split_map(first: Any, second: Any) -> dict[str, Any]:
    """The first half of a model of the llama kind on one device, the rest on another."""
    layers = {f"model.layers.{i}": first if i < N_LAYERS // 2 else second for i in range(N_LAYERS)}
    ends = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": second, "lm_head": second}
    return {**ends, **layers}


def offloaded(way: str, family: str, folder: Path) -> Any:
    hf_model = tiny_hf_model(family)
    if way == "hooks":
        return accelerate.dispatch_model(hf_model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    if way == "cpu":
        return accelerate.cpu_offload(hf_model, execution_device=CPU)
    if way == "disk":
        return accelerate.disk_offload(hf_model, str(folder), execution_device=CPU)
    return accelerate.dispatch_model(hf_model, split_map("cpu", "disk"), main_device="cpu", offload_dir=str(folder))


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("llama", way) for way in ("hooks", "cpu", "disk", "half")),
        *(("gemma3_text", way) for way in ("cpu", "half")),
        *(("gpt2", way) for way in ("cpu", "disk")),
        ("opt", "cpu"),
    ],
)
def test_hooked_models_give_the_plain_text(family: str, way: str, tmp_path: Path) -> None:
    """Offloading included: the weights are somewhere else before and after a layer runs."""
    ids = prompt(4, 11)
    wanted = plain_generate(tiny_model(family), ids, 20)
    hf_model = offloaded(way, family, tmp_path)
    assert any(p.device == META for p in hf_model.parameters()) == (way != "hooks")
    model = load_model((hf_model, None))
    assert model.device == CPU
    assert model.dtype == torch.float64
    for policy in (None, StaticPolicy(exit_layer=2), RandomPolicy(seed=1)):
        assert new_tokens(model, ids, policy) == wanted


def test_a_folder_is_loaded_with_a_device_map(tmp_path: Path) -> None:
    tiny_hf_model("llama").save_pretrained(tmp_path / "model")
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(load_model("demo").hf_model.name_or_path)).save_pretrained(tmp_path / "model")
    model = load_model(
        tmp_path / "model",
        dtype="float64",
        device_map=split_map("cpu", "disk"),
        offload_folder=str(tmp_path / "offloaded"),
    )
    ids = prompt(4, 11)
    assert new_tokens(model, ids, StaticPolicy(exit_layer=4)) == plain_generate(tiny_model("llama"), ids, 20)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_tables_masks_and_cache_follow_the_layers(family: str, attention: str) -> None:
    """The second half on torch's meta device, which computes shapes alone: nothing is moved layer by layer."""
    hf_model = tiny_hf_model(family)
    hf_model.set_attn_implementation(attention)
    seen: list[tuple[int, torch.device]] = []

    def note(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [kwargs["attention_mask"], kwargs["position_ids"], *kwargs["position_embeddings"]]
        seen.extend((layer.self_attn.layer_idx, tensor.device) for tensor in given if tensor is not None)

    for i, layer in enumerate(hf_model.model.layers):
        device = CPU if i < N_LAYERS // 2 else META
        accelerate.hooks.add_hook_to_module(
            layer.to(device), accelerate.hooks.AlignDevicesHook(execution_device=device, place_submodules=False)
        )
        layer.register_forward_pre_hook(note, with_kwargs=True)
    model = load_model((hf_model, None))
    assert model.device == CPU
    with torch.inference_mode():
        cache = model.new_cache(32)
        for start, n_tokens in ((0, 12), (12, 1), (13, 3)):
            block = model.block(cache, start, n_tokens)
            hidden = model.embed(torch.ones(1, n_tokens, dtype=torch.long), block)
            hidden = model.run_layers(hidden, 0, 2, block)
            assert hidden.device == CPU
            assert model.head(hidden).device == CPU
            assert model.run_layers(hidden, 2, N_LAYERS, block).device == META
        ragged = model.new_cache(32, batch_size=2)
        block = model.ragged_block(ragged, torch.tensor([[0, 1], [0, 1]]), torch.arange(2))
        hidden = model.embed(torch.ones(2, 2, dtype=torch.long), block)
        assert model.run_layers(hidden, 0, N_LAYERS, block).device == META
    assert {i for i, _ in seen} == set(range(N_LAYERS))
    for i, device in seen:
        assert device == (CPU if i < N_LAYERS // 2 else META)
    for used in (cache, ragged):
        for i, keys in enumerate(used.keys):
            assert keys is not None
            assert keys.device == (CPU if i < N_LAYERS // 2 else META)


def test_chained_hooks_are_looked_through() -> None:
    layer = tiny_hf_model("llama").model.layers[0]
    move = accelerate.hooks.AlignDevicesHook(execution_device="meta", place_submodules=False)
    accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.SequentialHook(accelerate.hooks.ModelHook(), move))
    assert home_of(layer) == META


def test_absent_weights_and_plans_with_gaps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"layer 1 has no weights \(device 'meta'\)"):
        load_model((tiny_hf_model("llama").to("meta"), None))
    model = load_model((offloaded("half", "llama", tmp_path), None))
    with pytest.raises(UnsupportedModelError, match="with accelerate hooks"):
        new_tokens(model, prompt(0, 4), RandomPolicy(gap_probability=0.5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
@pytest.mark.parametrize("other", ["cpu", "second"])
def test_two_real_devices_give_the_plain_text(family: str, other: str) -> None:
    """Halves on two GPUs, or on the CPU and a GPU with the CPU's half computed there."""
    if other == "second" and torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    first, second = ("cpu", 0) if other == "cpu" else (0, 1)
    ids = prompt(4, 11)
    wanted = plain_generate(tiny_model(family), ids, 20)
    hf_model = accelerate.dispatch_model(tiny_hf_model(family), split_map(first, second), main_device=first)
    model = load_model((hf_model, None))
    assert len(set(model.places or ())) == 2
    for policy in (None, StaticPolicy(exit_layer=2), StaticPolicy(exit_layer=4), RandomPolicy(seed=1)):
        assert new_tokens(model, ids, policy) == wanted
