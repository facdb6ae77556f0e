"""A cost profile with another price of head reads, to train and judge policies for models that were not measured.

python -m benchmarks.head_price --profile profile.json --ratio 4.3 --out as-llama-3.2-1b.json

A head read is 0.65 of a layer in the bytes of Llama-2-7B, 4.3 in those of Llama-3.2-1B, whose vocabulary is four times
as large. Everything else stays as measured, features included. The profile names its origin in `device_name`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from lede.cost_profile import CostProfile


@dataclass(frozen=True)
class HeadPrice:
    """Settings."""

    profile: Path
    """Cost profile to change."""
    ratio: float
    """Seconds of a head read over those of a layer, both of one token at the shortest context."""
    out: Path
    """File of the new profile; replaced whole."""


def with_head_price(profile: CostProfile, ratio: float) -> CostProfile:
    """The profile with head reads at `ratio` layers.

    Raises:
        ValueError: The ratio is not above 0.
    """
    if not ratio > 0:
        raise ValueError(f"ratio must be above 0, got {ratio}")
    by = ratio / profile.head_over_layer()
    costs = profile.costs.costs
    costs = replace(costs, head=costs.head * by, head_block=costs.head_block * by, head_token=costs.head_token * by)
    measurements = tuple(
        replace(m, seconds=m.seconds * by, lower=m.lower * by, upper=m.upper * by) if m.kind == "head" else m
        for m in profile.measurements
    )
    return replace(
        profile,
        device_name=f"{profile.device_name}, head reads priced at {ratio:g} layers",
        measurements=measurements,
        costs=replace(profile.costs, costs=costs),
    )


if __name__ == "__main__":
    settings = tyro.cli(HeadPrice, description=__doc__)
    with_head_price(CostProfile.load(settings.profile), settings.ratio).save(settings.out)
