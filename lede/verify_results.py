"""What a verification found: prompt by prompt, summed up, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["exact", "tie", "failure", "error"]
"""Of a text: equal, apart within the dtype's noise, apart beyond it, or not to be had."""

TOKENS_A_TIE = 10_000
"""In float32, ties must be rarer than one in so many tokens; a single one is always allowed."""


@dataclass(frozen=True)
class Difference:
    """Where a text leaves a reference."""

    reference: str
    """`transformers` for its own `generate`, `plain` for lede's engine without a policy."""
    position: int
    """Index of the first new token that differs."""
    margin: float
    """Top-2 margin of the plain run there, as a share of its largest logit (`lede.exactness.Divergence`)."""
    noise: float
    """Margin below which a token may fall either way in this dtype."""
    tie: bool
    """Whether it is a numerical tie; otherwise it is a failure."""
    found: int | None
    """Token of the text; None where it ends before."""
    wanted: int | None
    """Token of the reference; None where it ends before."""
    found_text: str | None = None
    """`found` decoded; None without a tokenizer."""
    wanted_text: str | None = None
    """`wanted` decoded; None without a tokenizer."""


@dataclass(frozen=True)
class Finding:
    """One prompt under one policy."""

    prompt: int
    """Number of the prompt, from 1."""
    prompt_tokens: int
    """Its length."""
    policy: str
    """The policy as it was given; `plain` for the engine without one."""
    tokens: int
    """New tokens that were compared: all, or those up to the first difference and with it."""
    differences: tuple[Difference, ...] = ()
    """Where it leaves the references; none where it is equal."""
    error: str | None = None
    """Why there is no text, or nothing to compare it with; None where there is."""

    @property
    def verdict(self) -> Verdict:
        """The worst of what was found."""
        if self.error is not None:
            return "error"
        if not self.differences:
            return "exact"
        return "tie" if all(each.tie for each in self.differences) else "failure"


@dataclass(frozen=True)
class Tally:
    """All prompts under one policy in one dtype."""

    dtype: str
    """Dtype of the weights."""
    policy: str
    """The policy as it was given."""
    prompts: int
    """Prompts tried."""
    tokens: int
    """New tokens compared."""
    exact: int
    """Prompts whose text is equal."""
    ties: int
    """Prompts whose text parts at a numerical tie."""
    failures: int
    """Prompts whose text parts beyond the noise."""
    errors: int
    """Prompts without a text, or without one to compare it with."""

    @property
    def too_many_ties(self) -> bool:
        """Whether ties are too frequent in float32 to be luck; half precision has no limit."""
        return self.dtype == "float32" and self.ties > 1 and self.ties * TOKENS_A_TIE >= self.tokens

    @property
    def passed(self) -> bool:
        """Whether every text was compared and none is a failure."""
        return not (self.failures or self.errors or self.too_many_ties)

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if self.failures:
            return "FAILURE"
        if self.too_many_ties:
            return "TOO MANY TIES"
        if self.errors:
            return "ERROR"
        return "ties" if self.ties else "exact"


@dataclass(frozen=True)
class DtypeRun:
    """Everything in one dtype."""

    dtype: str
    """Dtype of the weights."""
    noise: float
    """Margin, as a share of the largest logit, below which a token may fall either way."""
    findings: tuple[Finding, ...]
    """Each prompt under each policy, prompt by prompt."""

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """A tally for each policy, in the order in which they decode."""
        names = dict.fromkeys(each.policy for each in self.findings)
        return tuple(_tally(self.dtype, name, [f for f in self.findings if f.policy == name]) for name in names)


@dataclass(frozen=True)
class VerifyReport:
    """What a verification found."""

    model: str
    """What the model was loaded from."""
    device: str
    """Where it ran."""
    device_name: str
    """The processor's name."""
    attention: str
    """The attention implementation."""
    versions: dict[str, str]
    """Versions of lede and of what it decodes with."""
    config: dict[str, Any]
    """The settings."""
    runs: tuple[DtypeRun, ...]
    """A run for each dtype."""

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """The tallies of all runs."""
        return tuple(tally for run in self.runs for tally in run.tallies)

    @property
    def passed(self) -> bool:
        """Whether every text was compared, none is a failure, and ties are rare in float32."""
        return all(tally.passed for tally in self.tallies)

    @property
    def exit_code(self) -> int:
        """0 when passed, else 1: what `lede verify` ends with."""
        return 0 if self.passed else 1

    def to_json(self) -> dict[str, Any]:
        """Everything in types that JSON keeps."""
        head = {name: getattr(self, name) for name in ("model", "device", "device_name", "attention", "versions")}
        return {
            "passed": self.passed,
            **head,
            "config": self.config,
            "runs": [
                {
                    "dtype": run.dtype,
                    "noise": run.noise,
                    "policies": [
                        {**asdict(tally), "too_many_ties": tally.too_many_ties, "verdict": tally.verdict}
                        for tally in run.tallies
                    ],
                    "prompts": [{**asdict(each), "verdict": each.verdict} for each in run.findings],
                }
                for run in self.runs
            ],
        }


def _tally(dtype: str, name: str, findings: Sequence[Finding]) -> Tally:
    verdicts = [each.verdict for each in findings]
    return Tally(
        dtype=dtype,
        policy=name,
        prompts=len(findings),
        tokens=sum(each.tokens for each in findings),
        exact=verdicts.count("exact"),
        ties=verdicts.count("tie"),
        failures=verdicts.count("failure"),
        errors=verdicts.count("error"),
    )
