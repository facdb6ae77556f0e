"""Second part of the demo model's recipe: greedy text that does not loop.

A small model that decodes greedily falls into loops, and a looping text flatters every figure of early exit: all layers
agree on it. Starting from the end of ``lede.demo.train_model``, every step has real text, and the model's own greedy
text, in which tokens that complete a 4-gram already seen are made less likely (sequence-level
unlikelihood, arXiv 1908.04319), while a random exit is distilled towards the last layer, on the text that it will be
read on. Writes the same files as the first part, to a folder of its own.
"""

import copy
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from lede.demo.train_model import TrainConfig, Trainer, batches, checkpoint, norm


@dataclass(frozen=True)
class LoopConfig:
    """Settings of the second part."""

    checkpoint: Path
    """Checkpoint that the first part ended with."""
    corpus: Path = Path("demo-corpus")
    """Folder written by lede.demo.corpus."""
    out: Path = Path("demo-loops")
    """Folder of logs, checkpoint and model."""
    steps: int = 300
    """Steps, each on real text and on the model's own."""
    rate: float = 0.1
    """Learning rate over that of the first part; it falls to a fiftieth of this over the last half."""
    texts: int = 24
    """Own texts that a step learns from."""
    write_every: int = 4
    """Steps between two writings, each of the texts of so many steps: long batches are written faster."""
    prompt_tokens: int = 64
    """Real tokens before each."""
    new_tokens: int = 128
    """Tokens written."""
    weight: float = 2.0
    """Weight of the unlikelihood beside the loss on real text."""
    length: int = 512
    """Length of real text."""
    files: int = 20_000_000
    """Tokens of the corpus in which heads of files are looked for; every other own text continues one."""
    seed: int = 1
    """Seed of prompts and exits."""
    threads: int = 2
    """Threads of the tensor library."""


def repeats(outputs: Tensor, n: int = 4) -> Tensor:
    """Whether each token completes an n-gram that stood in its text before; outputs: (text, token)."""
    marked = torch.zeros(outputs.shape, dtype=torch.bool)
    for row, tokens in enumerate(outputs.tolist()):
        seen: set[tuple[int, ...]] = set()
        for end in range(n, len(tokens) + 1):
            gram = tuple(tokens[end - n : end])
            marked[row, end - 1] = gram in seen
            seen.add(gram)
    return marked


@torch.no_grad()
def write(trainer: Trainer, prompts: Tensor, new_tokens: int) -> Tensor:
    """Greedy continuations in bfloat16, without an end; prompts: (text, token); returns prompts and text."""
    model = copy.deepcopy(trainer.model).bfloat16()
    model.generation_config.eos_token_id = None
    texts: Tensor = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens, do_sample=False
    )
    return texts


def own_gradients(trainer: Trainer, config: LoopConfig, texts: Tensor) -> dict[str, float]:
    """Adds the gradients on the model's own text; texts: (text, prompt and new tokens)."""
    choices = trainer.config.exits
    exit_at = random.choice(choices)
    ids, target = texts[:, :-1], texts[:, 1:]
    states = trainer.states(trainer.model, ids, trainer.config.layers, 0.0)
    weight, head = trainer.model.model.norm.weight, trainer.model.lm_head.weight
    start = config.prompt_tokens - 1
    logits, early = (
        (norm(h[:, start:].flatten(0, 1), weight) @ head.bfloat16().t()).float()
        for h in (states[-1], states[exit_at - 1])
    )
    marked = repeats(target[:, start:]).flatten()
    log_p = logits.log_softmax(-1)
    chance = log_p[marked].gather(1, target[:, start:].flatten()[marked][:, None]).exp().clamp(max=1 - 1e-4)
    unlikelihood = -torch.log1p(-chance).sum() / marked.numel()
    teacher = log_p.detach()
    divergence = (teacher.exp() * (teacher - early.log_softmax(-1))).sum(-1).mean()
    (config.weight * unlikelihood + trainer.config.distil_weight * divergence).backward()
    return {"own/unlikelihood": unlikelihood.item(), "own/repetition": marked.float().mean().item()}


def break_loops(config: LoopConfig) -> None:
    """Runs the second part and writes checkpoint and model."""
    torch.set_num_threads(config.threads)
    config.out.mkdir(parents=True, exist_ok=True)
    state = torch.load(config.checkpoint, weights_only=False)
    stages = ((0, state["config"]["layers"], config.length, 8192),)
    trainer = Trainer(TrainConfig(corpus=config.corpus, out=config.out, stages=stages))
    trainer.load(config.checkpoint)
    random.seed(config.seed)
    draw = np.random.default_rng(config.seed)
    tokens, validation = (np.load(config.corpus / f"{s}.npy", mmap_mode="r") for s in ("train", "validation"))

    def prompts(source: np.ndarray, rng: np.random.Generator, count: int) -> Tensor:
        starts = rng.integers(0, len(source) - config.prompt_tokens, count)
        heads = np.flatnonzero(source[: config.files] == 0)
        starts[::2] = rng.choice(heads[heads < len(source) - config.prompt_tokens], len(starts[::2]))
        return torch.from_numpy(np.stack([source[s : s + config.prompt_tokens] for s in starts]).astype(np.int64))

    schedule = trainer.decay_start, trainer.decay_tokens
    writer, real = SummaryWriter(str(config.out / "logs")), batches(tokens, trainer)
    trainer.average.load_state_dict(trainer.model.state_dict())
    for step in range(config.steps):
        begun = time.monotonic()
        factor = config.rate * min(1.0, (step + 1) / 5) * max(0.02, min(1.0, 2 * (1 - step / config.steps)))
        # the first part's own step has the rate of its schedule, so set that schedule to this factor
        trainer.decay_start, trainer.decay_tokens = trainer.tokens - round(1e9 * (1 - factor)), 10**9
        if step % config.write_every == 0:
            starts = prompts(tokens, draw, config.texts * config.write_every)
            written = write(trainer, starts, config.new_tokens).split(config.texts)
        own = own_gradients(trainer, config, written[step % config.write_every])
        # adds its gradients to those: one update for both, since the optimiser makes every update equally large
        figures = trainer.step(*next(real)) | own
        trainer.elapsed += time.monotonic() - begun
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        if step % 5 == 4:
            shown = " ".join(
                f"{name} {figures[name]:.3f}" for name in ("loss/last", "own/unlikelihood", "own/repetition")
            )
            print(f"step {step + 1} {shown} {time.monotonic() - begun:.1f} s", flush=True)
        if step % 20 == 19 or step + 1 == config.steps:
            held = write(trainer, prompts(validation, np.random.default_rng(0), 64), config.new_tokens)
            share = repeats(held[:, config.prompt_tokens :]).float().mean().item()
            writer.add_scalar("validation/repetition", share, step)
            print(f"validation: repetition {share:.3f}", flush=True)
            trainer.decay_start, trainer.decay_tokens = schedule  # those of the first part are what is written
            checkpoint(trainer, validation, writer)
            about = config.out / "model" / "training.json"
            loops = {"loops": {"steps": step + 1, "texts": config.texts, "weight": config.weight, "rate": config.rate}}
            about.write_text(json.dumps(json.loads(about.read_text()) | loops, indent=1) + "\n")
    writer.close()


if __name__ == "__main__":
    break_loops(tyro.cli(LoopConfig, description=__doc__))
