"""Llamas of any shape whose greedy text, margins and early-exit agreement are planted: no weights to download.

The rest of the weights are random, so a pass costs what it costs in a trained model of that shape. What they add to the
hidden state is made small; the text is written by a code in it, whose blocks hold vectors of random signs:

* The vocabulary is a ring of places. The `visible` block, the only one that the head reads, says "one place on".
* The layer at `exit_layer` attends to the token before. Where its first bit is set, the MLP makes that "two places on".
* The layer at `flip_layer` attends to the token two before. Where its second bit is set, the MLP makes of hard tokens
  "three places on", so that every head read before that layer was wrong.

So the text never turns back before it has gone round the ring, it depends on the keys and values of earlier tokens in a
shallow and in a deep layer, and from `exit_layer` on a head read agrees with the last layer at the planted rate; before
it, at half of that. Hard tokens have the fainter visible code, so they look less certain, as they should to a policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

BIT, CONTEXT, CONSTANT = 4.0, 4.0, 4.0
"""Magnitudes of the entries beside the code: a token's bits, what attention makes of an earlier one's, and a one."""
SURE, UNSURE = (0.7, 1.0), (0.4, 0.75)
"""Amplitudes of the visible code of easy and of hard tokens."""
FLIP = 2.0
"""Amplitude of the code that overrules the visible one."""
LATE_BIT = 0.8
"""Share of tokens with the second bit: a hard token is a wrong draft that often."""
NOISE_SHARE = 0.02
"""What all random weights together add to an entry of the hidden state, against one of the code."""
ATTENTION_GAP = 24.0
"""How far the planted attention score of the wanted token is above that of any other."""
REACH = 1024
"""Tokens back over which that holds."""
GATE = 12.0
"""What a planted gate gives where it is open."""


@dataclass(frozen=True)
class Plan:
    """What to plant."""

    exit_layer: int
    """Layers after which a head read agrees at the planted rate."""
    flip_layer: int
    """The layer, counted from 1, that overrules it; deeper than `exit_layer`."""
    agreement: float = 0.85
    """Share of tokens at which they agree, 0.2 to 1."""
    seed: int = 0
    """Seed of all weights."""

    def check(self, config: LlamaConfig) -> None:
        """Raise ValueError unless the plan fits a model of this shape."""
        depth, width = config.num_hidden_layers, config.hidden_size
        if not 1 <= self.exit_layer < self.flip_layer <= depth:
            raise ValueError(
                f"exit_layer {self.exit_layer} and flip_layer {self.flip_layer} must be ascending within 1..{depth}"
            )
        if not 1 - LATE_BIT <= self.agreement <= 1:
            raise ValueError(f"agreement must be within {1 - LATE_BIT:.1f}..1, got {self.agreement}")
        if config.tie_word_embeddings:
            raise ValueError("the head must be apart from the embedding; set tie_word_embeddings=False")
        if width < 128 or config.intermediate_size < _code_width(width):
            raise ValueError(
                f"hidden_size must be at least 128 and intermediate_size at least a third of it, got {width} and "
                f"{config.intermediate_size}"
            )


def planted_llama(
    config: LlamaConfig, plan: Plan, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """A transformers Llama of the given shape with a planted text, in evaluation mode.

    Raises:
        ValueError: The plan doesn't fit, or the shape's rotary table can't tell neighbouring tokens apart.
    """
    plan.check(config)
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(plan.seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        _Planter(model, plan).plant()
    return model.eval().requires_grad_(False)


def _code_width(hidden_size: int) -> int:
    """Entries of each of the three blocks; six more hold bits, what attention found, a one and a filler."""
    return (hidden_size - 6) // 3


class _Planter:
    """Writes the code into a random model. Codes are drawn in float32 whatever the dtype, so that all dtypes agree."""

    def __init__(self, model: Any, plan: Plan) -> None:
        self.model, self.plan = model, plan
        config = model.config
        self.width = width = config.hidden_size
        self.code = code = _code_width(width)
        self.visible, self.early, self.late = (slice(i * code, (i + 1) * code) for i in range(3))
        # their places; which of the bits and contexts is meant is added
        self.bits, self.contexts, self.one, self.filler = 3 * code, 3 * code + 2, 3 * code + 4, width - 1

    def plant(self) -> None:
        """Change the model's weights in place."""
        layers, plan = self.model.model.layers, self.plan
        for layer in layers:
            scale = NOISE_SHARE / math.sqrt(2 * len(layers))
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
        norm = self._tokens()
        for number, depth, block, gain in (
            (0, plan.exit_layer, self.early, 2.0),
            (1, plan.flip_layer, self.late, 2 * FLIP),
        ):
            layer = layers[depth - 1]
            scale = math.sqrt((norm**2 + number * CONTEXT**2) / self.width)
            self._attend(layer.self_attn, number, scale)
            scale = math.sqrt((norm**2 + (number + 1) * CONTEXT**2) / self.width)
            self._overwrite(layer.mlp, number, block, gain, scale)

    def _tokens(self) -> float:
        """Write embedding and head; returns the norm that all embeddings have."""
        head, embedding = self.model.lm_head.weight, self.model.model.embed_tokens.weight
        size = head.shape[0]
        draw = torch.Generator().manual_seed(self.plan.seed)  # on the CPU, for the same text on every device
        signs = (torch.randint(2, (size, self.code), generator=draw) * 2.0 - 1).to(head.device)
        ring = torch.randperm(size, generator=draw).to(head.device)
        hard_share = (1 - self.plan.agreement) / LATE_BIT
        hard, first, second = (
            (torch.rand(size, generator=draw) < share).to(head.device) for share in (hard_share, 0.5, LATE_BIT)
        )
        sure, unsure = (low + (high - low) * torch.rand(size, generator=draw) for low, high in (SURE, UNSURE))
        amplitude = torch.where(hard, unsure.to(head.device), sure.to(head.device))[:, None]
        one, two, three = (signs.roll(-step, 0) for step in (1, 2, 3))
        rows = torch.zeros(size, self.width, device=head.device)
        rows[:, self.visible] = amplitude * one
        rows[:, self.early] = amplitude * (two - one) / 2
        rows[:, self.late] = hard[:, None] * three / 2
        for place, bit in enumerate((first, second)):
            rows[:, self.bits + place] = BIT * (bit * 2.0 - 1)
        rows[:, self.one] = CONSTANT
        squares = rows.square().sum(-1)
        rows[:, self.filler] = (squares.max() - squares).sqrt()
        norm = float(squares.max().sqrt())
        embedding[ring] = rows.to(embedding.dtype)
        # an amplitude of 1 gives a logit of twice what it takes to stand out among the vocabulary
        logit = 2.1 * math.log(size) / self.code * math.sqrt((norm**2 + 2 * CONTEXT**2) / self.width)
        head.zero_()
        head[ring, : self.code] = (logit * signs).to(head.dtype)
        return norm

    def _attend(self, attention: Any, number: int, scale: float) -> None:
        """Make the first head look `number + 1` tokens back and report that token's bit; `scale` divides its input."""
        config, back = self.model.config, number + 1
        head = attention.head_dim
        pairs, gap = _pairs(self.model.model.rotary_emb.inv_freq.double().cpu(), back)
        size = (ATTENTION_GAP / gap * math.sqrt(head) / pairs) ** 0.5 * scale / CONSTANT
        angles = back * self.model.model.rotary_emb.inv_freq[:pairs].double()
        query, key = attention.q_proj.weight[:head], attention.k_proj.weight[:head]
        for weight, first, second in (
            (query, torch.ones_like(angles), torch.zeros_like(angles)),
            (key, angles.cos(), angles.sin()),
        ):
            weight.zero_()
            weight[:pairs, self.one] = (size * first).to(weight.dtype)
            weight[head // 2 : head // 2 + pairs, self.one] = (size * second).to(weight.dtype)
        value, out = attention.v_proj.weight, attention.o_proj.weight
        value[0].zero_()
        value[0, self.bits + number] = scale
        out[:, :head].zero_()
        out[self.contexts + number, : config.num_attention_heads * head].zero_()
        out[self.contexts + number, 0] = CONTEXT / BIT

    def _overwrite(self, mlp: Any, number: int, block: slice, gain: float, scale: float) -> None:
        """Make the first neurons add `gain` times a block to the visible one where the context entry is positive."""
        gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
        neurons = torch.arange(self.code, device=gate.device)
        gate[: self.code].zero_()
        gate[: self.code, self.contexts + number] = GATE * scale / CONTEXT
        up[: self.code].zero_()
        up[neurons, block.start + neurons] = 1.0
        down[:, : self.code].zero_()
        down[neurons, neurons] = gain * scale / GATE  # silu(GATE) is GATE up to 1e-4


def _pairs(frequencies: torch.Tensor, back: int) -> tuple[int, float]:
    """How many of the fastest rotary pairs tell `back` tokens back from other distances best, and by how much.

    Raises:
        ValueError: None do.
    """
    away = torch.arange(-back, REACH, dtype=torch.float64)
    cosines = (away[away != 0][:, None] * frequencies).cos().cumsum(1)
    gaps = 1 - (cosines / torch.arange(1, len(frequencies) + 1)).amax(0)
    best = int(gaps.argmax())
    if gaps[best] < 0.02:
        raise ValueError(
            f"the rotary table of {2 * len(frequencies)} entries a head tells no distance apart; give wider heads"
        )
    return best + 1, float(gaps[best])
