"""What `layerskip_llama.sh` needs before it starts: weights, a GPU, room on disk. One line a complaint, exit code 1.

python -m benchmarks.layerskip_check --model facebook/layerskip-llama2-7B --out runs/layerskip

With --dry-run nothing but a model folder is needed, and small prompt files are written instead.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

RESULTS_BYTES = 2 << 30
"""Room for stores, runs and reports."""
HEADROOM = 1.2
"""GPU memory over the size of the weights: caches, logits, workspace."""

_HEADS = (
    "def area(width, height):\n",
    "import os\n\n\ndef walk(folder):\n",
    "class Stack:\n    def __init__(self):\n",
    "def fibonacci(n):\n    if n < 2:\n",
    "def read_lines(path):\n    with open(path) as file:\n",
    "from math import sqrt\n\n\ndef distance(a, b):\n",
    "def is_prime(n):\n    for i in range(2, n):\n",
    "def reverse(text):\n    return ",
)


@dataclass(frozen=True)
class CheckConfig:
    """What is to be run."""

    model: str
    """Folder or hub id of the model."""
    out: Path
    """Folder of the results."""
    dry_run: bool = False
    """Whether a tiny model is run on the CPU, on prompts that are written to out/prompts."""


class NotReadyError(Exception):
    """Something is missing; the message says what, and what to do."""


def check(config: CheckConfig) -> None:
    """Raise NotReadyError unless the model can be run and its results kept."""
    if config.dry_run:
        if not (Path(config.model) / "config.json").is_file():
            raise NotReadyError(f"MODEL '{config.model}' is no folder of a model; a dry run needs a tiny one on disk")
        write_prompts(config.out / "prompts")
        return
    size, missing = weights(config.model)
    check_gpu(size)
    check_disk(config.out, missing)


def weights(model: str) -> tuple[int, int]:
    """Size of a model's weights in bytes, and how much of it is to be downloaded.

    Raises:
        NotReadyError: They can't be reached.
    """
    folder = Path(model)
    if folder.is_dir():
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if not (folder / "config.json").is_file() or not size:
            raise NotReadyError(f"{model} holds no model: config.json or *.safetensors is missing")
        return size, 0
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    hub = HfApi()
    try:
        hub.auth_check(model)
        files = hub.model_info(model, files_metadata=True).siblings or []
    except GatedRepoError:
        raise NotReadyError(
            f"{model} is gated: accept its licence at https://huggingface.co/{model} and run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise NotReadyError(f"{model} is neither a folder nor a model of the hub that you may see") from None
    except Exception as error:  # no network, no proxy, a hub that is down: each has its own class
        raise NotReadyError(f"cannot reach the weights of {model}: {str(error).strip().splitlines()[0]}") from None
    tensors = [file for file in files if file.rfilename.endswith(".safetensors")]
    if not tensors:
        raise NotReadyError(f"{model} holds no *.safetensors")
    absent = [f for f in tensors if not isinstance(try_to_load_from_cache(model, f.rfilename), str)]
    return sum(file.size or 0 for file in tensors), sum(file.size or 0 for file in absent)


def check_gpu(size: int) -> None:
    """Raise NotReadyError unless there is a GPU with room for the weights."""
    import torch

    if not torch.cuda.is_available():
        raise NotReadyError("there is no CUDA GPU that torch can use; DRY_RUN=1 MODEL=FOLDER tries the steps on a CPU")
    free, _ = torch.cuda.mem_get_info()
    if free < HEADROOM * size:
        raise NotReadyError(f"the GPU has {_gb(free)} free, weights of {_gb(size)} need {_gb(HEADROOM * size)}")


def check_disk(out: Path, download: int) -> None:
    """Raise NotReadyError unless there is room for the download and for the results."""
    from huggingface_hub.constants import HF_HUB_CACHE

    wanted: dict[int, tuple[Path, int]] = {}  # by disk
    for folder, size in ((Path(HF_HUB_CACHE), download), (out, RESULTS_BYTES)):
        place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
        _, before = wanted.get(place.stat().st_dev, (place, 0))
        wanted[place.stat().st_dev] = place, before + size
    for place, size in wanted.values():
        free = shutil.disk_usage(place).free
        if free < size:
            raise NotReadyError(f"the disk of {place} has {_gb(free)} free, {_gb(size)} are needed")


def write_prompts(folder: Path) -> None:
    """Write small files in the formats of the suites, and one to train on; no prompt of one is in another."""
    folder.mkdir(parents=True, exist_ok=True)
    words = " ".join(f"word{n % 17}" for n in range(120))
    files = {
        "train.jsonl": [{"prompt": f"# part {n}\n{head}"} for n in range(2) for head in _HEADS],
        "humaneval.jsonl": [{"prompt": f"{head}    # test\n", "canonical_solution": "    pass\n"} for head in _HEADS],
        "lm.jsonl": [{"text": f"Text {n}. {words}"} for n in range(len(_HEADS))],
    }
    for name, entries in files.items():
        (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def main(config: CheckConfig) -> int:
    """Check, and say what is missing.

    Returns:
        0 when all is there, otherwise 1.
    """
    try:
        check(config)
    except NotReadyError as error:
        print(f"layerskip_llama: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(CheckConfig, description=__doc__)))
