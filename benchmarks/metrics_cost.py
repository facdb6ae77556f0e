"""What it costs that decoding books its seconds: every policy with the clock read and without, beside an A/A control.

python -m benchmarks.metrics_cost --prompts test.jsonl --policy plain --policy lookup --out metrics.json

Each prompt is prefilled once and decoded three times under each policy, in an order drawn for the prompt: with the
sections of `lede.statistics` booked, with them booked again, and with the clock never read. Seconds are of the whole
call, taken outside it. The first two differ in nothing, so what they differ by is what this machine can't tell.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import tyro

from lede import generation
from lede.intervals import Bootstrap, Interval
from lede.models import EarlyExitModel, load_model
from lede.policies import Policy, parse_policy
from lede.prompts import encode_prompts, load_prompts
from lede.seeding import Purpose, numpy_stream
from lede.statistics import Meter

ON, AGAIN, OFF = "on", "on again", "off"
WAYS = (ON, AGAIN, OFF)


class Unread(Meter):
    """A meter that counts rounds and never reads the clock while decoding."""

    def enter(self, section: str) -> str:
        """Book nothing."""
        return section


@dataclass(frozen=True)
class MetricsSettings:
    """Settings."""

    prompts: Path
    """Prompts, a .jsonl or .txt file."""
    out: Path
    """File of the figures as JSON; replaced whole."""
    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ("plain",)
    """A policy: plain, NAME, NAME:key=value, or a folder; give it again for more."""
    model: str = "demo"
    """Model: demo, a folder, a hub id, or a .gguf file."""
    n_prompts: int = 32
    """Prompts of the file to take, from its beginning."""
    max_new_tokens: int = 64
    """Budget of new tokens a prompt."""
    seed: int = 0
    """Seed of the order within each prompt."""


@dataclass(frozen=True)
class MetricsCost:
    """Seconds of decoding over seconds without reading the clock: sums over prompts, 95 % interval by prompt."""

    policy: str
    """As it was given."""
    n_prompts: int
    """Prompts."""
    on_over_off: Interval
    """Booked over not booked."""
    control: Interval
    """Booked over booked."""

    @property
    def told_apart(self) -> bool:
        """Whether the interval of the one is clear of that of the other."""
        return self.on_over_off.lower > self.control.upper or self.on_over_off.upper < self.control.lower


def cost_of(
    model: EarlyExitModel, text: str, policy: Policy | None, prompts: Sequence[Sequence[int]], budget: int, seed: int
) -> MetricsCost:
    """Decode every prompt all three ways.

    Args:
        model: The model.
        text: What the policy was given as.
        policy: The policy; None decodes plainly.
        prompts: Token ids of each prompt.
        budget: New tokens a prompt.
        seed: Of the order of the three.
    """
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    once(model, policy, prompts[0], budget, OFF)
    for number, ids in enumerate(prompts):
        for place in numpy_stream(seed, Purpose.TURNS, number).permutation(len(WAYS)):
            seconds[WAYS[place]].append(once(model, policy, ids, budget, WAYS[place]))
    bootstrap = Bootstrap(len(prompts))
    on_over_off = bootstrap.ratio(seconds[ON], seconds[OFF])
    control = bootstrap.ratio(seconds[ON], seconds[AGAIN])
    assert on_over_off is not None  # calls take time
    assert control is not None
    return MetricsCost(text, len(prompts), on_over_off, control)


def once(model: EarlyExitModel, policy: Policy | None, ids: Sequence[int], budget: int, way: str) -> float:
    """Seconds of one call, the prefill left out."""
    prefilled = generation.prefill(model, input_ids=ids)
    if policy is not None:
        policy.reset()
    meter = Unread if way == OFF else Meter
    with mock.patch.object(generation, "Meter", meter):
        _wait(model)
        started = time.perf_counter()
        generation.generate(model, input_ids=ids, prefilled=prefilled, policy=policy, max_new_tokens=budget)
        _wait(model)
        return time.perf_counter() - started


def _wait(model: EarlyExitModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def main(settings: MetricsSettings) -> list[MetricsCost]:
    """Measure, print a table and write."""
    model = load_model(settings.model)
    policies = {text: parse_policy(text) for text in settings.policy}
    for policy in policies.values():
        if policy is not None:
            policy.check_model(model)
    prompts = encode_prompts(model.tokenizer, load_prompts(settings.prompts)[: settings.n_prompts])
    found = [
        cost_of(model, text, policy, prompts, settings.max_new_tokens, settings.seed)
        for text, policy in policies.items()
    ]
    print("| policy | prompts | on / off | on / on | told apart |")
    print("|---|---:|---:|---:|---|")
    for each in found:
        apart = "yes" if each.told_apart else "no"
        print(f"| {each.policy} | {each.n_prompts} | {_shown(each.on_over_off)} | {_shown(each.control)} | {apart} |")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    content = [{**asdict(each), "told_apart": each.told_apart} for each in found]
    settings.out.write_text(json.dumps(content, indent=1) + "\n")
    return found


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.lower:.3f}-{interval.upper:.3f})"


if __name__ == "__main__":
    main(tyro.cli(MetricsSettings, description=__doc__))
