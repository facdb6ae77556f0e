"""Second part of the demo model's recipe: greedy text that does not loop.

A small model that decodes greedily falls into loops, and a looping text flatters every figure of early exit: all
layers agree on it. Starting from the end of ``lede.demo.train_model``, every step has real text, loops made of real
text (a passage that comes again and again, arXiv 2206.02369), and the model's own greedy text. In the latter two,
tokens that complete an n-gram already seen are made less likely (unlikelihood, arXiv 1908.04319), while a random exit
is distilled towards the last layer on the own text, on which it will be read. Every run unlearns the loops that it
meets, takes up others and damages the rest; the mean of several runs keeps what they have in common. Writes the same
files as the first part, to a folder of its own.
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
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from lede.demo.train_model import TrainConfig, Trainer, batches, checkpoint, norm


@dataclass(frozen=True)
class LoopConfig:
    """Settings of the second part."""

    checkpoint: tuple[Path, ...]
    """Checkpoint that the first part ended with; of several, the mean of the weights."""
    corpus: Path = Path("demo-corpus")
    """Folder written by lede.demo.corpus."""
    out: Path = Path("demo-loops")
    """Folder of logs, checkpoint and model."""
    steps: int = 300
    """Steps, each on real text and on the model's own; 0 only takes the mean of the checkpoints."""
    rate: float = 0.06
    """Learning rate over that of the first part; it falls to a fiftieth of this over the last half."""
    texts: int = 12
    """Own texts that a step learns from."""
    loops: int = 24
    """Loops of real text that a step learns from."""
    passage: tuple[int, int] = (3, 40)
    """Fewest and most tokens of the passage that such a loop repeats."""
    gram: int = 4
    """Length of the repeats that are made less likely, in tokens."""
    average: float = 0.97
    """Decay a step of the running average of the weights, which writes the own texts and is what is kept."""
    write_every: int = 8
    """Steps between two writings, each of the texts of so many steps: long batches are written faster."""
    prompt_tokens: int = 64
    """Real tokens before each."""
    new_tokens: int = 128
    """Tokens written."""
    weight: float = 0.3
    """Weight of the unlikelihood on either kind of loops beside the loss on real text."""
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
    model = copy.deepcopy(trainer.average).bfloat16()
    model.generation_config.eos_token_id = None
    texts: Tensor = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens, do_sample=False
    )
    return texts


def looped(source: NDArray[np.uint16], config: LoopConfig, draw: np.random.Generator) -> Tensor:
    """Real text whose last passage is repeated to the end; returns (text, prompt and new tokens)."""
    low, high = config.passage
    periods = np.exp(draw.uniform(np.log(low), np.log(high + 1), config.loops)).astype(np.int64)
    starts = draw.integers(0, len(source) - config.prompt_tokens - high, config.loops)
    after = np.arange(config.new_tokens)
    before = np.tile(np.arange(config.prompt_tokens), (config.loops, 1))
    places = np.concatenate((before, config.prompt_tokens + after % periods[:, None]), axis=1)
    return torch.from_numpy(source[starts[:, None] + places].astype(np.int64))


def loop_gradients(trainer: Trainer, config: LoopConfig, texts: Tensor, own: bool) -> dict[str, float]:
    """Adds the gradients on texts that loop, the model's own or others; texts: (text, prompt and new tokens)."""
    exit_at = random.choice(trainer.config.exits)
    ids, target = texts[:, :-1], texts[:, 1:]
    states = trainer.states(trainer.model, ids, trainer.config.layers, 0.0)
    weight, head = trainer.model.model.norm.weight, trainer.model.lm_head.weight
    start = config.prompt_tokens - 1
    logits, early = (
        (norm(h[:, start:].flatten(0, 1), weight) @ head.bfloat16().t()).float()
        for h in (states[-1], states[exit_at - 1])
    )
    marked = repeats(target[:, start:], config.gram).flatten()
    log_p = logits.log_softmax(-1)
    chance = log_p[marked].gather(1, target[:, start:].flatten()[marked][:, None]).exp().clamp(max=1 - 1e-4)
    unlikelihood = -torch.log1p(-chance).sum() / marked.numel()
    loss = config.weight * unlikelihood
    if own:
        teacher = log_p.detach()
        divergence = (teacher.exp() * (teacher - early.log_softmax(-1))).sum(-1).mean()
        loss = loss + trainer.config.distil_weight * divergence
    loss.backward()
    kind = "own" if own else "made"
    return {f"{kind}/unlikelihood": unlikelihood.item(), f"{kind}/marked": marked.float().mean().item()}


def break_loops(config: LoopConfig) -> None:
    """Runs the second part and writes checkpoint and model."""
    torch.set_num_threads(config.threads)
    config.out.mkdir(parents=True, exist_ok=True)
    states = [torch.load(path, weights_only=False) for path in config.checkpoint]
    stages = ((0, states[0]["config"]["layers"], config.length, 8192),)
    trainer = Trainer(TrainConfig(corpus=config.corpus, out=config.out, stages=stages, average=config.average))
    trainer.load(config.checkpoint[0])
    mean = {name: torch.stack([state["model"][name] for state in states]).mean(0) for name in states[0]["model"]}
    trainer.model.load_state_dict(mean)
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

    def keep(steps: int) -> None:
        held = write(trainer, prompts(validation, np.random.default_rng(0), 64), config.new_tokens)
        share = repeats(held[:, config.prompt_tokens :]).float().mean().item()
        writer.add_scalar("validation/repetition", share, steps)
        print(f"validation: repetition {share:.3f}", flush=True)
        trainer.decay_start, trainer.decay_tokens = schedule  # those of the first part are what is written
        checkpoint(trainer, validation, writer)
        about = config.out / "model" / "training.json"
        settings = {name: getattr(config, name) for name in ("texts", "loops", "weight", "rate", "gram")}
        loops = {"loops": {"mean_of": len(states), "steps": steps} | (settings if steps else {})}
        about.write_text(json.dumps(json.loads(about.read_text()) | loops, indent=1) + "\n")

    for step in range(config.steps):
        begun = time.monotonic()
        factor = config.rate * min(1.0, (step + 1) / 5) * max(0.02, min(1.0, 2 * (1 - step / config.steps)))
        # the first part's own step has the rate of its schedule, so set that schedule to this factor
        trainer.decay_start, trainer.decay_tokens = trainer.tokens - round(1e9 * (1 - factor)), 10**9
        if step % config.write_every == 0:
            starts = prompts(tokens, draw, config.texts * config.write_every)
            written = write(trainer, starts, config.new_tokens).split(config.texts)
        own = loop_gradients(trainer, config, written[step % config.write_every], own=True)
        made = loop_gradients(trainer, config, looped(tokens, config, draw), own=False)
        # adds its gradients to those: one update for both, since the optimiser makes every update equally large
        figures = trainer.step(*next(real)) | own | made
        trainer.elapsed += time.monotonic() - begun
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        if step % 5 == 4:
            shown = " ".join(
                f"{name} {figures[name]:.3f}"
                for name in ("loss/last", "own/unlikelihood", "own/marked", "made/unlikelihood")
            )
            print(f"step {step + 1} {shown} {time.monotonic() - begun:.1f} s", flush=True)
        if step % 20 == 19 or step + 1 == config.steps:
            keep(step + 1)
    if not config.steps:
        keep(0)
    writer.close()


if __name__ == "__main__":
    break_loops(tyro.cli(LoopConfig, description=__doc__))
