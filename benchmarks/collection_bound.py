"""What arithmetic leaves of a teacher's speed: the products that a token takes, and how fast the machine multiplies."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lede.models import EarlyExitModel
from lede.onednn import is_packable, onednn_linear, packed

SIDE = 1024
"""Rows and columns of the matrices that are multiplied."""
TRIES = 5


def multiply_adds(model: EarlyExitModel) -> int:
    """Multiply-adds of a token that passes every layer and is read by the head behind each.

    Linear layers alone are counted, each once; attention's own products, norms and all statistics come on top. Of a
    mixture of experts every expert is counted.
    """
    layers = [module for _, layer in model.steps for module in layer.modules()]
    products = sum(module.weight.numel() for module in layers if isinstance(module, nn.Linear | Conv1D))
    head = model.readout.head
    assert isinstance(head.weight, torch.Tensor)
    return products + model.n_layers * head.weight.numel()


@torch.inference_mode()
def multiply_adds_a_second(model: EarlyExitModel) -> float:
    """The most multiply-adds a second that products of large matrices reach in the model's dtype on its device.

    On the CPU by MKL or by oneDNN with a packed weight, whichever is faster; the best of several tries.
    """
    rows = torch.randn(SIDE, SIDE, device=model.device).to(model.dtype)
    weight = torch.randn(SIDE, SIDE, device=model.device).to(model.dtype)
    ways: list[Callable[[], torch.Tensor]] = [lambda: rows @ weight]
    if is_packable(weight):
        copy = packed(weight)
        ways.append(lambda: onednn_linear(rows, copy, None))
    return SIDE**3 / min(_seconds(way, model.device) for way in ways for _ in range(TRIES))


def _seconds(way: Callable[[], torch.Tensor], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def steps_for_every_outcome(n_candidates: int) -> int:
    """Steps of the environment that show both outcomes of every decision of one token.

    One episode that leaves at each candidate, and one that never leaves: what came before is gone through each time.
    """
    return n_candidates * (n_candidates + 1) // 2 + n_candidates
