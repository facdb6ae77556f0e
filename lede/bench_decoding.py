"""Decodes the test prompts of a suite by all of its contenders, and records each decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from lede.bench_log import RunLog
from lede.bench_progress import BenchProgress
from lede.bench_runs import PLAIN, TRANSFORMERS, PromptRun
from lede.exactness import compare
from lede.interleaving import Decode, prepare, take_turns, warm_up

if TYPE_CHECKING:
    from lede.bench_lineup import Decoding, Entrant
    from lede.models import EarlyExitModel
    from lede.suites import Item, Suite

_REPEAT_SHIFT = 32
"""Bits that the repetition is moved up by in the seed of the tokens drawn, so that no two seeds of users meet."""


class SuiteRun:
    """The decodes of one suite.

    Args:
        model: The model.
        suite: The suite.
        entrants: Its contenders; their order is drawn for each prompt.
        decoding: How everybody decodes.
        log: Where decodes are recorded; those that are there are not made again.
    """

    def __init__(
        self, model: EarlyExitModel, suite: Suite, entrants: Sequence[Entrant], decoding: Decoding, log: RunLog
    ) -> None:
        self.model, self.suite, self.entrants = model, suite, list(entrants)
        self.decoding, self.log = decoding, log

    def decode(self, repeats: int, console: Console) -> None:
        """Make the decodes that are missing, prompt by prompt, each prompt by everybody before the next one."""
        jobs = [(repeat, item) for repeat in range(repeats) for item in self.suite.test]
        waiting = [self._missing(item, repeat) for repeat, item in jobs]
        total, missing = len(jobs) * len(self.entrants), sum(map(len, waiting))
        if missing:
            first = self.suite.validation[0] if self.suite.validation else self.suite.test[0]
            warm_up(self.model, [entrant.contender for entrant in self.entrants], first.ids)
            self._restore()
        with BenchProgress(self.suite.name, total, total - missing, console) as progress:
            for number, ((repeat, item), entrants) in enumerate(zip(jobs, waiting, strict=True)):
                if entrants:
                    if repeat and item is self.suite.test[0]:
                        _forget(entrants)
                    self._prompt(item, repeat, number, entrants, progress)

    def plain_texts(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Prompts and what plain decoding made of them in the first repetition."""
        prompts = {item.prompt_index: item.ids for item in self.suite.test}
        return [
            (prompts[run.prompt_index], run.token_ids)
            for run in self.log.runs
            if (run.suite, run.policy, run.repeat) == (self.suite.name, PLAIN, 0) and run.error is None
        ]

    def _missing(self, item: Item, repeat: int) -> list[Entrant]:
        name, log = self.suite.name, self.log
        return [each for each in self.entrants if not log.has(name, each.setup.name, item.prompt_index, repeat)]

    def _restore(self) -> None:
        for entrant in self.entrants:
            state = self.log.state(self.suite.name, entrant.setup.name)
            if entrant.policy is not None and state:
                entrant.policy.restore(state)

    def _prompt(
        self, item: Item, repeat: int, number: int, entrants: Sequence[Entrant], progress: BenchProgress
    ) -> None:
        """Decode a prompt by everybody, then compare and record: only now is the text known that decides."""
        contenders = [entrant.contender for entrant in entrants]
        made: list[tuple[int, str, Decode]] = []
        try:
            call = prepare(self.model, item.ids, self.decoding.seed + (repeat << _REPEAT_SHIFT), item.prompt_index)
        except Exception as error:  # such as too little memory for this prompt
            message = " ".join(f"prefill: {type(error).__name__}: {error}".split())
            made = [(turn, each.name, Decode((), 0.0, 0.0, error=message)) for turn, each in enumerate(contenders)]
            for contender in contenders:
                progress.decoded(contender.name, True)
        else:
            for turn, contender, done in take_turns(self.model, contenders, call, number):
                made.append((turn, contender.name, done))
                progress.decoded(contender.name, done.error is not None)
        wanted = self._wanted(item, repeat, made)
        policies = {entrant.setup.name: entrant.policy for entrant in entrants}
        for turn, name, done in made:
            policy = policies[name]
            run = self._record(item, repeat, turn, name, done, wanted)
            self.log.append(run, None if policy is None else policy.state())

    def _wanted(
        self, item: Item, repeat: int, made: Sequence[tuple[int, str, Decode]]
    ) -> tuple[str, tuple[int, ...]] | None:
        """Whose text others are held against, and it: transformers' own, or plain decoding's where that failed."""
        texts = {name: done.token_ids for _, name, done in made if done.error is None}
        for run in self.log.runs:
            if (run.suite, run.prompt_index, run.repeat) == (self.suite.name, item.prompt_index, repeat):
                texts |= {run.policy: run.token_ids} if run.error is None else {}
        return next(((name, texts[name]) for name in (TRANSFORMERS, PLAIN) if name in texts), None)

    def _record(
        self, item: Item, repeat: int, turn: int, name: str, done: Decode, wanted: tuple[str, tuple[int, ...]] | None
    ) -> PromptRun:
        divergence, reference = None, None
        if wanted is not None and not self.decoding.temperature and done.error is None:
            try:
                apart = compare(self.model, item.ids, done.token_ids, wanted[1])
            except RuntimeError as error:  # such as too little memory: nobody knows whether the text is right
                message = " ".join(f"comparison: {type(error).__name__}: {error}".split())
                done = Decode((), 0.0, 0.0, error=message)
            else:
                reference = wanted[0]
                divergence = None if apart is None else (apart.position, apart.margin, apart.tie)
        tokenizer = self.model.tokenizer
        text = None if tokenizer is None else str(tokenizer.decode(list(done.token_ids), skip_special_tokens=True))
        return PromptRun(
            suite=self.suite.name,
            policy=name,
            prompt_index=item.prompt_index,
            category=item.category,
            repeat=repeat,
            turn=turn,
            prompt_tokens=len(item.ids),
            token_ids=done.token_ids,
            prefill_seconds=done.prefill_seconds,
            decode_seconds=done.decode_seconds,
            sections=done.sections,
            rounds=tuple((r.drafted, r.accepted, len(r.tokens), r.exit_layer or 0, r.skipped) for r in done.rounds),
            head_reads=done.head_reads,
            peak_memory=done.peak_memory,
            divergence=divergence,
            error=done.error,
            text=text,
            reference=reference,
            unasked=sum(r.drafted for r in done.rounds if r.fixed),
        )


def _forget(entrants: Sequence[Entrant]) -> None:
    """Let those who learn online begin a repetition as they began the first; who is in the midst of it is not here."""
    for entrant in entrants:
        if entrant.setup.online or (entrant.policy is not None and entrant.policy.state()):
            entrant.contender.reset()
