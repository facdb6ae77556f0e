"""What decoding did and where its time went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Source = Literal["exit", "gaps", "lookup"]
"""Where a draft comes from: layers up to an exit, a stack with gaps, or the text itself."""

SECTIONS = ("prefill", "draft", "head", "inspect", "policy", "verify", "other", "search")


@dataclass(frozen=True)
class Round:
    """One round: pre-scan, scan, draft burst, verification. The prefill is no round."""

    tokens: tuple[int, ...]
    """Tokens committed: the accepted ones and, unless one of them ended the text, one more."""
    drafted: int
    """Tokens drafted."""
    accepted: int
    """Drafted tokens that verification kept and that stayed in the text; neither correction nor bonus is counted."""
    exit_layer: int | None
    """Layers that drafted; None when the round was a plain pass, drafted with gaps or by lookup."""
    skipped: int = 0
    """Sublayers that a draft with gaps left out."""
    source: Source | None = None
    """Where the draft came from; None when the round was a plain pass."""
    fixed: bool = False
    """Whether the draft had a fixed length, at which nobody looks at a token to decide on the next."""

    def cut(self, n_tokens: int) -> Round:
        """The round of a text that ends after `n_tokens` of its tokens, the rest of which did not stay."""
        if n_tokens >= len(self.tokens):
            return self
        return replace(self, tokens=self.tokens[:n_tokens], accepted=min(self.accepted, n_tokens))


@dataclass(frozen=True)
class Seconds:
    """Wall-clock seconds by what they were spent on; they add up to the whole call.

    On an accelerator, work is booked where the host waits for it.
    """

    prefill: float
    """The prompt through all layers, and the first token."""
    draft: float
    """Layers of drafts and scans, and draws of drafted tokens."""
    inspect: float
    """Features."""
    policy: float
    """Decisions."""
    verify: float
    """Remaining layers, final head and acceptance; plain passes too."""
    other: float
    """Bookkeeping and streaming."""
    search: float = 0.0
    """What a policy that learns while decoding asks between rounds, and what it is told of shadow tokens."""
    head: float = 0.0
    """Head reads of drafts and scans."""

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(asdict(self).values()))


@dataclass(frozen=True)
class DecodingStats:
    """Counts and times of one call; rates are None where nothing was counted."""

    tokens: int
    """New tokens: 1 + tokens committed over rounds."""
    seconds: Seconds
    """Where the time went."""
    tokens_per_second: float | None
    """Tokens after the first over seconds after the prefill."""
    rounds: int
    """Rounds after the prefill."""
    drafted: int
    """Drafted tokens."""
    accepted: int
    """Drafted tokens that verification kept."""
    acceptance_rate: float | None
    """accepted / drafted."""
    mean_accepted_length: float | None
    """accepted / rounds; neither correction nor bonus counts."""
    mean_draft_length: float | None
    """drafted / rounds that drafted."""
    mean_exit_layer: float | None
    """Mean of the exit layer over tokens drafted at one."""
    mean_skipped_share: float | None
    """Mean of the share of sublayers left out, over tokens drafted with gaps."""
    full_passes: int
    """Passes that reached the last layer, verifications included, prefill apart."""
    head_reads: int
    """Logits read by drafts, decisions and searches, one a position and layer; verification is not counted."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@dataclass
class Meter:
    """Counts rounds and splits time while decoding; `enter` names what the time from now on is spent on."""

    head_reads: int = 0
    n_layers: int | None = None
    rounds: list[Round] = field(default_factory=list)
    _spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECTIONS, 0.0))
    _section: str = "other"
    _since: float = field(default_factory=time.perf_counter)

    def enter(self, section: str) -> str:
        """Book the time since the last call and start the next section; returns the one that ends."""
        now, ended = time.perf_counter(), self._section
        self._spent[ended] += now - self._since
        self._section, self._since = section, now
        return ended

    def stats(self) -> DecodingStats:
        """The record so far."""
        self.enter(self._section)
        return summarize(self.rounds, Seconds(**self._spent), self.head_reads, n_layers=self.n_layers)


def summarize(
    rounds: Sequence[Round], seconds: Seconds, head_reads: int, n_sequences: int = 1, n_layers: int | None = None
) -> DecodingStats:
    """Statistics of rounds; pass all rounds of several sequences for pooled figures.

    Without the model's `n_layers` there is no skipped share.
    """
    drafting = [r for r in rounds if r.drafted]
    drafted = sum(r.drafted for r in drafting)
    accepted = sum(r.accepted for r in drafting)
    committed = sum(len(r.tokens) for r in rounds)
    decoding = seconds.total - seconds.prefill
    return DecodingStats(
        tokens=n_sequences + committed,
        seconds=seconds,
        tokens_per_second=committed / decoding if committed and decoding > 0 else None,
        rounds=len(rounds),
        drafted=drafted,
        accepted=accepted,
        acceptance_rate=accepted / drafted if drafted else None,
        mean_accepted_length=accepted / len(rounds) if rounds else None,
        mean_draft_length=drafted / len(drafting) if drafting else None,
        mean_exit_layer=weighted_mean([(r.exit_layer, r.drafted) for r in drafting if r.exit_layer is not None]),
        mean_skipped_share=None
        if n_layers is None
        else weighted_mean([(r.skipped / (2 * n_layers), r.drafted) for r in drafting if r.skipped]),
        full_passes=len(rounds),
        head_reads=head_reads,
    )


def weighted_mean(values: Sequence[tuple[float, int]]) -> float | None:
    """Mean of values given with their weights; None of none."""
    weight = sum(w for _, w in values)
    return sum(v * w for v, w in values) / weight if weight else None
