"""Where the time of a token goes: lede's engine beside transformers' generate, by section, by operation and by context.

python -m benchmarks.engine_profile --model demo --policy "static:exit_layer=5;draft_length=4" --out engine.json

Everything is interleaved and told in medians. Beside the figures stands the roofline: the seconds that reading all
weights once would take at the measured speed of a copy in memory.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from lede.compiling import compile_ahead
from lede.generation import generate
from lede.models import DEMO_FOLDER, EarlyExitModel, load_model
from lede.policies import parse_policy

PROMPT = "def quicksort(items):"
GROUPS = {
    "compiled kernels": ("Call CompiledFxGraph",),
    "guards": ("TorchDynamo", "Torch-Compiled", "Pregraph", "AOTDispatcher"),
    "products": ("aten::mm", "linear", "addmm", "_linear_pointwise", "aten::mv", "bmm", "matmul"),
    "attention": ("scaled_dot_product", "flash"),
}
"""Groups of operations by parts of their names, the first that fits; the rest is arithmetic, copies and views."""


@dataclass(frozen=True)
class ProfileSettings:
    """Settings."""

    out: Path
    """File for everything as JSON; replaced whole."""
    model: str = "demo"
    """Model: demo, a folder, a hub id, or a .gguf file."""
    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A policy beside plain decoding; give it again for more."""
    dtype: str | None = None
    """Dtype of the weights."""
    threads: int | None = None
    """Threads of torch."""
    max_new_tokens: int = 96
    """Tokens of a text."""
    repeats: int = 7
    """Texts that the medians are of, after a warm-up."""
    contexts: str = "256,1024,4000"
    """Context lengths at which a token is timed."""
    rows: str = "1,2,3,5,9,17"
    """Rows of which a whole pass is timed, behind a prompt of `rows_context` tokens."""
    rows_context: int = 128
    """Tokens of that prompt."""
    compiled: bool = True
    """Whether the compiled engine is measured too."""
    ahead: bool = False
    """Whether kernels compiled ahead of time are measured too; those that are missing are compiled first."""
    packed: bool = False
    """Whether engines with packed weights are measured too."""


Run = Callable[[], dict[str, float]]
"""Decodes a text and returns seconds by section; `total` among them."""


def transformers_model(model: EarlyExitModel, name: str) -> Any:
    """The model as transformers runs it; loaded anew where it can be, so that nothing of lede is in it."""
    if name.endswith(".gguf"):
        return model.hf_model
    folder = str(DEMO_FOLDER) if name == "demo" else name
    return AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).eval()


def lede_run(model: EarlyExitModel, policy: str, ids: list[int], max_new_tokens: int) -> Run:
    """Decoding on lede's engine."""
    decide = parse_policy(policy)

    def run() -> dict[str, float]:
        started = time.perf_counter()
        out = generate(model, input_ids=ids, policy=decide, max_new_tokens=max_new_tokens, eos_token_id=())
        return {"total": time.perf_counter() - started, **asdict(out.stats.seconds)}

    return run


def transformers_run(hf_model: Any, ids: list[int], max_new_tokens: int) -> Run:
    """Decoding by transformers' generate."""
    inputs = torch.tensor([ids])

    def run() -> dict[str, float]:
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about flags that its own defaults set
            hf_model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return {"total": time.perf_counter() - started}

    return run


def by_section(runs: dict[str, Run], repeats: int, n_tokens: int) -> dict[str, dict[str, float]]:
    """Milliseconds a token by section, medians of interleaved runs."""
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            spent = run()
            if turn:
                for section, seconds in spent.items():
                    found[name][section].append(1e3 * seconds / n_tokens)
    return {name: {s: statistics.median(v) for s, v in spent.items()} for name, spent in found.items()}


def by_operation(run: Run, n_tokens: int) -> dict[str, float]:
    """Milliseconds a token in groups of operations; `python` is what no operation accounts for, profiler included."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        total = run()["total"]
    spent: dict[str, float] = defaultdict(float)
    for event in watched.key_averages():
        group = next((g for g, parts in GROUPS.items() if any(p in event.key for p in parts)), "other operations")
        spent[group] += event.self_cpu_time_total / 1e3 / n_tokens
    spent["python"] = 1e3 * total / n_tokens - sum(spent.values())
    return dict(spent)


@torch.inference_mode()
def by_context(models: dict[str, EarlyExitModel], contexts: list[int], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a plain token at each context length, and of attention alone in all layers."""
    found: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        found[name] = {}
        for context in (c for c in contexts if c < model.max_positions):
            cache = model.new_cache(context + 1)
            block = model.block(cache, 0, context)
            ids = torch.arange(context)[None] % model.vocab_size
            model.run_layers(model.embed(ids, block), 0, model.n_layers, block)
            spent, alone = [], []
            for _ in range(repeats + 2):
                started = time.perf_counter()
                block = model.block(cache, context, 1)
                hidden = model.run_layers(model.embed(ids[:, :1], block), 0, model.n_layers, block)
                int(model.head(hidden)[0, -1].argmax())
                spent.append(time.perf_counter() - started)
                cache.rewind(context)
                started = time.perf_counter()
                for keys, values in zip(cache.keys, cache.values, strict=True):
                    assert keys is not None
                    assert values is not None
                    query = keys[:, :, :1].repeat(1, model.config.num_attention_heads // keys.shape[1], 1, 1)
                    torch.nn.functional.scaled_dot_product_attention(
                        query, keys[:, :, :context], values[:, :, :context], enable_gqa=True
                    )
                alone.append(time.perf_counter() - started)
            found[name][f"token at {context}"] = 1e3 * statistics.median(spent[2:])
            found[name][f"attention at {context}"] = 1e3 * statistics.median(alone[2:])
    return found


@torch.inference_mode()
def by_rows(
    models: dict[str, EarlyExitModel], rows: list[int], context: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of a whole pass over so many rows, head included, medians of interleaved ones."""
    ids = torch.arange(context + max(rows))[None] % next(iter(models.values())).vocab_size
    caches, spent = {}, defaultdict[tuple[str, int], list[float]](list)
    for name, model in models.items():
        caches[name] = model.new_cache(context + 2 * max(rows))
        block = model.block(caches[name], 0, context)
        model.run_layers(model.embed(ids[:, :context], block), 0, model.n_layers, block)
    for turn in range(repeats + 2):
        for n_rows in rows:
            for name, model in models.items():
                started = time.perf_counter()
                block = model.block(caches[name], context, n_rows)
                model.head(model.run_layers(model.embed(ids[:, :n_rows], block), 0, model.n_layers, block))
                if turn > 1:
                    spent[name, n_rows].append(time.perf_counter() - started)
                caches[name].rewind(context)
    return {
        name: {f"{n} row{'s' if n > 1 else ''}": 1e3 * statistics.median(spent[name, n]) for n in rows}
        for name in models
    }


def copy_speed() -> float:
    """Bytes a second that a large copy reads."""
    source = torch.ones(64 * 2**20)
    target, spent = torch.empty_like(source), []
    for _ in range(7):
        started = time.perf_counter()
        target.copy_(source)
        spent.append(time.perf_counter() - started)
    return source.numel() * source.element_size() / statistics.median(spent)


def table(rows: dict[str, dict[str, float]]) -> str:
    """Rows of figures as Markdown."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = ["| ms | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{row[c]:.2f}" if c in row else "" for c in columns) + " |")
    return "\n".join(lines)


def main(settings: ProfileSettings) -> dict[str, Any]:
    """Measure, print and write."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    models = {"eager": load_model(settings.model, dtype=settings.dtype)}
    pair = (models["eager"].hf_model, models["eager"].tokenizer)
    if settings.compiled:
        models["compiled"] = load_model(pair)
        models["compiled"].compile(ahead=False)
    if settings.ahead:
        models["compiled ahead"] = load_model(pair)
    if settings.packed:
        models |= {f"{kind}, packed": load_model(pair, pack_weights=True) for kind in models}
        if settings.compiled:
            models["compiled, packed"].compile(ahead=False)
    for kind, each in models.items():
        if "ahead" in kind:
            compile_ahead(each)
            each.compile()
    model = models["eager"]
    ids = list(model.tokenizer(PROMPT)["input_ids"])
    n_tokens = settings.max_new_tokens
    runs = {"transformers generate": transformers_run(transformers_model(model, settings.model), ids, n_tokens)}
    for kind, each in models.items():
        for policy in ("plain", *settings.policy):
            runs[f"{policy}, {kind}"] = lede_run(each, policy, ids, n_tokens)
    weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.hf_model.parameters()}.values())
    contexts = [int(part) for part in settings.contexts.split(",")]
    found: dict[str, Any] = {
        "settings": {name: str(value) for name, value in asdict(settings).items()},
        "threads": torch.get_num_threads(),
        "weights": weights,
        "copy_bytes_per_second": copy_speed(),
        "sections": by_section(runs, settings.repeats, n_tokens),
        "operations": {name: by_operation(run, n_tokens) for name, run in runs.items()},
        "rows": by_rows(
            models, [int(part) for part in settings.rows.split(",")], settings.rows_context, settings.repeats
        ),
        "contexts": by_context(models, contexts, settings.repeats),
        "compile_seconds": {name: each.compile_seconds for name, each in models.items() if each.compiled is not None},
        "packing": {name: [m.packed.seconds, m.packed.n_bytes] for name, m in models.items() if m.packed is not None},
    }
    roofline = 1e3 * weights / found["copy_bytes_per_second"]
    print(f"weights {weights / 1e6:.0f} MB, copy {found['copy_bytes_per_second'] / 1e9:.1f} GB/s: {roofline:.2f} ms")
    for name in ("sections", "operations", "contexts"):
        print(f"\n{name}, milliseconds a token\n\n{table(found[name])}")
    print(f"\na pass over rows, milliseconds\n\n{table(found['rows'])}")
    for name, (seconds, size) in found["packing"].items():
        print(f"\n{name}: {size / 1e6:.0f} MB packed in {seconds:.2f} s")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main(tyro.cli(ProfileSettings, description=__doc__))
