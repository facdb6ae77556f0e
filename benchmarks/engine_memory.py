"""Peak memory of decoding in a process of its own: transformers' generate, and lede plain, drafting and compiled.

With `--ahead` also by kernels that other processes compiled ahead of time; those that are missing are compiled first.

python -m benchmarks.engine_memory --model demo --max-new-tokens 256 --out memory.json
"""

from __future__ import annotations

import json
import multiprocessing
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from lede.compiling import compile_ahead
from lede.generation import generate
from lede.models import load_model
from lede.peak_memory import PeakMemory
from lede.policies import parse_policy

PROMPT = "def quicksort(items):"
KINDS = ("transformers generate", "plain", "drafting", "plain, compiled")
AHEAD_KINDS = ("plain, compiled ahead", "drafting, compiled ahead")


@dataclass(frozen=True)
class MemorySettings:
    """Settings."""

    out: Path
    """File of the figures as JSON; replaced whole."""
    model: str = "demo"
    """Model: demo, a folder, a hub id, or a .gguf file."""
    policy: str = "static:exit_layer=5;draft_length=4"
    """Who drafts."""
    max_new_tokens: int = 256
    """Tokens of the text."""
    ahead: bool = False
    """Whether kernels compiled ahead of time are measured too."""


def peak(kind: str, settings: MemorySettings) -> int | None:
    """Most bytes in use while a model is loaded and decodes once; None where the system does not tell."""
    meter = PeakMemory(torch.device("cpu"))
    meter.start()
    model = load_model(settings.model)
    if "compiled" in kind:
        model.compile(ahead="ahead" in kind)
    ids = list(model.tokenizer(PROMPT)["input_ids"])
    if kind == "transformers generate":
        inputs = torch.tensor([ids])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about flags that its own defaults set
            model.hf_model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=settings.max_new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
    else:
        policy = parse_policy(settings.policy) if "drafting" in kind else None
        generate(model, input_ids=ids, policy=policy, max_new_tokens=settings.max_new_tokens, eos_token_id=())
    return meter.read()


def main(settings: MemorySettings) -> dict[str, int | None]:
    """Measure each kind in a process of its own, print and write."""
    if settings.ahead:
        compile_ahead(load_model(settings.model))
    context = multiprocessing.get_context("spawn")
    found: dict[str, int | None] = {}
    for kind in (*KINDS, *AHEAD_KINDS) if settings.ahead else KINDS:
        with context.Pool(1) as pool:
            found[kind] = pool.apply(peak, (kind, settings))
    base = found[KINDS[0]]
    print("| peak memory | MB | over transformers |\n|---|---|---|")
    for kind, size in found.items():
        ratio = f"{size / base:.3f}" if size and base else "-"
        print(f"| {kind} | {'-' if size is None else f'{size / 1e6:.0f}'} | {ratio} |")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main(tyro.cli(MemorySettings, description=__doc__))
