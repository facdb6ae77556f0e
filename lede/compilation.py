"""Compiling a model's layers, with a trial that says whether it worked."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING

import torch

from lede.cache import KVCache
from lede.closeness import TOLERANCE, distance, reading_distance
from lede.compiled_layers import SLOT_BUCKET, CompiledLayers
from lede.kernels import Kernels, kernels_of, reading_row
from lede.logit_reading import LogitReading

if TYPE_CHECKING:
    from lede.models import EarlyExitModel

PROMPT, CAPACITY = 5, 128
"""Tokens of the trial, and slots of its cache."""


def compile_layers(model: EarlyExitModel, ahead: bool = True) -> bool:
    """Compile the layers of a model, and check them against eager ones on a short text.

    Takes seconds, or a fraction of one where all kernels were compiled ahead of time (`lede compile`). Where it does
    not work, for want of a C++ compiler or because a family can't be compiled, the model runs eagerly as before, and a
    warning says why.

    Args:
        model: The model.
        ahead: Whether kernels that were compiled ahead of time are used where there are any.

    Returns:
        Whether the layers are compiled.
    """
    started = time.perf_counter()
    model.compiled = compiled = None
    reason = "accelerate's hooks move them or their input between devices" if model.places is not None else ""
    kernels = kernels_of(model) if ahead and not _stand_still(model) else None
    if kernels is not None and not reason:
        reason, compiled = _tried(model, kernels)
        if reason:
            warnings.warn(f"kernels that were compiled ahead are not used: {reason}", stacklevel=2)
            reason, compiled = "", None
    if compiled is None and not reason:
        reason, compiled = _tried(model, None)
    if reason:
        warnings.warn(f"the layers could not be compiled and run eagerly: {reason}", stacklevel=2)
        return False
    if compiled is not None and compiled.kernels is not None:
        compiled.kernels.are_tried = True
        if misfits := compiled.kernels.misfits():
            warnings.warn(
                f"kernels that were compiled ahead for this model don't fit here: {misfits}; what they would run is "
                "compiled anew each time a model is loaded, until `lede compile` is run again",
                stacklevel=2,
            )
    model.compiled = compiled
    model.compile_seconds = time.perf_counter() - started
    return True


def _tried(model: EarlyExitModel, kernels: Kernels | None) -> tuple[str, CompiledLayers | None]:
    """Compiled layers that do what eager ones do, or else why there are none."""
    try:
        compiled = CompiledLayers(model.tables, model.cache_argument, model.readout, _stand_still(model), kernels)
        apart = _trial(model, compiled)
    except Exception as error:  # whatever inductor, its C++ compiler or a CUDA graph may raise: eager runs go on
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}", None
    if apart > TOLERANCE.get(model.dtype, 0.0):
        return f"states differ by {apart:.1e} of the largest", None
    return "", compiled


def _stand_still(model: EarlyExitModel) -> bool:
    """Whether addresses and shapes must stand still: for CUDA graphs."""
    return model.device.type == "cuda"


@torch.inference_mode()
def _trial(model: EarlyExitModel, compiled: CompiledLayers) -> float:
    """How far compiled layers are from eager ones at most, given the same states, behind a prompt and rejections."""
    # more slots than attention looks at: else torch takes the two for one number, and compiles again for a longer cache
    capacity = CAPACITY + (SLOT_BUCKET if compiled.fixed else 0)
    watched, other = (KVCache(model.n_layers, capacity, 1, model.windows, *compiled.making) for _ in range(2))
    length, apart = 0, 0.0
    # twice: what differs from call to call is left open then
    for n_tokens in (PROMPT, *compiled.buckets, *compiled.buckets):
        ids = torch.arange(length, length + n_tokens, device=model.device)[None] % model.vocab_size
        block, mine = model.block(watched, length, n_tokens), model.block(other, length, n_tokens)
        hidden = model.embed(ids, block)
        for i in range(model.n_layers):
            step = model.steps[i : i + 1]
            found = compiled.run(hidden, step, mine) if length else model.run_eagerly(hidden, step, mine)
            hidden = model.run_eagerly(hidden, step, block)
            apart = max(apart, distance(found, hidden))
        if length:
            logits = model.readout(hidden)
            apart = max(apart, distance(compiled.read(hidden), logits))
            read = None if compiled.kernels is None else compiled.kernels.reading(logits[0, -1])
            if read is not None:
                apart = max(apart, reading_distance(torch.tensor(read), LogitReading()(reading_row(logits[0, -1]))))
        length += max(1, n_tokens - 1)
        for cache in (watched, other):
            cache.rewind(length)
    return apart
