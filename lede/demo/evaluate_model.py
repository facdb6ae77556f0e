"""Measures the demo model on test files and writes ``evaluation.json`` and the model's card beside the weights.

Uses transformers alone: the hidden state after layer e, put through the final norm and the head, is what exit e reads.
Agreement is the share of positions at which that reading has the same most likely token as the last layer, on real
text (teacher-forced) and on the model's own greedy text. Repetition is the share of an output's 4-grams that occurred
in it before: a model that loops agrees with itself at every layer, so agreement says little without it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

NEWLINE = "\n"


@dataclass(frozen=True)
class EvaluationConfig:
    """Settings of the evaluation."""

    model: Path
    """Folder of the model and its tokenizer."""
    corpus: Path = Path("demo-corpus")
    """Folder written by lede.demo.corpus."""
    split: Literal["validation", "test"] = "test"
    """Files to measure on."""
    files: int = 64
    """Number of files, in the corpus's order, which is random."""
    file_tokens: int = 2048
    """Most tokens read of one file."""
    window: int = 512
    """Tokens read at once; no context crosses windows."""
    prompt_tokens: int = 64
    """Tokens of a file's head that greedy decoding continues."""
    new_tokens: int = 128
    """Tokens to continue with."""
    logs: Path | None = None
    """TensorBoard folder of the training run, for the curve in the card."""
    card: bool = True
    """Write README.md."""
    threads: int = 2
    """Threads of the tensor library."""


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams of a token sequence that occurred in it before."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def exit_logits(model: LlamaForCausalLM, ids: Tensor) -> list[Tensor]:
    """Logits read after every layer, the last one included; ids: (batch, length)."""
    states = model(ids, output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
    # The last entry has gone through the final norm already.
    return [model.lm_head(model.model.norm(h)) for h in states[1:-1]] + [model.lm_head(states[-1])]


def measure_text(model: LlamaForCausalLM, files: list[list[int]], window: int) -> dict[str, Any]:
    """Summed loss of the last layer and teacher-forced agreement by exit, on token files that begin with ``<eos>``."""
    loss, count = 0.0, 0
    same = torch.zeros(model.config.num_hidden_layers)
    for tokens in files:
        for start in range(0, len(tokens) - 1, window):
            piece = torch.tensor([tokens[start : start + window + 1]])
            logits = exit_logits(model, piece[:, :-1])
            loss += F.cross_entropy(logits[-1][0], piece[0, 1:], reduction="sum").item()
            best = logits[-1].argmax(-1)
            same += torch.tensor([(x.argmax(-1) == best).sum().item() for x in logits])
            count += best.numel()
    return {"loss_sum": loss, "tokens": count, "agreement": (same / count).tolist()}


def measure_greedy(model: LlamaForCausalLM, files: list[list[int]], prompt: int, new: int) -> dict[str, Any]:
    """Agreement by exit and repetition on the model's greedy continuation of file heads, and real files' repetition."""
    heads = torch.tensor([tokens[: prompt + 1] for tokens in files])
    # Without an end token: every output has the same length.
    model.generation_config.eos_token_id = None
    full = model.generate(heads, attention_mask=torch.ones_like(heads), max_new_tokens=new, do_sample=False)
    outputs = full[:, prompt + 1 :]
    same = torch.zeros(model.config.num_hidden_layers)
    for row, output in zip(full, outputs, strict=True):
        for e, logits in enumerate(exit_logits(model, row[None, :-1])):
            same[e] += (logits[0, prompt:].argmax(-1) == output).float().mean()
    return {
        "agreement": (same / len(full)).tolist(),
        "repetition": sum(repetition(o) for o in outputs.tolist()) / len(full),
        "repetition_real": sum(repetition(t[prompt + 1 : prompt + 1 + new]) for t in files) / len(files),
        "outputs": outputs.tolist(),
    }


@torch.inference_mode()
def evaluate_model(config: EvaluationConfig) -> dict[str, Any]:
    """Returns every figure of the card and writes them as JSON; computed in float32."""
    torch.set_num_threads(config.threads)
    model = LlamaForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    with (config.corpus / f"{config.split}.jsonl").open() as lines:
        texts = [json.loads(line)["text"] for line in lines]
    ids = tokenizer(texts, add_special_tokens=False, truncation=True, max_length=config.file_tokens)["input_ids"]
    files = [[0, *i] for i in ids]
    files = [f for f in files if len(f) > config.prompt_tokens + config.new_tokens + 1][: config.files]
    size = sum(len(str(tokenizer.decode(f[1:])).encode()) for f in files)
    text = measure_text(model, files, config.window)
    greedy = measure_greedy(model, files, config.prompt_tokens, config.new_tokens)
    outputs = [tokenizer.decode(o) for o in greedy.pop("outputs")]
    samples = [
        {"head": tokenizer.decode(f[1 : config.prompt_tokens + 1]), "continuation": o}
        for f, o in zip(files, outputs, strict=True)
    ]
    result: dict[str, Any] = {
        "split": config.split,
        "files": len(files),
        "window": config.window,
        "parameters": model.num_parameters(),
        "layers": model.config.num_hidden_layers,
        "loss": text["loss_sum"] / text["tokens"],
        "bits_per_byte": text["loss_sum"] / math.log(2) / size,
        "bytes_per_token": size / text["tokens"],
        "agreement_text": text["agreement"],
        "agreement_greedy": greedy["agreement"],
        "repetition_greedy": greedy["repetition"],
        "repetition_real": greedy["repetition_real"],
        "samples": samples[:4],
    }
    (config.model / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def training_curve(logs: Path, points: int = 12) -> list[tuple[int, float]]:
    """Returns (tokens, validation loss of the averaged weights) at evenly spaced checkpoints."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logs))
    events.Reload()
    scalars = events.Scalars("validation_average/loss")
    kept = sorted({round(i * (len(scalars) - 1) / (points - 1)) for i in range(points)}) if scalars else []
    return [(scalars[i].step, scalars[i].value) for i in kept]


def card(config: EvaluationConfig, result: dict[str, Any]) -> str:
    """Returns the model's card as Markdown."""
    model = json.loads((config.model / "config.json").read_text())
    training = json.loads((config.model / "training.json").read_text())
    sources = json.loads((config.corpus / "sources.json").read_text())
    layers, ends = result["layers"], "final decay not begun"
    if training["decay_start"] >= 0:
        ends = f"{training['decay_tokens'] / 1e6:.1f} M of them in the final decay"
    loops = ""
    if "loops" in training:
        loops = f"; then the mean of {training['loops']['mean_of']} checkpoints of runs against loops"
    shown = sorted({*range(1, layers // 2 + 1), *range(layers // 2 + 2, layers, 2)})
    rows = [f"| {e} | {result['agreement_text'][e - 1]:.3f} | {result['agreement_greedy'][e - 1]:.3f} |" for e in shown]
    curve = (
        [f"| {tokens / 1e6:.1f} | {loss:.3f} |" for tokens, loss in training_curve(config.logs)] if config.logs else []
    )
    texts = "; ".join(f"{s['name']} {s['version']} ({s['licence']}, {s['bytes'] / 1e6:.1f} MB)" for s in sources)
    sample = result["samples"][0]
    return f"""---
library_name: transformers
license: apache-2.0
tags: [early-exit, self-speculative-decoding, code]
---
# lede demo model

A Llama of {layers} layers, width {model["hidden_size"]}, {result["parameters"] / 1e6:.1f} M parameters, vocabulary
{model["vocab_size"]:,}, trained from scratch on Python source so that its shallow layers can be read as next tokens.
It exists to show and test early-exit decoding on a CPU; it writes plausible Python, not useful Python.

| {result["files"]} {result["split"]} files, windows of {result["window"]} tokens | figure |
|---|---|
| loss, last layer, nats a token | {result["loss"]:.3f} |
| bytes a token | {result["bytes_per_token"]:.2f} |
| bits per byte | {result["bits_per_byte"]:.3f} |
| repetition (4-grams already seen), own greedy text | {result["repetition_greedy"]:.2f} |
| repetition, the real files at the same places | {result["repetition_real"]:.2f} |

## Agreement with the last layer

Greedy text: {config.new_tokens} tokens after the first {config.prompt_tokens} of each file.

| exit after layer | real text, teacher-forced | own greedy text |
|---|---|---|
{NEWLINE.join(rows)}

## Training

{training["tokens"] / 1e6:.1f} M tokens ({ends}), {training["elapsed"] / 3600:.1f} hours on two CPU cores{loops}.
Recipe: `python -m lede.demo.train_model`, `python -m lede.demo.break_loops`; text: `python -m lede.demo.corpus`. Every
setting is in `training.json`; what was tried is in `docs/demo_model.md`.

| M tokens | validation loss |
|---|---|
{NEWLINE.join(curve)}

## Data

Python source of {len(sources)} permissively licensed packages; licence headers, generated and data files, exact and
near duplicates removed; split by file (hash of the path). {texts}.

## A sample

The head of a {result["split"]} file:

```python
{sample["head"]}
```

Its greedy continuation:

```python
{sample["continuation"]}
```
"""


def main(config: EvaluationConfig) -> None:
    """Evaluates, prints the main figures and writes the card."""
    result = evaluate_model(config)
    if config.card:
        (config.model / "README.md").write_text(card(config, result))
    looping = f"repetition {result['repetition_greedy']:.2f} (real files {result['repetition_real']:.2f})"
    print(f"loss {result['loss']:.3f} bits per byte {result['bits_per_byte']:.3f} {looping}")
    for e, (text, greedy) in enumerate(zip(result["agreement_text"], result["agreement_greedy"], strict=True), 1):
        print(f"exit {e:2d}: agreement {text:.3f} on real text, {greedy:.3f} on greedy text")


if __name__ == "__main__":
    main(tyro.cli(EvaluationConfig, description=__doc__))
