"""A row of a benchmark's table: every column under a name of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

from lede.bench_runs import Cost
from lede.bench_speed import Speedup
from lede.intervals import Interval
from lede.text_overlap import Rouge

Exact = Literal["yes", "ties", "NO", "law"]

SHARES = ("draft", "head", "inspect", "policy", "verify", "search", "other")
"""What decoding time is split into."""


@dataclass(frozen=True)
class BenchRow:
    """One contender on one suite; None where there is nothing to count."""

    suite: str
    """Name of the suite."""
    policy: str
    """The policy as the command line gave it; names of their own for the contenders of every benchmark."""
    name: str
    """What tables and runs call it."""
    settings: str
    """What it resolved to."""
    kind: str
    """plain, policy or external."""
    online: bool
    """Whether it goes on learning while it decodes."""
    lossy: bool
    """Whether it makes no promise to write the plain text."""
    n_prompts: int
    """Prompts that it was given."""
    n_failed: int
    """Prompts on which it failed; they are in no other figure."""
    n_empty: int
    """Prompts answered by a single token, which the prefill wrote; they are in no mean either."""
    error: str | None
    """The first failure's message."""
    exact: Exact | None
    """Text against transformers' plain greedy `generate`: equal, apart at numerical ties only, or wrong. `law` at a
    temperature, where texts are equal in law alone. None when no prompt was answered. See `exact_against`."""
    n_ties: int
    """Positions at which a text left the plain one at a numerical tie."""
    n_wrong: int
    """Positions at which a text left it without one."""
    ranked: bool
    """Whether the row takes part in the ranking: neither inexact nor lossy, and not the control."""
    exact_against: str | None = None
    """Whose texts `exact` is against: transformers, or plain where transformers failed on some prompt and lede's own
    plain text stood in. None where nothing was compared, or where the runs do not tell."""
    tokens: float = 0.0
    """New tokens, summed over prompts."""
    tokens_per_second: Interval | None = None
    """Tokens after the first over seconds after the prefill, sums over prompts."""
    tokens_per_second_with_prefill: Interval | None = None
    """All tokens over all seconds."""
    speedup_over_plain: Speedup | None = None
    """Over plain decoding on the same engine, after the prefill."""
    speedup_over_plain_with_prefill: Speedup | None = None
    """The same of the whole call."""
    speedup_over_transformers: Speedup | None = None
    """Over transformers' `generate`, after the prefill."""
    speedup_over_transformers_with_prefill: Speedup | None = None
    """The same of the whole call."""
    speedup_over_best_static: Speedup | None = None
    """Over the static setting that was chosen on validation prompts, after the prefill."""
    speedup_over_hindsight_static: Speedup | None = None
    """Over the static setting that turned out fastest on these prompts, after the prefill."""
    speedup_over_best_lookup: Speedup | None = None
    """Over the static lookup that was chosen on validation prompts, after the prefill."""
    speedup_over_hindsight_lookup: Speedup | None = None
    """Over the static lookup that turned out fastest on these prompts, after the prefill."""
    speedup_over_prompt_lookup: Speedup | None = None
    """Over transformers' own prompt lookup, after the prefill."""
    acceptance_rate: float | None = None
    """accepted / drafted, pooled."""
    acceptance_rate_by_prompt: float | None = None
    """Mean over prompts that drafted of accepted / drafted."""
    mean_accepted_length: float | None = None
    """accepted / rounds, pooled: without the correction or bonus token."""
    mean_accepted_length_by_prompt: float | None = None
    """Mean over prompts of accepted / rounds."""
    mean_length_with_bonus: float | None = None
    """committed / rounds, pooled: with the correction or bonus token."""
    mean_length_with_bonus_by_prompt: float | None = None
    """Mean over prompts of committed / rounds."""
    mean_draft_length: float | None = None
    """drafted / rounds that drafted, pooled."""
    mean_exit_layer: float | None = None
    """Mean over drafted tokens of the layer that drafted them."""
    mean_skipped_share: float | None = None
    """Mean, over tokens drafted with gaps, of sublayers left out over all sublayers."""
    full_passes: int | None = None
    """Rounds: passes that reached the last layer, verifications included, the prefill apart; over all repetitions."""
    full_passes_a_token: float | None = None
    """Rounds over tokens that they wrote."""
    head_reads: int | None = None
    """Logits read by drafts, decisions and searches, one a position and layer, over all repetitions."""
    head_reads_a_token: float | None = None
    """Head reads over tokens that the rounds wrote."""
    round_shares: dict[str, float] | None = None
    """Share of the rounds by where their draft came from (`lede.round_sources.SOURCES`)."""
    token_shares: dict[str, float] | None = None
    """Share of the tokens that these rounds wrote, correction or bonus included."""
    acceptance_by_source: dict[str, float | None] | None = None
    """accepted / drafted, pooled, of the rounds of each source that drafted."""
    time_shares: dict[str, float] | None = None
    """Share of the seconds after the prefill by `SHARES`."""
    search_seconds: float | None = None
    """Seconds of searching while decoding, which are in every speed; a repetition."""
    rouge_reference: Rouge | None = None
    """Overlap with the suite's own answers, mean over the prompts that have one."""
    rouge_plain: Rouge | None = None
    """Overlap with plain decoding's text, mean over prompts."""
    repetition_share: float | None = None
    """Share of 4-grams that stood in the text before, mean over prompts."""
    cost: Cost = field(default_factory=Cost)
    """Before the first token."""
    cost_seconds: float = 0.0
    """Seconds of collecting, searching and training."""
    tokens_to_break_even: float | None = None
    """cost_seconds / (seconds a token of plain - its own); None when it is not faster."""
    peak_memory: int | None = None
    """Most bytes in use on any prompt; None where nothing tells."""
    modelled_speedup: float | None = None
    """Over plain by the cost profile, from the rounds that were run; see `lede.bench_modelled`."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Self:
        """From what `to_json` gave.

        Raises:
            ValueError: The object is of another kind.
        """
        try:
            found = {each.name: entry[each.name] for each in fields(cls) if each.name in entry}
            for name, value in found.items():
                kind = Speedup if name.startswith("speedup_") else _PARTS.get(name)
                if kind is not None and value is not None:
                    found[name] = kind(**value)
            return cls(**found)
        except (KeyError, TypeError) as error:
            raise ValueError(f"holds no row of a benchmark: {error}") from None


_PARTS: dict[str, Callable[..., Any]] = {
    "tokens_per_second": Interval,
    "tokens_per_second_with_prefill": Interval,
    "rouge_reference": Rouge,
    "rouge_plain": Rouge,
    "cost": Cost,
}
