"""What identifies a base model, so that a policy made for one model is not run on another.

A hash of the weights would differ between dtypes of the same checkpoint. A fingerprint holds the architecture, a hash
of the tokenizer, and a few logits of a fixed input, which are compared with a tolerance that fits the dtypes.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lede.models import EarlyExitModel

N_PROBE_TOKENS = 8
N_PROBE_LOGITS = 64

TOLERANCES = {"float64": 0.005, "float32": 0.005, "float16": 0.03, "bfloat16": 0.1}
"""Largest distance of two probes, root mean square over the spread of the recorded logits; the coarser dtype decides.

float32 leaves room for TF32 and other kernels, far less than training on does to the logits.
"""

_ARCHITECTURE = ("model_type", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")


def fingerprint(model: EarlyExitModel) -> dict[str, Any]:
    """The fingerprint of a model, in types that JSON keeps.

    Returns:
        name: what the model was loaded from; for messages only, never compared.
        architecture: n_layers and the fields of the config that shape the weights.
        tokenizer: sha256 over vocabulary and merges; None without a tokenizer.
        logits: 64 raw logits after all layers, spread over the positions and the vocabulary of a fixed 8-token input.
        dtype: of the hidden states, e.g. "float32".

    Raises:
        ValueError: The model gives logits that are not finite.
    """
    architecture = {name: getattr(model.config, name, None) for name in _ARCHITECTURE}
    logits = _probe(model)
    if not all(math.isfinite(value) for value in logits):
        raise ValueError(f"model '{model.name}' gives logits that are not finite; check its weights and dtype")
    return {
        "name": model.name,
        "architecture": {"n_layers": model.n_layers, **architecture},
        "tokenizer": None if model.tokenizer is None else hash_tokenizer(model.tokenizer),
        "logits": logits,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def compare_fingerprints(recorded: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """How two fingerprints differ, a phrase for each difference; empty when they are of one model.

    Tokenizers are compared when both sides have one: a model used with token ids alone may come without.
    """
    differences = [
        f"{name} {was} and {found['architecture'].get(name)}"
        for name, was in recorded["architecture"].items()
        if was != found["architecture"].get(name)
    ]
    hashes = recorded["tokenizer"], found["tokenizer"]
    if None not in hashes and hashes[0] != hashes[1]:
        differences.append(f"tokenizer {hashes[0][:12]} and {hashes[1][:12]}")
    if not differences:
        distance = _distance(recorded["logits"], found["logits"])
        tolerance = max(TOLERANCES.get(side["dtype"], TOLERANCES["bfloat16"]) for side in (recorded, found))
        if not distance <= tolerance:
            dtypes = f"{recorded['dtype']} and {found['dtype']}"
            differences.append(f"logits {distance:.2g} of their spread apart, {tolerance} allowed for {dtypes}")
    return differences


def hash_tokenizer(tokenizer: Any) -> str:
    """Sha256 over the sorted vocabulary and, where the tokenizer tells them, the merges, in hexadecimal."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{index} {token!r}\n".encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    merges = json.loads(backend.to_str())["model"].get("merges") if backend is not None else None
    for merge in merges or ():
        # written "a b" by older versions of the tokenizers package, ["a", "b"] by newer ones
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        digest.update(f"{left!r} {right!r}\n".encode())
    return digest.hexdigest()


def _probe(model: EarlyExitModel) -> list[float]:
    ids = [(i + 1) * model.vocab_size // (N_PROBE_TOKENS + 1) for i in range(N_PROBE_TOKENS)]
    with torch.no_grad():
        block = model.block(model.new_cache(N_PROBE_TOKENS), 0, N_PROBE_TOKENS)
        hidden = model.embed(torch.tensor([ids], device=model.device), block)
        logits = model.head(model.run_layers(hidden, 0, model.n_layers, block))
    flat = logits[0].reshape(-1)
    picks = [(2 * i + 1) * flat.numel() // (2 * N_PROBE_LOGITS) for i in range(N_PROBE_LOGITS)]
    return [float(value) for value in flat[picks].double().cpu()]


def _distance(recorded: list[float], found: list[float]) -> float:
    if len(recorded) != len(found) or not recorded:
        return math.inf
    mean = math.fsum(recorded) / len(recorded)
    spread = math.fsum((a - mean) ** 2 for a in recorded)
    error = math.fsum((a - b) ** 2 for a, b in zip(recorded, found, strict=True))
    return math.sqrt(error / spread) if spread > 0 else (0.0 if error == 0 else math.inf)
