"""What an evaluation finds out, and how it follows from simulated rounds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lede.ceilings import Ceiling, Clairvoyant
from lede.intervals import Bootstrap, Interval
from lede.off_policy import OffPolicyEstimate
from lede.regret import split
from lede.simulation import Simulation


@dataclass(frozen=True)
class PolicyResult:
    """One policy's figures, simulated; None where there is nothing to count."""

    name: str
    """What tables call it."""
    policy: str
    """As it was given."""
    reference: bool
    """Whether it was given as a reference."""
    rate: Interval
    """Tokens after the first over seconds after the prefill."""
    speedup: Interval
    """Over plain decoding of the same texts."""
    speedup_without_branches: Interval | None
    """The same where the drafter sees the target's text after a wrong draft; None where the traces have no branches."""
    acceptance: Interval | None
    """Accepted over drafted tokens."""
    draft_length: float | None
    """Mean tokens drafted in the rounds that drafted."""
    exit_layer: float | None
    """Mean exit layer of the rounds that drafted."""
    head_reads: float
    """Head reads below the last layer a token."""
    layer_shares: dict[int, float]
    """Share of rounds by exit layer; 0 stands for plain passes and lookups."""
    sources: dict[str, tuple[float, float]]
    """Share of rounds and of their tokens by source of the draft, out of `lede.round_log.SOURCES`."""
    of_clairvoyant: Interval
    """Its rate over the clairvoyant's."""
    of_reference: Interval | None
    """Its rate over the fastest reference's, both on the same resamples of prompts."""
    regret: dict[str, float]
    """Lost seconds over its own, by part (see `lede.regret`); with `of_clairvoyant` they add up to 1."""
    off_policy: OffPolicyEstimate | None
    """Fitted Q evaluation of its reward in the paper's process."""


@dataclass(frozen=True)
class Evaluation:
    """All of it."""

    model: str
    """Model of the traces."""
    profile: str
    """Where the cost profile was measured."""
    n_prompts: int
    """Prompts with at least one decision."""
    n_tokens: int
    """Tokens that rounds write, over all prompts."""
    n_branches: int
    """Branches in the traces."""
    plain_rate: float
    """Tokens a second of plain decoding."""
    candidates: tuple[int, ...]
    """Layers that the clairvoyant may use."""
    clairvoyant: Ceiling
    """The ceiling for whoever knows every match."""
    policies: tuple[PolicyResult, ...]
    """In the order given, references last."""
    notes: tuple[str, ...]
    """What was left out, and why."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, with each estimate's distance from the truth."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for row, result in zip(content["policies"], self.policies, strict=True):
            if result.off_policy is not None:
                row["off_policy"]["distance"] = result.off_policy.distance
        return content


def result_of(
    name: str,
    policy: str,
    reference: bool,
    played: Simulation,
    without_branches: Simulation | None,
    clairvoyant: Clairvoyant,
    bootstrap: Bootstrap,
    best_reference: Simulation | None,
    off_policy: OffPolicyEstimate | None,
) -> PolicyResult:
    """The figures of one policy.

    Args:
        name: What tables call it.
        policy: As it was given.
        reference: Whether it was given as a reference.
        played: Its simulation.
        without_branches: Its simulation without branches, where the traces have some.
        clairvoyant: The ceiling on the same table.
        bootstrap: Resamples of the table's prompts.
        best_reference: Simulation of the fastest reference.
        off_policy: Its fitted Q evaluation.
    """
    log, regret = played.log, split(played, clairvoyant)

    def by_prompt(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return np.bincount(log.prompt, weights=counts, minlength=played.tokens.size).astype(np.float64)

    return PolicyResult(
        name=name,
        policy=policy,
        reference=reference,
        rate=_sure(bootstrap.ratio(played.tokens, played.seconds)),
        speedup=_sure(bootstrap.ratio(played.plain_seconds, played.seconds)),
        speedup_without_branches=None
        if without_branches is None
        else _sure(bootstrap.ratio(without_branches.plain_seconds, without_branches.seconds)),
        acceptance=bootstrap.ratio(by_prompt(log.n_accepted), by_prompt(log.n_drafted)),
        draft_length=played.draft_length,
        exit_layer=played.exit_layer,
        head_reads=float(played.head_reads.sum() / played.tokens.sum()),
        layer_shares=played.layer_shares(),
        sources=played.source_shares(),
        of_clairvoyant=_sure(bootstrap.ratio(regret.fewest, regret.seconds)),
        # all write the same texts
        of_reference=None if best_reference is None else _sure(bootstrap.ratio(best_reference.seconds, played.seconds)),
        regret=regret.shares(),
        off_policy=off_policy,
    )


def _sure(interval: Interval | None) -> Interval:
    if interval is None:
        raise ValueError("the cost model says that decoding takes no time; make the profile again with `lede profile`")
    return interval
