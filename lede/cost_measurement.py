"""Timing the engine's own operations, interleaved, on random tokens."""

from __future__ import annotations

import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from lede.cache import KVCache
from lede.cost_model import Kind, Measurement
from lede.devices import numbers_on
from lede.features import CALIBRATED_FEATURES, ConfidenceTrace, FeatureConfig
from lede.forecast import N_WEIGHTS, Forecast
from lede.history import History
from lede.kernels import reading_of
from lede.lookup import LookupConfig, LookupIndex
from lede.models import EarlyExitModel
from lede.observer import Observation, Observer
from lede.policies.base import LayerState
from lede.policies.learned import LearnedPolicy
from lede.verification import Chooser, TorchSource, Warp

MAX_Q = 17
"""Most tokens in a verification that is timed: the newest token of the text, and 16 copied ones."""

_HIDDEN = (64, 64)
_NAMES: dict[Kind, tuple[str, ...]] = {
    "features": tuple(name for name in CALIBRATED_FEATURES if name != "entropy"),
    "features_entropy": CALIBRATED_FEATURES,
    "features_top_k": tuple("confidence" if name == "entropy" else name for name in CALIBRATED_FEATURES),
}
"""Observations that differ in what is read off the logits and hardly in anything else."""
_REPEATING = 64  # distinct n-grams of the text whose index is timed
_CHUNK = 512  # tokens of a prefill at once, which bounds the memory of its masks


@dataclass(frozen=True)
class Case:
    """An operation to be timed."""

    kind: Kind
    """What it is."""
    first: int
    """Layers before it."""
    last: int
    """Layers after it."""
    q: int
    """Tokens."""
    context: int
    """Tokens in the cache before; 0 where nothing depends on it."""
    run: Callable[[], object]
    """Runs it once."""
    cache: KVCache | None = None
    """What to rewind afterwards."""
    before: tuple[Callable[[], object], ...] = ()
    """What decoding does just before, run untimed: it leaves the processor's caches as they are there."""


class Workbench:
    """The operations of a round on one model, ready to be run.

    Args:
        model: The model.
        contexts: Tokens in the cache before a block.
        candidates: Candidate layers.
    """

    def __init__(self, model: EarlyExitModel, contexts: Sequence[int], candidates: Sequence[int]) -> None:
        self.model = model
        self.candidates = tuple(candidates)
        draw = np.random.default_rng(0)
        self._ids = torch.tensor(draw.integers(model.vocab_size, size=(1, max(*contexts, MAX_Q))), device=model.device)
        self._caches = {context: self._filled(context) for context in contexts}
        # looked up once: next to the shortest operations, looking up the device takes long
        on_cuda = model.device.type == "cuda"
        self._wait: Callable[[], None] | None = partial(torch.cuda.synchronize, model.device) if on_cuda else None
        self._scratch = model.new_cache(MAX_Q)
        block = model.block(self._scratch, 0, MAX_Q)
        self._hidden = model.embed(self._ids[:, :MAX_Q], block)
        self._states = [self._hidden[:, i : i + 1] for i in range(MAX_Q)]
        self._logits = model.head(self._hidden)[0]
        rows = tuple(tuple(draw.normal(size=N_WEIGHTS).tolist()) for _ in candidates)
        forecast = Forecast(self.candidates, rows, rows)
        features = {kind: FeatureConfig(names, forecast=forecast) for kind, names in _NAMES.items()}
        parts = (model.n_layers, model.vocab_size, reading_of(model))
        self._observers = {kind: Observer(each, *parts) for kind, each in features.items()}
        trace = ConfidenceTrace(1.0, FeatureConfig().window)
        for value in draw.random(2 * trace.window).tolist():
            trace.push(value)
        self._history = History(trace)
        widths = (len(CALIBRATED_FEATURES), *_HIDDEN, 2)
        network = [(draw.normal(size=(b, a)), draw.normal(size=b)) for a, b in pairwise(widths)]
        self._policy = LearnedPolicy.from_network(
            network, features=features["features_entropy"], candidates=self.candidates
        )
        self._chooser = Chooser(Warp(), TorchSource(torch.Generator()))
        self._index = LookupIndex(LookupConfig(), [n % _REPEATING for n in range(max(*contexts, _REPEATING) + 1)])
        # the whole model's own choices, so that acceptance goes through the whole draft
        self._drafted = self._logits.float().argmax(-1).tolist()

    def cases(self) -> list[Case]:
        """Every operation to be timed."""
        depth = self.model.n_layers
        self._read(1)()
        look = partial(self._look, "features_entropy")
        state = LayerState(self.candidates[0], 0, look())
        before_scan = partial(self._observers["features"].before_scan, self._history)
        pass_on, read = self._pass_on, self._read(1)
        decisions: dict[Kind, tuple[Callable[[], object], tuple[Callable[[], object], ...]]] = {
            "observe": (before_scan, (pass_on,)),
            **{kind: (partial(self._look, kind), (pass_on, read)) for kind in _NAMES},
            "policy": (partial(self._policy.scan, state), (pass_on, read, look)),
            "choose": (self._choose, (pass_on, read)),
            "index": (self._extend, (pass_on,)),
            "propose": (partial(self._index.propose, MAX_Q - 1), (pass_on,)),
        }
        found = [Case(kind, 0, 0, 1, 0, run, before=before) for kind, (run, before) in decisions.items()]
        for q in range(1, MAX_Q + 1):
            found.append(Case("head", 0, 0, q, 0, self._head(q), before=(pass_on,)))
            found.append(Case("accept", 0, 0, q, 0, self._accept(q), before=(pass_on, self._read(q))))
        middle = depth // 2
        spans = {(i, i + 1) for i in (0, middle, depth - 1)}
        spans |= {(0, depth), (middle, depth), *((0, layer) for layer in self.candidates)}
        for context, cache in self._caches.items():
            found.append(Case("embed", 0, 0, 1, context, self._embed(context), before=(pass_on, read, self._choose)))
            for first, last in sorted(spans):
                found.append(Case("layers", first, last, 1, context, self._layers(first, last, context), cache))
            for layer in self.candidates:
                passed = self._layers(0, layer, context)
                drafted = (self._verify(layer, 1, context), passed, read)
                found.append(Case("again", 0, layer, 1, context, passed, cache, before=drafted))
            for layer in self.verified_from():
                for q in range(1, MAX_Q + 1):
                    verify = self._verify(layer, q, context)
                    found.append(Case("verify", layer, depth, q, context, verify, cache, self._round(layer, context)))
        return found

    def _round(self, layer: int, context: int) -> tuple[Callable[[], object], ...]:
        """What came before a verification: another one, and drafts; before a plain pass another plain pass."""
        if not layer:
            return (self._layers(0, self.model.n_layers, context),)
        drafts = self._layers(0, layer, context)
        return (self._layers(layer, self.model.n_layers, context), drafts, drafts)

    def verified_from(self) -> list[int]:
        """Layers that verification is timed from: 0 (a plain pass), the middle and the last candidate."""
        return sorted({0, self.candidates[len(self.candidates) // 2], self.candidates[-1]})

    def time(self, case: Case) -> float:
        """Seconds of one run."""
        for step in case.before:
            step()
            if case.cache is not None:
                case.cache.rewind(case.context)
        wait = self._wait
        if wait is not None:
            wait()
        start = perf_counter()
        case.run()
        if wait is not None:
            wait()
        elapsed = perf_counter() - start
        if case.cache is not None:
            case.cache.rewind(case.context)
        return elapsed

    def _filled(self, context: int) -> KVCache:
        cache = self.model.new_cache(context + MAX_Q)
        for start in range(0, context, _CHUNK):
            n_tokens = min(_CHUNK, context - start)
            block = self.model.block(cache, start, n_tokens)
            hidden = self.model.embed(self._ids[:, start : start + n_tokens], block)
            self.model.run_layers(hidden, 0, self.model.n_layers, block)
        return cache

    def _pass_on(self) -> None:
        """One token through the layers of the first candidate, behind nothing."""
        block = self.model.block(self._scratch, 0, 1)
        self.model.run_layers(self._states[0], 0, self.candidates[0], block)
        self._scratch.rewind(0)

    def _embed(self, context: int) -> Callable[[], object]:
        model, cache, token = self.model, self._caches[context], int(self._ids[0, 0])

        def run() -> None:
            block = model.block(cache, context, 1)
            model.embed(numbers_on(model.device, [[token]]), block)

        return run

    def _layers(self, first: int, last: int, context: int) -> Callable[[], object]:
        model, cache, hidden = self.model, self._caches[context], self._states[0]
        return lambda: model.run_layers(hidden, first, last, model.block(cache, context, 1))

    def _head(self, q: int) -> Callable[[], torch.Tensor]:
        hidden = self._hidden[:, :q].contiguous()
        return lambda: self.model.head(hidden)

    def _read(self, q: int) -> Callable[[], None]:
        """A head read whose logits are kept for what is timed next, which then finds them where decoding does."""
        head = self._head(q)

        def run() -> None:
            self._logits = head()[0]

        return run

    def _choose(self) -> object:
        return self._chooser.choose(self._logits[0], ())

    def _accept(self, q: int) -> Callable[[], object]:
        drafted, nothing = self._drafted[: q - 1], [None] * (q - 1)
        return lambda: self._chooser.verify(self._logits, drafted, nothing, ())

    def _extend(self) -> None:
        """One more token, and the search for what then is the end of the text."""
        self._index.extend((len(self._index.tokens) % _REPEATING,))
        self._index.match()

    def _verify(self, layer: int, q: int, context: int) -> Callable[[], object]:
        model, cache, states = self.model, self._caches[context], self._states[:q]
        drafted, nothing = self._drafted[: q - 1], [None] * (q - 1)

        def run() -> None:
            hidden = states[0] if q == 1 else torch.cat(states, dim=1)
            block = model.block(cache, context, q)
            logits = model.head(model.run_layers(hidden, layer, model.n_layers, block))[0]
            self._chooser.verify(logits, drafted, nothing, ())

        return run

    def _look(self, kind: Kind) -> Observation:
        """Read the logits and observe, as the drafter does in the scan."""
        observer = self._observers[kind]
        reading = observer.read(self._logits[0])
        return observer.in_scan(self._history, self.candidates[0], reading, reading.token)


@torch.inference_mode()
def measure(
    model: EarlyExitModel,
    contexts: Sequence[int],
    candidates: Sequence[int],
    repeats: int,
    after_each: Callable[[], None] | None = None,
) -> list[Measurement]:
    """Time every operation `repeats` times after a warm-up, each time in another order.

    Interleaving gives every operation the caches that others leave behind, as in decoding, and spreads a machine's
    drift over all of them. An accelerator is waited for after each operation, so that launches do not overlap as they
    may in decoding.
    """
    bench = Workbench(model, contexts, candidates)
    cases = bench.cases()
    times: list[list[float]] = [[] for _ in cases]
    order = list(range(len(cases)))
    for turn in range(repeats + 1):
        random.Random(turn).shuffle(order)
        for number in order:
            elapsed = bench.time(cases[number])
            if turn:
                times[number].append(elapsed)
        if after_each is not None:
            after_each()
    return [_summary(case, spent) for case, spent in zip(cases, times, strict=True)]


def fitting(contexts: Sequence[int], model: EarlyExitModel) -> tuple[int, ...]:
    """The contexts behind which the model has positions for a verification.

    Raises:
        ValueError: There is none.
    """
    longest = model.max_positions - MAX_Q
    found = tuple(context for context in contexts if context <= longest)
    if not found:
        raise ValueError(f"no context of {', '.join(map(str, contexts))} fits; the model has room for {longest} tokens")
    return found


def device_name(device: torch.device) -> str:
    """What the processor or accelerator calls itself; the kind of processor where it is not told."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _summary(case: Case, times: Sequence[float]) -> Measurement:
    lower, median, upper = (float(value) for value in np.quantile(times, (0.25, 0.5, 0.75)))
    return Measurement(case.kind, case.first, case.last, case.q, case.context, median, lower, upper)
