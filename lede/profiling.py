"""`lede profile`: what decoding costs on this model and machine, measured on the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lede.cost_profile import CostProfile

if TYPE_CHECKING:
    from lede.models import EarlyExitModel


@dataclass(frozen=True)
class ProfileConfig:
    """Settings of a profile."""

    out: Path
    """The profile's file, JSON; replaced whole."""
    model: str = "demo"
    """Model: demo, a folder, a hub id, or a .gguf file."""
    device: str | None = None
    """Device, such as cuda; the CPU unless given."""
    dtype: str | None = None
    """Dtype of the weights, such as bfloat16; float32 on the CPU unless given."""
    compile: bool = False
    """Compile the layers, plain decoding's too; it takes seconds before the first token."""
    pack_weights: bool = False
    """Pack the weights, for plain decoding too: float32 or bfloat16 on the CPU, for as much memory again."""
    contexts: str = "128,512,2048"
    """Context lengths in tokens; those that the model has no positions for are left out."""
    candidates: str | None = None
    """Candidate layers, such as 2,4,8 or all; multiples of ceil(L/8) up to L/2 unless given."""
    repeats: int = 11
    """Times that each operation is measured, after a warm-up."""

    def __post_init__(self) -> None:
        _ = self.context_lengths
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")

    @property
    def context_lengths(self) -> tuple[int, ...]:
        """`contexts` as ascending numbers.

        Raises:
            ValueError: They are not positive whole numbers.
        """
        try:
            lengths = sorted({int(part) for part in self.contexts.split(",")})
        except ValueError:
            lengths = [0]
        if lengths[0] < 1:
            raise ValueError(f"contexts '{self.contexts}' must be positive numbers of tokens, like 128,512")
        return tuple(lengths)


def profile(config: ProfileConfig, model: EarlyExitModel | None = None) -> CostProfile:
    """Measure, fit, print a summary and write the profile.

    Args:
        config: Settings.
        model: A model to use instead of loading `config.model`.

    Raises:
        ValueError: The model, the candidates or the file can't be used, or no context fits; before anything is timed.
    """
    from rich.console import Console
    from rich.progress import Progress

    from lede.atomic import prepare_file
    from lede.cost_measurement import fitting
    from lede.cost_report import report
    from lede.features import parse_candidates
    from lede.models import load_model

    if model is None:
        model = load_model(
            config.model, config.device, config.dtype, compile=config.compile, pack_weights=config.pack_weights
        )
    candidates = parse_candidates(config.candidates, model.n_layers)
    contexts = fitting(config.context_lengths, model)
    prepare_file(config.out)
    console = Console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=config.repeats + 1)
        found = measured_profile(model, contexts, candidates, config.repeats, lambda: progress.advance(task))
    found.save(config.out)
    console.print(report(found))
    left_out = [str(c) for c in config.context_lengths if c not in contexts]
    if left_out:
        console.print(f"left out, beyond the model's {model.max_positions} positions: {', '.join(left_out)}")
    console.print(f"written to {config.out}", soft_wrap=True)
    return found


def measured_profile(
    model: EarlyExitModel,
    contexts: Sequence[int],
    candidates: Sequence[int],
    repeats: int,
    on_repeat: Callable[[], None] | None = None,
) -> CostProfile:
    """Measure a model and fit the cost model, without a word.

    Args:
        model: The model.
        contexts: Context lengths in tokens, ascending.
        candidates: Candidate layers.
        repeats: Times that each operation is measured, after a warm-up.
        on_repeat: Called after the warm-up and after each repeat.
    """
    import torch

    from lede.checkpoint import fingerprint, versions
    from lede.cost_measurement import device_name, measure
    from lede.cost_model import fit, residuals

    identity = fingerprint(model)
    measurements = measure(model, contexts, candidates, repeats, on_repeat)
    costs = fit(measurements, model.windows)
    return CostProfile(
        model=model.name,
        fingerprint=identity,
        candidates=tuple(candidates),
        contexts=tuple(contexts),
        repeats=repeats,
        device=str(model.device),
        device_name=device_name(model.device),
        threads=torch.get_num_threads(),
        dtype=identity["dtype"],
        attention=model.attention,
        versions=versions(),
        measurements=tuple(measurements),
        costs=costs,
        residuals=residuals(costs, measurements),
        compiled=model.compiled is not None,
        packed=model.packed is not None,
    )
