"""`lede buffer split`: a part of a store held out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import tyro

from lede.buffers.storage import Place, storage_for
from lede.buffers.store import TraceStore, TransitionStore, open_store
from lede.buffers.whole_store import free_storage, write_whole_store
from lede.seeding import Purpose, numpy_stream


@dataclass(frozen=True)
class SplitConfig:
    """Settings of `lede buffer split`."""

    store: tyro.conf.Positional[str]
    """Folder or URL of the store."""
    holdout: float = 0.1
    """Share of the texts that is held out."""
    by: Literal["prompt"] = "prompt"
    """What stays together: all rows of a prompt, and all prompts with the same text."""
    seed: int = 0
    """Of the choice of texts."""
    out: str | None = None
    """Start of the two new stores' names, NAME-train.zarr and NAME-holdout.zarr; without it, the store's own name."""


@dataclass(frozen=True)
class Halves:
    """The two stores of a split."""

    train: str
    """Where the larger part is."""
    holdout: str
    """Where the part held out is."""
    train_prompts: int
    """Prompts of the first."""
    holdout_prompts: int
    """Prompts of the second."""


def held_out_prompts(store: TransitionStore | TraceStore, share: float, seed: int = 0) -> tuple[int, ...]:
    """Which prompts of a store a split holds out, ascending.

    Prompts with the same text count as one and stay together, or what is held out would have been seen. The choice
    depends on the store's content, the share and the seed, not on shards.

    Args:
        store: The store.
        share: Share of the texts, in (0, 1); at least one text is on either side.
        seed: Of the choice.

    Raises:
        ValueError: The share is out of range, or the store has fewer than two texts.
    """
    if not 0 < share < 1:
        raise ValueError(f"holdout must be above 0 and below 1, got {share}")
    texts: dict[bytes, list[int]] = {}
    for record in store:
        texts.setdefault(hashlib.sha256(record.prompt_ids.tobytes()).digest(), []).append(record.prompt_index)
    groups = list(texts.values())
    if len(groups) < 2:
        raise ValueError(f"a split needs at least two different prompts, {store.path or 'the store'} has {len(groups)}")
    n = min(max(round(share * len(groups)), 1), len(groups) - 1)
    chosen = numpy_stream(seed, Purpose.SPLIT).permutation(len(groups))[:n].tolist()
    return tuple(sorted(index for group in chosen for index in groups[group]))


def split_store(place: Place, holdout: float = 0.1, seed: int = 0, out: str | None = None) -> Halves:
    """Make two stores of one, with the same settings and prompt numbers; `merge_stores` puts them together again.

    Args:
        place: Folder or URL of the store, which stays as it is.
        holdout: Share of the texts held out.
        seed: Of the choice, see `held_out_prompts`.
        out: Start of the new stores' names; None for the store's own.

    Returns:
        The two stores; both appear, or neither.

    Raises:
        StoreError: There is no store, or it is damaged.
        ValueError: The share is out of range, there are too few texts, or something is at a new store's place.
    """
    store = open_store(place)
    start = storage_for(place).url.rstrip("/").removesuffix(".zarr") if out is None else out
    names = f"{start}-train.zarr", f"{start}-holdout.zarr"
    train, held = (free_storage(name) for name in names)
    chosen = set(held_out_prompts(store, holdout, seed))
    n_held = write_whole_store(held, store.settings, (r for r in store if r.prompt_index in chosen))
    try:
        n_train = write_whole_store(train, store.settings, (r for r in store if r.prompt_index not in chosen))
    except BaseException:
        held.remove_folder("")
        raise
    return Halves(*names, n_train, n_held)


def split_buffer(config: SplitConfig) -> None:
    """Split a store and say where the parts are.

    Raises:
        ValueError: See `split_store`.
    """
    halves = split_store(config.store, config.holdout, config.seed, config.out)
    print(f"{halves.train_prompts:,} prompts in {halves.train}, {halves.holdout_prompts:,} in {halves.holdout}")
