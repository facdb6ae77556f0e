"""A store on disk in parts that are read one at a time, and what must be known of all of them before training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lede.seeding import Purpose, numpy_stream
from lede.transitions import EpisodeUnit, Transitions
from lede.windows import PartSize

if TYPE_CHECKING:
    from lede.buffers.records import PromptRollout, PromptTrace
    from lede.buffers.settings import StoreSettings
    from lede.buffers.store import TraceStore, TransitionStore

Play = Callable[["Sequence[PromptTrace]"], "list[PromptRollout]"]
"""Plays decisions on traces."""

_N_PROBE = 4096
_SAMPLE_STREAM = 4  # among those of training


class StoreParts:
    """Transitions by shard; of traces by shard and pass of decisions that are played on it.

    Args:
        store: On disk.
        plays: What is played on traces, once each; empty for transitions.
        episode: What an episode is.
    """

    def __init__(
        self, store: TransitionStore | TraceStore, plays: Sequence[Play] = (), episode: EpisodeUnit = "token"
    ) -> None:
        self.store, self.plays, self.episode = store, tuple(plays), episode
        self.n_passes = max(1, len(self.plays))
        self.held_out: Collection[int] = ()

    def __len__(self) -> int:
        return len(self.store.shards) * self.n_passes

    def load(self, part: int) -> Transitions:
        """The transitions of a part, without the prompts in `held_out`.

        Raises:
            ValueError: There are none.
        """
        shard, number = divmod(part, self.n_passes)
        found = self.transitions(self.play(self.store.shard(self.store.shards[shard]), number))
        if found is None:
            raise ValueError(f"part {part} of {self.store.path} holds no decision that is trained on")
        return found

    def play(self, records: Sequence[PromptTrace] | Sequence[PromptRollout], number: int) -> list[PromptRollout]:
        """The rollouts of a shard's records in a pass."""
        return self.plays[number](records) if self.plays else list(records)  # type: ignore[arg-type]  # by the store

    def transitions(self, rollouts: Sequence[PromptRollout]) -> Transitions | None:
        """The transitions of rollouts, without the prompts in `held_out`; None if no decision is left."""
        kept = [each for each in rollouts if each.n_rows and each.prompt_index not in self.held_out]
        return Transitions.from_rollouts(kept, self.episode) if kept else None


class HoldOut:
    """Chooses prompts by a hash of their text, so that copies of a prompt go the same way, and no list is needed.

    Args:
        share: Share of the prompts that are chosen.
        seed: Another one chooses others.
    """

    def __init__(self, share: float, seed: int) -> None:
        self.share = share
        self._key = seed.to_bytes(16, "big")

    def __call__(self, prompt_ids: npt.NDArray[np.int64]) -> bool:
        """Whether a prompt is chosen."""
        text = np.ascontiguousarray(prompt_ids, dtype="<i8").tobytes()
        digest = hashlib.blake2b(text, digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64


@dataclass
class Survey:
    """What is gathered while all parts are read once."""

    settings: StoreSettings
    """Of the transitions."""
    n_parts: int
    """Parts that will be seen."""
    sizes: list[PartSize] = field(default_factory=list)
    """What each part holds."""
    exits: dict[int, int] = field(default_factory=dict)
    """Exits by candidate, over the first pass."""
    terminated: bool = False
    """Whether an episode ends that is no truncation."""

    def __post_init__(self) -> None:
        width = len(self.settings.features.names)
        self.exits = dict.fromkeys(self.settings.candidates, 0)
        self._n, self._mean, self._squares = 0, np.zeros(width), np.zeros(width)
        self._probes: list[npt.NDArray[np.float32]] = []

    def count_exits(self, rollouts: Sequence[PromptRollout]) -> None:
        """Count the exits of a shard."""
        for rollout in rollouts:
            layers, counts = np.unique(rollout.exit_layer, return_counts=True)
            for layer, count in zip(layers.tolist(), counts.tolist(), strict=True):
                if layer in self.exits:
                    self.exits[layer] += count

    def add(self, part: Transitions | None) -> None:
        """Take the next part; None for one without decisions.

        Mean and squares are merged as in T. F. Chan, G. H. Golub and R. J. LeVeque, Updating formulae and a pairwise
        algorithm for computing sample variances, 1979: sums of squares would cancel.
        """
        if part is None:
            self.sizes.append(PartSize(0, 0))
            return
        states, n = part.states, len(part)
        self.sizes.append(PartSize(n, len(part.observations) - n))
        mean = states.mean(axis=0, dtype=np.float64)
        distance, total = mean - self._mean, self._n + n
        self._squares += states.var(axis=0, dtype=np.float64) * n + distance**2 * (self._n * n / total)
        self._mean += distance * (n / total)
        self._n = total
        self.terminated = self.terminated or bool(part.terminated.any())
        self._probes.append(part.probe(-(-_N_PROBE // self.n_parts)).copy())  # a view would keep the part alive

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """Mean of each feature over the states, `(feature,)`."""
        return self._mean

    @property
    def std(self) -> npt.NDArray[np.float64]:
        """Standard deviation of each feature, `(feature,)`; 1 for one that never changes."""
        std = np.sqrt(self._squares / max(1, self._n))
        return np.where(std > 1e-6, std, 1.0)

    @property
    def probe(self) -> npt.NDArray[np.float32]:
        """Some of the states, of all parts, `(state, feature)`."""
        return np.concatenate(self._probes or [np.zeros((0, self._mean.size), dtype=np.float32)])


def sample_shards(store: TraceStore, rows: int, seed: int) -> TraceStore:
    """Shards at random, in memory, with at most `rows` rows in all, or the smallest one if none fits."""
    rng, kept = numpy_stream(seed, Purpose.TRAINING, _SAMPLE_STREAM), list[int]()
    left = rows
    for i in rng.permutation(len(store.shards)).tolist():
        if store.shards[i].rows <= left:
            kept.append(i)
            left -= store.shards[i].rows
    kept = kept or [min(range(len(store.shards)), key=lambda i: store.shards[i].rows)]
    return type(store)(store.settings, [record for i in sorted(kept) for record in store.shard(store.shards[i])])
