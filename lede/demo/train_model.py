"""Trains the demo model: a deep, thin Llama on Python source whose shallow layers already read out as next tokens.

Recipe after LayerSkip (Elhoushi et al. 2024): layers are dropped at random, deeper ones more often; one random exit a
step is trained through the shared final norm and head, on the next token and, later, towards the last layer's
distribution. Training starts shallow: the upper layers begin as identities and join at the tokens given in ``stages``.

Build the text with ``lede.demo.corpus`` first. A run continues from the newest checkpoint in ``--out``; it may be
stopped at any time. The learning rate is constant until ``--decay-tokens`` starts the final, linear decay.
"""

import copy
import dataclasses
import json
import random
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from transformers import LlamaConfig, LlamaForCausalLM

from lede.demo.corpus import BLOCK, blocks

PARTS = ("model", "average", "adam", "muon")
COUNTERS = ("steps", "tokens", "elapsed", "decay_start", "decay_tokens")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the training run; the first group is fixed once a run has begun."""

    out: Path
    """Folder of checkpoints, logs and the exported model."""
    corpus: Path = Path("demo-corpus")
    """Folder written by lede.demo.corpus."""
    vocab_size: int = 8192
    """Vocabulary of the tokenizer; input embedding and head share one matrix."""
    width: int = 256
    """Hidden size."""
    heads: int = 4
    """Attention heads."""
    head_width: int = 64
    """Width of one attention head."""
    ffn_width: int = 704
    """Inner width of the gated feed-forward block."""
    layers: int = 20
    """Layers of the finished model."""
    seed: int = 0
    """Seed of initialisation, data order and layer dropout."""

    stages: tuple[tuple[int, int, int, int], ...] = (
        (0, 8, 256, 8192),
        (16_000_000, 20, 256, 8192),
        (22_000_000, 20, 512, 8192),
    )
    """(tokens seen, layers in use, sequence length, tokens a step): each stage holds from that many tokens on."""
    exits: tuple[int, ...] = (2, 3, 3, 4, 4, 5, 5, 5, 6, 8, 10, 14)
    """Exit layers drawn from, one a step; repeated ones are drawn more often. Empty: no exit losses (the twin)."""
    exit_weight: float = 0.3
    """Weight of the exit's next-token loss."""
    distil_weight: float = 1.0
    """Weight of the divergence of the exit from the last layer."""
    distil_from: int = 4_000_000
    """Tokens after which distillation starts; from the first step on it can collapse."""
    exit_share: float = 0.5
    """Share of a step's sequences on which the exit losses are computed."""
    layer_dropout: float = 0.1
    """Probability of dropping the last layer; rises linearly from 0 at the third."""
    lr: float = 3e-3
    """Muon learning rate of the layers' matrices; 0 leaves them to AdamW as well."""
    adam_lr: float = 2e-3
    """AdamW learning rate of everything else."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the layers' matrices."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    average: float = 0.998
    """Decay of the running average of the weights, which is evaluated beside them."""

    hours: float = 1.0
    """Hours of training time to add in this run; pauses of the process do not count."""
    stop_tokens: int = 0
    """Stop after this many tokens in all; 0: no such limit."""
    decay_tokens: int = 0
    """Start the final decay now and let it last this many tokens; the run ends with it. 0: constant rate."""
    resume: Path | None = None
    """Checkpoint to start from instead of the newest one in out."""
    checkpoint_minutes: float = 5.0
    """Minutes of training time between checkpoints."""
    validation_blocks: int = 16
    """Blocks of validation text read at each checkpoint."""
    threads: int = 2
    """Threads of the tensor library."""


def norm(h: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm in float32, result in bfloat16."""
    return (weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))).bfloat16()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position encoding as the Llama model has it."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@torch.compile(dynamic=False)
def run_layer(h: Tensor, weights: tuple[Tensor, ...], cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    """One Llama layer: float32 residual stream, bfloat16 products; h: (batch, length, width)."""
    norm1, q, k, v, o, norm2, gate, up, down = weights
    batch, length, _ = h.shape
    width = cos.shape[-1]
    qkv = norm(h, norm1) @ torch.cat((q, k, v)).bfloat16().t()
    qs, ks, vs = qkv.view(batch, length, 3, -1, width).permute(2, 0, 3, 1, 4)
    # Written out: on CPUs the fused attention's backward pass is slower than these products at such short lengths.
    scores = (rotate(qs, cos, sin) * width**-0.5) @ rotate(ks, cos, sin).transpose(-1, -2) + mask
    mixed = (scores.softmax(-1) @ vs).transpose(1, 2).reshape(batch, length, -1)
    h = h + mixed @ o.bfloat16().t()
    g, u = (norm(h, norm2) @ torch.cat((gate, up)).bfloat16().t()).chunk(2, -1)
    return h + (F.silu(g) * u) @ down.bfloat16().t()


@torch.compile(dynamic=False)
def last_loss(h: Tensor, target: Tensor, weight: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Summed next-token loss and log-probabilities of the last layer; h: (tokens, width)."""
    log_p = (norm(h, weight) @ head.bfloat16().t()).float().log_softmax(-1)
    return F.nll_loss(log_p, target, reduction="sum"), log_p.detach().bfloat16()


@torch.compile(dynamic=False)
def exit_loss(
    h: Tensor, target: Tensor, weight: Tensor, head: Tensor, teacher: Tensor, mix: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted exit loss, its next-token part and the count of agreements with the last layer, all summed."""
    log_p = (norm(h, weight) @ head.bfloat16().t()).float().log_softmax(-1)
    token, log_t = F.nll_loss(log_p, target, reduction="sum"), teacher.float()
    divergence = (log_t.exp() * (log_t - log_p)).sum()
    agree = (log_p.detach().argmax(-1) == log_t.argmax(-1)).sum()
    return mix[0] * token + mix[1] * divergence, token.detach(), agree


class Trainer:
    """The model, its optimisers and the state of a run."""

    def __init__(self, config: TrainConfig) -> None:
        """Makes a new model as the configuration says."""
        self.config = config
        torch.manual_seed(config.seed)
        random.seed(config.seed)
        shape = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.ffn_width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            head_dim=config.head_width,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
        self.model = LlamaForCausalLM(shape)
        for i, layer in enumerate(self.model.model.layers):
            for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                # Layers that join later start as identities, so that joining changes nothing.
                matrix.data.mul_((2 * config.layers) ** -0.5 if i < config.stages[0][1] else 0.0)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        matrices = [p for p in self.model.model.layers.parameters() if p.dim() == 2]
        rest = [p for n, p in self.model.named_parameters() if p.dim() == 1 or "embed" in n]
        self.adam = torch.optim.AdamW(rest, lr=config.adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        decay = config.weight_decay
        self.muon: torch.optim.Optimizer = torch.optim.AdamW(
            matrices, betas=(0.9, 0.98), weight_decay=decay, fused=True
        )
        if config.lr:
            self.muon = torch.optim.Muon(matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        self.steps, self.tokens, self.elapsed, self.decay_start, self.decay_tokens = 0, 0, 0.0, -1, 0
        self.rope: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def save(self, path: Path) -> None:
        """Writes the checkpoint in one piece: a crash leaves the former one."""
        state: dict[str, Any] = {part: getattr(self, part).state_dict() for part in PARTS} | self.progress()
        state |= {"torch_random": torch.get_rng_state(), "python_random": random.getstate()}
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)

    def load(self, path: Path) -> None:
        """Restores everything that ``save`` wrote; the learning rates come from the configuration."""
        state: dict[str, Any] = torch.load(path, weights_only=False)
        for part in PARTS:
            getattr(self, part).load_state_dict(state[part])
        torch.set_rng_state(state["torch_random"])
        random.setstate(state["python_random"])
        for counter in COUNTERS:
            setattr(self, counter, state[counter])

    def progress(self) -> dict[str, Any]:
        """Returns the counters and the configuration, ready for JSON."""
        settings = json.loads(json.dumps(dataclasses.asdict(self.config), default=str))
        return {counter: getattr(self, counter) for counter in COUNTERS} | {"config": settings}

    def stage(self) -> tuple[int, int, int]:
        """Returns the layers in use, the sequence length and the tokens a step now."""
        return [s[1:] for s in self.config.stages if s[0] <= self.tokens][-1]

    def tables(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotary cosines and sines and the causal mask for a length, in bfloat16."""
        if length not in self.rope:
            cos, sin = self.model.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
            mask = torch.full((length, length), -1e4).triu(1)
            self.rope[length] = (cos[0].bfloat16(), sin[0].bfloat16(), mask.bfloat16())
        return self.rope[length]

    def states(self, model: LlamaForCausalLM, ids: Tensor, depth: int, dropout: float) -> list[Tensor]:
        """Returns the hidden state after every layer in use; ids: (batch, length)."""
        h, tables, states = model.model.embed_tokens(ids), self.tables(ids.shape[1]), []
        for i, layer in enumerate(model.model.layers[:depth]):
            if not (i > 2 and random.random() < dropout * (i - 2) / (self.config.layers - 3)):
                at, mlp = layer.self_attn, layer.mlp
                attend = (layer.input_layernorm, at.q_proj, at.k_proj, at.v_proj, at.o_proj)
                feed = (layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
                h = run_layer(h, tuple(m.weight for m in (*attend, *feed)), *tables)
            states.append(h)
        return states

    def step(self, ids: Tensor, target: Tensor) -> dict[str, float]:
        """One update; ids, target: (batch, length)."""
        config = self.config
        depth, _, _ = self.stage()
        states = self.states(self.model, ids, depth, config.layer_dropout)
        choices = [e for e in config.exits if e < depth]
        exit_at = random.choice(choices) if choices else 0
        # The heads run piece by piece on cut-off states, so that the logits of the whole step never exist at once.
        last = states[-1].detach().requires_grad_()
        early = states[exit_at - 1].detach().requires_grad_() if exit_at else last
        weight, head = self.model.model.norm.weight, self.model.lm_head.weight
        mix = torch.tensor([config.exit_weight, config.distil_weight * (self.tokens >= config.distil_from)])
        rows, piece = len(ids), max(1, 1024 // ids.shape[1])
        exit_rows = round(rows * config.exit_share / piece) * piece
        exit_tokens = exit_rows * ids.shape[1]
        total, early_total, agree = 0.0, 0.0, 0.0
        for r in range(0, rows, piece):
            part = target[r : r + piece].reshape(-1)
            loss, teacher = last_loss(last[r : r + piece].flatten(0, 1), part, weight, head)
            objective = loss / target.numel()
            if exit_at and r < exit_rows:
                weighted, token, same = exit_loss(early[r : r + piece].flatten(0, 1), part, weight, head, teacher, mix)
                objective = objective + weighted / exit_tokens
                early_total, agree = early_total + token.item(), agree + same.item()
            torch.autograd.backward(objective)
            total += loss.item()
        ends = (states[-1], states[exit_at - 1]) if exit_at else states[-1:]
        torch.autograd.backward(ends, [piece.grad for piece in (last, early)[: len(ends)]])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = min(1.0, (self.steps + 1) / config.warmup_steps)
        if self.decay_start >= 0:
            factor = max(0.02, 1 - (self.tokens - self.decay_start) / self.decay_tokens)
        for optimiser, rate in ((self.adam, config.adam_lr), (self.muon, config.lr or config.adam_lr)):
            optimiser.param_groups[0]["lr"] = rate * factor
            optimiser.step()
            optimiser.zero_grad()
        with torch.no_grad():
            decay = min(config.average, (self.steps + 1) / (self.steps + 10))
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - decay)
        self.steps, self.tokens = self.steps + 1, self.tokens + target.numel()
        figures = {"loss/last": total / target.numel(), "schedule/rate": factor, "schedule/layers": float(depth)}
        if exit_at:
            figures[f"exit_loss/{exit_at:02d}"] = early_total / exit_tokens
            figures[f"exit_agreement/{exit_at:02d}"] = agree / exit_tokens
        return figures

    @torch.no_grad()
    def validate(self, model: LlamaForCausalLM, tokens: NDArray[np.uint16], with_exits: bool) -> dict[str, float]:
        """Loss and agreement of the exits with the last layer on validation text, at the length trained now."""
        depth, length, _ = self.stage()
        exits = sorted({e for e in self.config.exits if e < depth and with_exits})
        weight, head = model.model.norm.weight, model.lm_head.weight.bfloat16().t()
        total, same, rows = 0.0, dict.fromkeys(exits, 0.0), max(1, 4096 // length)
        pieces = torch.split(blocks(tokens, np.arange(self.config.validation_blocks), length), rows, 1)
        for ids, target in pieces:
            states = self.states(model, ids, depth, 0.0)
            final = norm(states[-1], weight) @ head
            total += F.cross_entropy(final.flatten(0, 1).float(), target.flatten(), reduction="sum").item()
            for e in exits:
                same[e] += ((norm(states[e - 1], weight) @ head).argmax(-1) == final.argmax(-1)).sum().item()
        count = sum(p[0].numel() for p in pieces)
        return {"loss": total / count} | {f"agreement_{e:02d}": same[e] / count for e in exits}

    def export(self, folder: Path, averaged: bool) -> None:
        """Writes the bfloat16 model with its tokenizer; the former folder stays whole until the new one is."""
        fresh = folder.with_suffix(".tmp")
        shutil.rmtree(fresh, ignore_errors=True)
        copy.deepcopy(self.average if averaged else self.model).bfloat16().save_pretrained(fresh)
        for file in (self.config.corpus / "tokenizer").iterdir():
            shutil.copy(file, fresh)
        about = self.progress() | {"averaged": averaged}
        for folder_of_this_run in ("out", "corpus", "resume"):
            about["config"].pop(folder_of_this_run)
        (fresh / "training.json").write_text(json.dumps(about, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)


def batches(tokens: NDArray[np.uint16], trainer: Trainer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches in an order that follows from the seed and the tokens seen alone."""
    count = (len(tokens) - 1) // BLOCK
    epoch, order = -1, np.zeros(0, np.int64)
    while True:
        number, at = divmod(trainer.tokens // BLOCK, count)
        if number != epoch:
            epoch, order = number, np.random.default_rng((trainer.config.seed, number)).permutation(count)
        _, length, step_tokens = trainer.stage()
        # Around the end, so that a step is never short.
        ids, target = blocks(tokens, order.take(range(at, at + step_tokens // BLOCK), mode="wrap"), length)
        yield ids, target


def checkpoint(trainer: Trainer, validation: NDArray[np.uint16], writer: SummaryWriter) -> None:
    """Validates, writes checkpoint and model, and keeps the two newest checkpoints."""
    out, results = trainer.config.out, {}
    for name, model in (("weights", trainer.model), ("average", trainer.average)):
        results[name] = trainer.validate(model, validation, name == "average")
        for key, value in results[name].items():
            writer.add_scalar(f"validation_{name}/{key}", value, trainer.tokens)
    trainer.save(out / f"checkpoint-{trainer.steps:07d}.pt")
    for old in sorted(out.glob("checkpoint-*.pt"))[:-2]:
        old.unlink()
    trainer.export(out / "model", results["average"]["loss"] < results["weights"]["loss"])
    shown = " ".join(f"{k} {v:.3f}" for k, v in results["average"].items())
    when = f"checkpoint {trainer.steps}: {trainer.tokens / 1e6:.2f} M tokens, {trainer.elapsed / 3600:.2f} h"
    print(f"{when}, weights loss {results['weights']['loss']:.3f}; average {shown}", flush=True)


def train(config: TrainConfig) -> None:
    """Trains for the configured time, tokens or decay, from the newest checkpoint if there is one."""
    torch.set_num_threads(config.threads)
    config.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config)
    found = config.resume or max(config.out.glob("checkpoint-*.pt"), default=None)
    if found:
        trainer.load(found)
        print(f"resumed {found}: step {trainer.steps}, {trainer.tokens / 1e6:.2f} M tokens", flush=True)
    if config.decay_tokens and trainer.decay_start < 0:
        trainer.save(config.out / "before-decay.pt")
        trainer.decay_start, trainer.decay_tokens = trainer.tokens, config.decay_tokens
    tokens, validation = (np.load(config.corpus / f"{s}.npy", mmap_mode="r") for s in ("train", "validation"))
    writer, stop = SummaryWriter(str(config.out / "logs"), purge_step=trainer.tokens + 1), False

    def ask_to_stop(*_: object) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    recent: list[float] = []
    begun, saved, losses = trainer.elapsed, trainer.elapsed, 0.0
    for ids, target in batches(tokens, trainer):
        start = time.monotonic()
        figures = trainer.step(ids, target)
        seconds = time.monotonic() - start
        typical = statistics.median(recent) if recent else seconds
        # A step that takes many times the usual was stopped from outside: count it as a usual one.
        seconds = seconds if seconds < 5 * typical else typical
        recent = [*recent[-49:], seconds]
        trainer.elapsed += seconds
        losses = figures["loss/last"] if losses == 0 else 0.95 * losses + 0.05 * figures["loss/last"]
        for key, value in figures.items():
            writer.add_scalar(key, value, trainer.tokens)
        if trainer.steps % (50 if trainer.steps > 200 else 10) == 0:
            speed = target.numel() / statistics.mean(recent)
            writer.add_scalar("schedule/tokens_per_second", speed, trainer.tokens)
            seen = f"{trainer.tokens / 1e6:.2f} M tokens"
            print(f"step {trainer.steps} {seen} loss {losses:.3f} {speed:.0f} tokens/s", flush=True)
        decayed = trainer.decay_start >= 0 and trainer.tokens >= trainer.decay_start + trainer.decay_tokens
        ended = trainer.elapsed - begun >= config.hours * 3600 or 0 < config.stop_tokens <= trainer.tokens
        if stop or decayed or ended or trainer.elapsed - saved >= config.checkpoint_minutes * 60:
            saved = trainer.elapsed
            checkpoint(trainer, validation, writer)
            if stop or decayed or ended:
                break
    writer.close()


if __name__ == "__main__":
    train(tyro.cli(TrainConfig, description=__doc__))
