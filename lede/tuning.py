"""Every policy argument of a benchmark made ready to be measured, its settings chosen on validation prompts alone.

A name alone is tuned: its settings are raced by speed on the validation prompts, interleaved with plain decoding. A
name with settings, and a folder, are taken as they are.

Everybody who is tuned gets the same prompts and at least as many evaluations as the learned policies had. An evaluation
is one setting on one prompt: decoded, or played on the prompt's trace where a fit can do with that.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lede.bench_runs import PLAIN, Cost
from lede.policies import LayerSkippingPolicy, Policy, parse_policy
from lede.rivals import is_rival
from lede.tuned import Point, Tuned, as_it_is, budget_of, is_tuned
from lede.tuning_grids import FITTED, coarse_layers, space_of, text_of, texts_space
from lede.tuning_log import TuningDecode, TuningLog, TuningRecord
from lede.tuning_measure import EngineMeasure, Measure, Ready
from lede.tuning_race import Evaluate, Race, Setting, Space

if TYPE_CHECKING:
    from lede.models import EarlyExitModel
    from lede.statistics import Round

__all__ = ["Point", "Tuned", "Tuner", "Usage", "as_it_is", "budget_of", "check_disjoint", "is_tuned", "tune"]

GROUP = 7
"""Settings that share a plain decode: few enough for a machine whose speed drifts."""
TUNED_FOLDER = "tuned"
"""Folder of the policies whose state was kept."""


@dataclass(frozen=True)
class Usage:
    """What a policy does on the validation prompts."""

    draft_length: float
    """Mean tokens drafted in the rounds that drafted at a layer; 0 when none did."""
    exit_layer: int
    """The layer that most rounds drafted at, the shallowest of equals; 0 when none did."""
    evaluations: int
    """Prompts that were decoded."""
    seconds: float
    """Wall-clock that took."""


def check_disjoint(validation: Sequence[Sequence[int]], test: Sequence[Sequence[int]]) -> None:
    """Raise ValueError when a validation prompt is a test prompt too."""
    known = {tuple(ids): place for place, ids in enumerate(test)}
    shared = [(i, known[tuple(ids)]) for i, ids in enumerate(validation) if tuple(ids) in known]
    if shared:
        pairs = ", ".join(f"{i} = {j}" for i, j in shared[:5])
        raise ValueError(f"{len(shared)} validation prompts are test prompts too (validation = test: {pairs})")


class Tuner:
    """Tunes policy arguments on the validation prompts of one suite.

    Args:
        model: The model.
        validation: Token ids of each validation prompt.
        max_new_tokens: Budget of new tokens a prompt.
        temperature: 0 decodes greedily.
        seed: Of the tokens drawn, where they are, and of fits.
        budget: Evaluations that everybody who is tuned gets at least; see `budget_of`.
        suite: Name of the suite.
        test: Token ids of the test prompts, to make sure that none of them is a validation prompt.
        out: Folder of tuning.json; None keeps nothing.
        measure: How settings are decoded; by the engine unless given.
        tell: Called with a line now and then.

    Raises:
        ValueError: A validation prompt is a test prompt too, or `out` holds tunings of something else.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        validation: Sequence[Sequence[int]],
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        budget: int = 0,
        *,
        suite: str = "",
        test: Sequence[Sequence[int]] = (),
        out: Path | None = None,
        measure: Measure | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        check_disjoint(validation, test)
        self.model, self.suite, self.budget, self.out = model, suite, budget, out
        self.validation = [list(ids) for ids in validation]
        self.max_new_tokens, self.temperature, self.seed = max_new_tokens, temperature, seed
        self._measure = measure or EngineMeasure(model, self.validation, max_new_tokens, temperature, seed)
        self._tell = tell or (lambda line: None)
        digest = hashlib.sha256(json.dumps(self.validation).encode()).hexdigest()
        identity = {
            "model": model.name,
            "n_layers": model.n_layers,
            "dtype": str(getattr(model, "dtype", None)),
            "device": str(getattr(model, "device", None)),
            "validation": digest,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        self._log = TuningLog(out, suite, identity)

    def tune(self, text: str, keep_state: bool = False) -> Tuned:
        """Make a policy argument ready.

        Args:
            text: A name, a name with settings, or a folder.
            keep_state: Whether a policy that searches keeps what it found and searches no more; it is then a folder in
                `out`. Otherwise it starts the test as it started the tuning, and searches in its own time.

        Raises:
            ValueError: It is no policy, there is nothing to tune it on, or every setting failed.
        """
        if not is_tuned(text):
            return as_it_is(text)
        if not self.validation:
            raise ValueError(f"'{text}' is tuned on validation prompts and the suite has none; give it settings")
        record = self._log.record(text)
        ready: dict[str, Policy | None] = {}
        space = self._space(text, record)
        race = Race(space, len(self.validation), self._evaluate(text, record, ready), self._left(record))
        chosen = text_of(text, race.run())
        failures = [decode.error or decode.plain_error for decode in record.decodes]
        if failures and None not in failures:
            raise ValueError(f"every setting of '{text}' failed, the first with {failures[0]}")
        if (record.chosen, record.budget) != (chosen, self.budget):
            record.chosen, record.budget = chosen, self.budget
            self._log.save()
        points = tuple(self._point(text, race, setting, record) for setting in race.ranking())
        policy = None if is_rival(chosen) else parse_policy(chosen)
        tuned = Tuned(policy, text, chosen, self._cost(record), points)
        return self._kept(tuned, record) if keep_state and isinstance(policy, LayerSkippingPolicy) else tuned

    def usage(self, text: str) -> Usage:
        """Decode the validation prompts by a policy and count.

        Raises:
            ValueError: It is no policy, there is no prompt, or it failed on all of them.
        """
        if not self.validation:
            raise ValueError(f"what '{text}' does is counted on validation prompts, and the suite has none")
        record = self._log.record(f"{text} (usage)")
        if record.fit is None:
            begin, ready = time.perf_counter(), Ready(text, parse_policy(text))
            drafting: list[Round] = []
            failures: list[str] = []
            for prompt in range(len(self.validation)):
                (done,) = self._measure([ready], prompt, 0)
                if done.error is not None:
                    failures.append(done.error)
                drafting += [r for r in done.rounds if r.exit_layer is not None and r.drafted]  # a copy has no layer
            if len(failures) == len(self.validation):
                raise ValueError(f"'{text}' failed on every validation prompt, the first with {failures[0]}")
            layers = Counter(r.exit_layer for r in drafting if r.exit_layer is not None)
            record.fit = {
                "draft_length": sum(r.drafted for r in drafting) / len(drafting) if drafting else 0.0,
                "exit_layer": min(layers, key=lambda layer: (-layers[layer], layer), default=0),
                "evaluations": len(self.validation),
                "seconds": time.perf_counter() - begin,
            }
            self._log.save()
        return Usage(**record.fit)

    def _space(self, text: str, record: TuningRecord) -> Space:
        if text not in FITTED:
            return space_of(text, self.model.n_layers, self.max_new_tokens)
        if record.fit is None:
            self._tell(f"fitting {text} on {len(self.validation)} prompts")
            record.fit = self._fit(text)
            record.seconds += record.fit["collecting_seconds"] + record.fit["search_seconds"]
            self._log.save()
        return texts_space(tuple(record.fit["texts"]))

    def _fit(self, name: str) -> dict[str, Any]:
        """The settings that are best on recorded texts, and what it took to know."""
        given = self.model, self.validation, self.max_new_tokens, self.temperature, self.seed
        if name == "lookup":
            from lede.lookup_fit import fit_lookups

            return fit_lookups(*given, layers=coarse_layers(self.model.n_layers)).to_json()
        from lede.threshold_candidates import fit_candidates

        return fit_candidates(*given).to_json()

    def _left(self, record: TuningRecord) -> int:
        """Decodes that the budget leaves after what was played on traces."""
        played = 0 if record.fit is None else int(record.fit["evaluations"])
        return max(0, self.budget - played)

    def _evaluate(self, name: str, record: TuningRecord, ready: dict[str, Policy | None]) -> Evaluate:
        """Decodes in groups, each beside plain decoding; those on record are not made again."""
        known = {decode.key: decode for decode in record.decodes}

        def evaluate(settings: Sequence[Setting], prompt: int, repeat: int) -> Sequence[TuningDecode]:
            texts = [text_of(name, setting) for setting in settings]
            waiting = [text for text in texts if (text, prompt, repeat) not in known]
            begin = time.perf_counter()
            for first in range(0, len(waiting), GROUP):
                group = [self._ready(text, record, ready, prompt, repeat) for text in waiting[first : first + GROUP]]
                for decode in self._decode(group, prompt, repeat, len(record.decodes)):
                    known[decode.key] = decode
                    record.decodes.append(decode)
                for each in group:
                    state = {} if each.policy is None else each.policy.state()
                    if state:
                        record.states[each.text] = state
                now = time.perf_counter()
                record.seconds, begin = record.seconds + now - begin, now
                self._log.save()
                self._tell(f"tuning {name}: {len(record.decodes)} decodes")
            return [known[text, prompt, repeat] for text in texts]

        return evaluate

    def _ready(
        self, text: str, record: TuningRecord, ready: dict[str, Policy | None], prompt: int, repeat: int
    ) -> Ready:
        """The setting with what it learned on the prompts before; a repetition starts anew."""
        if text not in ready:
            policy = ready[text] = None if is_rival(text) else parse_policy(text)
            if policy is not None and record.states.get(text):
                policy.restore(record.states[text])
        found = ready[text]
        if found is not None and prompt == 0 and repeat:
            found.reset()
        return Ready(text, found)

    def _decode(self, group: Sequence[Ready], prompt: int, repeat: int, turn: int) -> list[TuningDecode]:
        plain, *others = self._measure([Ready(PLAIN, None), *group], prompt, turn)
        if plain.error is not None:
            message = f"plain decoding failed on validation prompt {prompt}: {plain.error}"
            return [TuningDecode(each.text, prompt, repeat, 0, 0.0, 0, 0.0, plain_error=message) for each in group]
        return [
            TuningDecode(
                settings=each.text,
                prompt=prompt,
                repeat=repeat,
                tokens=max(len(done.token_ids) - 1, 0),
                seconds=done.decode_seconds,
                plain_tokens=max(len(plain.token_ids) - 1, 0),
                plain_seconds=plain.decode_seconds,
                error=done.error,
            )
            for each, done in zip(group, others, strict=True)
        ]

    def _point(self, name: str, race: Race, setting: Setting, record: TuningRecord) -> Point:
        text = text_of(name, setting)
        decodes = [decode for decode in record.decodes if decode.settings == text and decode.error is None]
        seconds = sum(decode.seconds for decode in decodes)
        rate = sum(decode.tokens for decode in decodes) / seconds if seconds > 0 else None
        return Point(text, race.speedup(setting), rate, race.seen(setting))

    def _cost(self, record: TuningRecord) -> Cost:
        decoded, fit = len(record.decodes), record.fit
        failed = len({decode.prompt for decode in record.decodes if decode.plain_error is not None})
        said = f"{decoded} decodes" + (f", {failed} validation prompts failed" if failed else "")
        if fit is None:
            return Cost(len(self.validation), 0.0, record.seconds, 0.0, decoded, said)
        return Cost(
            prompts=len(self.validation),
            collecting_seconds=fit["collecting_seconds"],
            search_seconds=record.seconds - fit["collecting_seconds"],
            evaluations=decoded + fit["evaluations"],
            note=f"{said}, {fit['evaluations']} played on traces",
        )

    def _kept(self, tuned: Tuned, record: TuningRecord) -> Tuned:
        """The best setting whose search has found a set, with it, as a folder where there is room for one.

        Where no search has found any, the policy never drafts.
        """
        kept = [(point.settings, self._restored(point.settings, record)) for point in tuned.points]
        text, policy = next((pair for pair in kept if pair[1].best is not None), kept[0])
        frozen, n_tries = policy.frozen(), len(policy.search_report())
        said = f"set kept after {n_tries} tries" if frozen.best is not None else "no set was found: it never drafts"
        settings = f"{text} ({said})"
        if self.out is not None:
            folder = self.out / TUNED_FOLDER / f"{self.suite or 'suite'}-{frozen.kind}"
            frozen.save_pretrained(str(folder))
            settings = str(folder)
        cost = replace(tuned.cost, note=f"{tuned.cost.note}; {text}, {said}")
        return replace(tuned, policy=frozen, settings=settings, cost=cost)

    def _restored(self, text: str, record: TuningRecord) -> LayerSkippingPolicy:
        policy = parse_policy(text)
        assert isinstance(policy, LayerSkippingPolicy)
        policy.restore(record.states.get(text, {}))
        return policy


def tune(
    model: EarlyExitModel,
    text: str,
    validation: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    budget: int = 0,
    *,
    keep_state: bool = False,
    **settings: Any,
) -> Tuned:
    """Make one policy argument ready, its settings chosen on the validation prompts.

    Args:
        model: The model.
        text: A name, a name with settings, or a folder.
        validation: Token ids of each validation prompt.
        max_new_tokens: Budget of new tokens a prompt.
        temperature: 0 decodes greedily.
        seed: Of the tokens drawn, where they are, and of fits.
        budget: Evaluations at least; see `budget_of`.
        keep_state: As `Tuner.tune` takes it.
        **settings: `suite`, `test`, `out`, `measure` and `tell` of `Tuner`.

    Raises:
        ValueError: As `Tuner` and `Tuner.tune` raise it.
    """
    return Tuner(model, validation, max_new_tokens, temperature, seed, budget, **settings).tune(text, keep_state)
