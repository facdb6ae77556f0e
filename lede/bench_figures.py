"""What one contender did on one prompt, over all repetitions: what every column of a benchmark is made of."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any, Self

from lede.bench_runs import PLAIN, PromptRecord, PromptRun, source_of
from lede.benchmark import repetition_share
from lede.round_sources import SourceCounts, count_sources
from lede.text_overlap import Rouge, rouge


@dataclass(frozen=True)
class PromptFigures:
    """One contender on one prompt. Counts are sums over the repetitions, seconds are medians."""

    suite: str
    """Name of the suite."""
    name: str
    """Name of the contender."""
    prompt_index: int
    """Place of the prompt in the suite's file, from 0."""
    category: str
    """Category; empty where the suite has none."""
    prompt_tokens: int
    """Tokens of the prompt."""
    prompt_digest: str | None
    """Hash of the prompt's token ids; None where they were not kept."""
    n_repeats: int
    """Repetitions."""
    error: str | None
    """Why a repetition failed; the figures are zero then."""
    tokens: float
    """New tokens, mean over repetitions."""
    text_digest: str
    """Hash of the first repetition's new token ids."""
    seconds: float
    """Median seconds after the first new token. Where texts differ in length, seconds a token are what is averaged."""
    seconds_with_prefill: float
    """The same of the whole call."""
    n_rounds: int
    """Rounds after the prefill, one full pass each; 0 for external contenders, which do not tell."""
    n_drafting: int
    """Rounds that drafted."""
    drafted: int
    """Drafted tokens."""
    accepted: int
    """Drafted tokens that verification kept."""
    committed: int
    """Tokens that the rounds wrote: the accepted ones, and a correction or bonus a round."""
    accepted_lengths: tuple[int, ...]
    """Rounds that drafted, counted by how many tokens were accepted: 0, 1, 2, ..."""
    exit_layers: tuple[tuple[int, int], ...]
    """Exit layer, and the tokens drafted there; ascending."""
    gap_drafted: int
    """Tokens drafted by the whole stack without some sublayers."""
    gap_skipped: int
    """Sublayers left out, summed over those tokens."""
    head_reads: int
    """Logits read by drafts, decisions and searches, one a position and layer."""
    sections: dict[str, float]
    """Seconds by `lede.statistics.SECTIONS`, the prefill apart; empty for external contenders."""
    peak_memory: int | None
    """Most bytes in use; None where nothing tells."""
    divergences: tuple[tuple[int, float, bool], ...]
    """Position, margin and whether it is a tie, of each place where a repetition left the plain text."""
    repetition: float
    """Share of 4-grams of the new tokens that stood there before."""
    rouge_reference: Rouge | None
    """Overlap of the first repetition's text with the suite's own answer."""
    rouge_plain: Rouge | None
    """Overlap of it with plain decoding's text."""
    reference: str | None = None
    """Whose text decided: plain where transformers failed in some repetition; None where that is not known."""
    modelled_seconds: float | None = None
    """What the rounds cost by the cost profile, a repetition; None without one."""
    modelled_plain_seconds: float | None = None
    """What plain decoding of as many tokens costs by the profile."""
    sources: dict[str, SourceCounts] = field(default_factory=dict)
    """Rounds and their tokens by where the draft came from, the ones of `lede.round_sources.SOURCES` that occur."""

    @property
    def counts(self) -> bool:
        """Whether anything was decoded; a failed prompt and a single token, which the prefill wrote, are no figure."""
        return self.error is None and self.tokens > 1

    @property
    def decoded(self) -> float:
        """New tokens after the first."""
        return self.tokens - 1

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Accepted tokens a round."""
        return self.accepted / self.n_rounds if self.n_rounds else None

    @property
    def mean_length_with_bonus(self) -> float | None:
        """Tokens written a round."""
        return self.committed / self.n_rounds if self.n_rounds else None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, rates included."""
        rates = {name: getattr(self, name) for name in _RATES}
        return {**asdict(self), **rates}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Self:
        """From what `to_json` gave.

        Raises:
            ValueError: The object is of another kind.
        """
        try:
            found = {key: value for key, value in entry.items() if key not in _RATES}
            for key in ("exit_layers", "divergences"):
                found[key] = tuple(tuple(each) for each in entry[key])
            found["accepted_lengths"] = tuple(entry["accepted_lengths"])
            for key in ("rouge_reference", "rouge_plain"):
                found[key] = None if entry[key] is None else Rouge(**entry[key])
            found["sources"] = {name: SourceCounts(**each) for name, each in entry.get("sources", {}).items()}
            return cls(**found)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"holds no figures of a prompt: {error}") from None


_RATES = ("acceptance_rate", "mean_accepted_length", "mean_length_with_bonus")


def prompt_figures(
    runs: Iterable[PromptRun], prompts: Sequence[PromptRecord] = ()
) -> dict[tuple[str, str], list[PromptFigures]]:
    """The figures of each contender by suite and name, prompt by prompt in ascending order.

    Args:
        runs: Decodes, in any order.
        prompts: What is known of the prompts: their reference answers.
    """
    grouped: dict[tuple[str, str, int], list[PromptRun]] = {}
    for run in runs:
        grouped.setdefault((run.suite, run.policy, run.prompt_index), []).append(run)
    known = {(prompt.suite, prompt.prompt_index): prompt for prompt in prompts}
    figures: dict[tuple[str, str], list[PromptFigures]] = {}
    for (suite, name, index), decodes in sorted(grouped.items()):
        decodes.sort(key=lambda run: run.repeat)
        plain = grouped.get((suite, PLAIN, index), ())
        found = _figures(decodes, known.get((suite, index)), _text(plain))
        figures.setdefault((suite, name), []).append(found)
    return figures


def with_modelled_seconds(
    figures: Sequence[PromptFigures], modelled: Mapping[int, tuple[float, float]]
) -> list[PromptFigures]:
    """The figures with modelled seconds, own and plain, by prompt index."""
    found = []
    for each in figures:
        own, plain = modelled.get(each.prompt_index, (None, None))
        found.append(replace(each, modelled_seconds=own, modelled_plain_seconds=plain))
    return found


def digest(token_ids: Iterable[int]) -> str:
    """A short hash of token ids."""
    return sha256(" ".join(map(str, token_ids)).encode()).hexdigest()[:16]


def own_reference(references: Iterable[str | None]) -> str | None:
    """The weakest of the references that texts were held against: plain decoding, which is lede's own."""
    known = {each for each in references if each is not None}
    return PLAIN if PLAIN in known else min(known, default=None)


def _text(decodes: Iterable[PromptRun]) -> str | None:
    first = min((run for run in decodes if run.error is None), key=lambda run: run.repeat, default=None)
    return None if first is None else first.text


def _figures(decodes: Sequence[PromptRun], prompt: PromptRecord | None, plain_text: str | None) -> PromptFigures:
    first = decodes[0]
    error = next((run.error for run in decodes if run.error is not None), None)
    sound = decodes if error is None else ()
    rounds = [counts for run in sound for counts in run.rounds]
    drafting = [counts for counts in rounds if counts[0]]
    layers: Counter[int] = Counter()
    for drafted, _, _, layer, _ in drafting:
        if layer:
            layers[layer] += drafted
    lengths = Counter(counts[1] for counts in drafting)
    text = _text(sound)
    memory = [run.peak_memory for run in sound if run.peak_memory is not None]
    sections: dict[str, float] = {}
    for run in sound:
        for section, seconds in run.sections.items():
            if section != "prefill":
                sections[section] = sections.get(section, 0.0) + seconds
    return PromptFigures(
        suite=first.suite,
        name=first.policy,
        prompt_index=first.prompt_index,
        category=first.category,
        prompt_tokens=first.prompt_tokens,
        prompt_digest=None if prompt is None else digest(prompt.ids),
        n_repeats=len(decodes),
        error=error,
        tokens=statistics.fmean(len(run.token_ids) for run in sound) if sound else 0.0,
        text_digest=digest(first.token_ids),
        seconds=_seconds([(len(run.token_ids) - 1, run.decode_seconds) for run in sound]),
        seconds_with_prefill=_seconds(
            [(len(run.token_ids), run.prefill_seconds + run.decode_seconds) for run in sound]
        ),
        n_rounds=len(rounds),
        n_drafting=len(drafting),
        drafted=sum(counts[0] for counts in drafting),
        accepted=sum(counts[1] for counts in drafting),
        committed=sum(counts[2] for counts in rounds),
        accepted_lengths=tuple(lengths[n] for n in range(max(lengths, default=-1) + 1)),
        exit_layers=tuple(sorted(layers.items())),
        gap_drafted=sum(counts[0] for counts in drafting if counts[4]),
        gap_skipped=sum(counts[0] * counts[4] for counts in drafting),
        head_reads=sum(run.head_reads for run in sound),
        sections=sections,
        peak_memory=max(memory, default=None),
        divergences=tuple(sorted({run.divergence for run in sound if run.divergence is not None})),
        repetition=statistics.fmean(repetition_share(run.token_ids) for run in sound) if sound else 0.0,
        rouge_reference=rouge(text, None if prompt is None else prompt.reference),
        rouge_plain=rouge(text, plain_text),
        reference=own_reference(run.reference for run in sound),
        sources=count_sources((source_of(counts), *counts[:3]) for counts in rounds),
    )


def _seconds(decodes: Sequence[tuple[int, float]]) -> float:
    """Median seconds of (tokens, seconds); of seconds a token, times the mean tokens, where the tokens differ."""
    if len({tokens for tokens, _ in decodes}) <= 1:
        return statistics.median([seconds for _, seconds in decodes]) if decodes else 0.0
    paces = [seconds / tokens for tokens, seconds in decodes if tokens > 0]
    return statistics.median(paces) * statistics.fmean(tokens for tokens, _ in decodes)
