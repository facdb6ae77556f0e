"""`lede export`: the network of a policy as ONNX, for servers and languages that lede does not reach.

The file takes raw observations `(batch, feature)` in float32, any batch, normalisation included; its metadata names the
features in order, the candidates, the settings and what the output is. Before it is written it is held to the policy
on observations drawn at random, one at a time and seven at a time.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lede.policies import Policy
    from lede.policy_network import PolicyNetwork

OPSET = 18
"""Version of the ONNX operators: what torch's exporter writes without a conversion."""

INPUT = "observations"
"""What the input is called."""

N_CHECKED = 1000
"""Observations that the exported network is held to the policy on."""

BATCHES = (1, 7)
"""How many of them at a time."""

_VOCAB_SIZE = 32_000  # bounds the drawn entropy where the policy is bound to no model


@dataclass(frozen=True)
class ExportConfig:
    """Settings of an export."""

    policy: str
    """Folder of a learned or survival policy."""
    onnx: Path
    """The file to write; replaced whole."""


def export(config: ExportConfig) -> Path:
    """Write the network of a policy, and say so.

    Returns:
        The file.

    Raises:
        ImportError: A package of the extra `onnx` is not installed.
        ValueError: The policy can't be loaded or has no network, or the file can't be written; nothing is written then.
    """
    from lede.atomic import write_atomically
    from lede.policies import parse_policy
    from lede.policy_network import policy_network

    if config.onnx.is_dir():
        raise ValueError(f"{config.onnx} is a folder; give a file as --onnx")
    policy = parse_policy(config.policy)
    network = policy_network(policy)
    content = to_onnx(policy)
    try:
        config.onnx.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(config.onnx, content)
    except OSError as error:
        raise ValueError(f"cannot write {config.onnx}: {error}") from error
    print(
        f"{INPUT} (batch, {len(network.features.names)}): {', '.join(network.features.names)}\n"
        f"{network.output} {network.layout}\n"
        f"equal to the policy on {N_CHECKED} observations; written to {config.onnx}"
    )
    return config.onnx


def to_onnx(policy: Policy | None) -> bytes:
    """The network of a policy as an ONNX model, checked.

    Raises:
        ImportError: A package of the extra `onnx` is not installed.
        ValueError: The policy has no network, or the exported one decides otherwise.
    """
    import onnx
    import onnxscript  # noqa: F401  # torch's exporter needs it: say so by its name
    import torch

    from lede.policy_network import policy_network

    network = policy_network(policy)
    assert policy is not None  # or it would have no network
    n_features = len(network.features.names)
    example = torch.zeros(2, n_features)  # of one row, torch would take the batch for fixed
    with _quiet():
        program: Any = torch.onnx.export(
            network.module,
            (example,),
            input_names=[INPUT],
            output_names=[network.output],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    model = program.model_proto
    _forget_origin(model)
    onnx.helper.set_model_props(model, _about(policy, network))
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    _check(policy, network, content)
    return content


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporter says about itself."""
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)  # it warns of every operator of torchvision where that is not installed
    try:
        with warnings.catch_warnings():
            # torch copies its own trees by way of a class that it has deprecated
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            yield
    finally:
        registration.setLevel(level)


def _forget_origin(model: Any) -> None:
    """Remove the exporter's notes, which hold paths and lines of the machine that it ran on."""
    graph = model.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


def _about(policy: Policy, network: PolicyNetwork) -> dict[str, str]:
    """The file's metadata: what a program needs to feed the network and to read its output."""
    import lede

    facts: dict[str, Any] = {
        "library": "lede",
        "lede_version": lede.__version__,
        "kind": policy.kind,
        "features": list(network.features.names),
        "candidates": policy.config.candidates,
        "output": f"{network.output} {network.layout}",
        "config": asdict(policy.config),
        "base_model": None if policy.fingerprint is None else policy.fingerprint["name"],
    }
    facts |= {name: tensor.tolist() for name, tensor in policy.tensors().items() if name == "blind"}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}


def _check(policy: Policy, network: PolicyNetwork, content: bytes) -> None:
    """Raise ValueError unless the exported network gives the policy's numbers and decisions."""
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    seen = _observations(policy, network)
    wanted = network.values(seen)
    allowed = network.tolerance * max(1.0, float(np.abs(wanted).max()))
    for batch in BATCHES:
        parts = [seen[start : start + batch] for start in range(0, len(seen), batch)]
        found = np.concatenate([session.run([network.output], {INPUT: part})[0] for part in parts])
        if found.shape != wanted.shape or not (np.abs(found - wanted) <= allowed).all():
            raise ValueError(f"the exported network differs from the policy at batch {batch}; report this as a bug")
        if not _same_decisions(network.options(found), network.options(wanted), allowed):
            raise ValueError(f"the exported network decides otherwise at batch {batch}; report this as a bug")


def _same_decisions(
    found: npt.NDArray[np.floating[Any]], wanted: npt.NDArray[np.floating[Any]], allowed: float
) -> bool:
    """Whether the largest option is the same everywhere, but where the two largest are as good as equal."""
    import numpy as np

    best = np.sort(wanted, axis=-1)
    sure = best[..., -1] - best[..., -2] > 2 * allowed
    return bool((found.argmax(axis=-1) == wanted.argmax(axis=-1))[sure].all())


def _observations(policy: Policy, network: PolicyNetwork) -> npt.NDArray[np.float32]:
    """Raw observations over the whole range of the features, `(N_CHECKED, feature)`."""
    import numpy as np

    architecture = {} if policy.fingerprint is None else policy.fingerprint["architecture"]
    vocab_size = architecture.get("vocab_size") or _VOCAB_SIZE
    low, high = network.features.bounds(architecture.get("n_layers", 1), vocab_size)
    drawn = np.random.default_rng(0).uniform(low, high, (N_CHECKED, low.size))
    drawn[0], drawn[1], drawn[2] = low, high, 0.0  # where logarithms and quotients are at their worst
    return drawn.astype(np.float32)
