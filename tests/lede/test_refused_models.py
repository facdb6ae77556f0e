"""Models that can't be decoded exactly are refused by name, with the reason, before any weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lede.families import FAMILIES, REASONS, UnsupportedModelError, check_supported
from lede.models import load_model
from tests.tiny_models import tiny_config


@pytest.mark.parametrize("name", sorted(REASONS))
def test_a2_9_a_known_reason_is_told(name: str) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    with pytest.raises(UnsupportedModelError) as raised:
        check_supported(AutoConfig.for_model(name))
    assert str(raised.value).startswith(f"model type '{name}' is not supported: {REASONS[name]}; supported are ")
    assert str(raised.value).endswith(", ".join(sorted(FAMILIES)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mamba", "'mamba' is not supported: its layers keep a recurrent state"),
        ("qwen3_next", "'qwen3_next' is not supported: its layers keep a recurrent state"),
        ("recurrent_gemma", "'recurrent_gemma' is not supported: its layers keep a recurrent state"),
        ("granitemoehybrid", "'granitemoehybrid' is not supported: its layers keep a recurrent state"),
        ("lfm2", "'lfm2' is not supported: its layers keep a recurrent state"),
        ("bloom", r"'bloom' is not supported: its attention is biased by distance \(ALiBi\)"),
        ("t5", "'t5' is not supported: it is an encoder-decoder"),
        ("bart", "'bart' is not supported: it is an encoder-decoder"),
        ("bert", "'bert' is not supported; supported are apertus, arcee"),
        ("llama4_text", "'llama4_text' is not supported; supported are"),
    ],
)
def test_a_folder_without_weights_is_refused_by_its_config(name: str, message: str, tmp_path: Path) -> None:
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(tmp_path)


def test_layers_of_a_foreign_type_are_refused_in_a_supported_family() -> None:
    """Linear or chunked attention, whatever the model is called."""
    config = tiny_config("qwen3")
    config.layer_types = ["full_attention", "linear_attention"] * 3
    with pytest.raises(UnsupportedModelError, match="qwen3 with layers of type linear_attention is not supported"):
        check_supported(config)


def test_no_family_is_both_supported_and_refused() -> None:
    assert not set(REASONS) & set(FAMILIES)
