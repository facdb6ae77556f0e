"""The one place where d3rlpy is imported for the first time."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch


def import_d3rlpy() -> ModuleType:
    """Import d3rlpy without its side effects; later `import d3rlpy` statements are free of them.

    d3rlpy imports gym, which prints a notice about its age, and on a CUDA machine it allows TF32 in float32 products
    and turns compiled autograd on for the whole process. Decoding compares float32 logits exactly, so both are put
    back.

    Raises:
        ImportError: d3rlpy is not installed.
    """
    has_cuda = torch.cuda.is_available()
    precision = torch.get_float32_matmul_precision()
    if has_cuda:
        dynamo: Any = importlib.import_module("torch._dynamo.config")
        compiled_autograd = dynamo.compiled_autograd
    try:
        notices = importlib.import_module("gym_notices.notices").notices
    except ModuleNotFoundError:
        notices = {}  # no gym, or one that keeps its notices elsewhere
    kept = dict(notices)
    notices.clear()
    try:
        d3rlpy = importlib.import_module("d3rlpy")
    except ModuleNotFoundError as error:
        message = f"training needs d3rlpy, and {error.name} is missing: pip install 'lede-rl[train]'"
        raise ImportError(message, name=error.name) from error
    finally:
        notices.update(kept)
        if has_cuda:
            torch.set_float32_matmul_precision(precision)
            dynamo.compiled_autograd = compiled_autograd
    return d3rlpy
