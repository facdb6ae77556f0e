"""`lede env`: what a bug report needs to say about the machine."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "tyro",
    "rich",
    "gymnasium",
    "zarr",
    "numcodecs",
    "d3rlpy",
    "tensorboard",
    "matplotlib",
    "scikit-learn",
    "rouge-score",
    "gguf",
    "accelerate",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "minari",
    "h5py",
    "ray",
    "s3fs",
)
"""What lede needs, with every extra."""


@dataclass(frozen=True)
class EnvConfig:
    """Settings of `lede env`."""

    json: bool = False
    """Print one JSON object."""


def environment() -> dict[str, Any]:
    """Versions, devices and default dtypes; packages that are not installed are None."""
    import torch

    import lede
    from lede.models import FAMILIES

    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "lede": lede.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": found,
        "cpu_threads": torch.get_num_threads(),
        "cuda_devices": cuda,
        "default_device": "cpu",
        "default_dtype": {"cpu": "float32", "elsewhere": "the checkpoint's"},
        "families": sorted(FAMILIES),
    }


def show_environment(config: EnvConfig) -> None:
    """Print `environment()` as a table or as JSON."""
    facts = environment()
    if config.json:
        print(json.dumps(facts))
        return
    packages = facts.pop("packages")
    rows = {**facts, **{name: found or "not installed" for name, found in packages.items()}}
    width = max(map(len, rows))
    for name, value in rows.items():
        text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
        text = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else text
        print(f"{name:<{width}}  {text}")
