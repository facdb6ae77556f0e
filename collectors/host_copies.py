"""The ways between host and device that a collection takes: few, and whole tables at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lede.devices import sent


def send(values: Sequence[Any] | npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Values as a tensor on the device; a GPU is not waited for, which takes page-locked memory."""
    return sent(torch.from_numpy(np.ascontiguousarray(values)), device)


def fetch(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor on the host, in one copy, through page-locked memory from a GPU; waits for what computes it."""
    if tensor.device.type != "cuda":
        found: npt.NDArray[Any] = tensor.cpu().numpy()
        return found
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host.numpy()
