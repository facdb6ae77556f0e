"""`lede buffer merge`: several stores as one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge as merge_sorted
from itertools import combinations

import numpy as np
import tyro

from lede.buffers.records import PromptRollout, PromptTrace
from lede.buffers.settings import StoreSettings
from lede.buffers.storage import Place, storage_for
from lede.buffers.store import TraceStore, TransitionStore, open_store
from lede.buffers.whole_store import free_storage, write_whole_store

AnyStore = TransitionStore | TraceStore

OF_A_COLLECTION = ("prompts_digest", "seed", "explore", "epsilon")
"""Settings that say which collection a row comes from, and nothing about what it means."""


@dataclass(frozen=True)
class MergeConfig:
    """Settings of `lede buffer merge`."""

    stores: tyro.conf.Positional[tuple[str, ...]]
    """Folders or URLs of the stores, two or more."""
    out: str
    """Folder or URL of the store to make; must not exist."""
    renumber: bool = False
    """Lay different collections (other prompts, seed or exploration) one after the other, with new prompt numbers."""


@dataclass(frozen=True)
class Merged:
    """What a merge came to."""

    prompts: int
    """Prompts of the new store."""
    duplicates: int
    """Prompts that several stores had; one copy of each is kept."""


def merge_stores(stores: Sequence[Place], out: Place, renumber: bool = False) -> Merged:
    """Make one store of several.

    Parts of one collection, which have the same settings, are put together by prompt index; of a prompt that several
    have, the first store's record is kept. With `renumber` the stores may be of different collections on the same
    model, features and rewards; their prompts get new numbers in the order of the stores. The merged store then has a
    prompts digest of its own, so that neither collection can be resumed in it.

    Args:
        stores: Folders or URLs, two or more.
        out: Folder or URL of the new store; appears whole or not at all.
        renumber: Whether to lay different collections one after the other.

    Raises:
        StoreError: A store is missing or damaged.
        ValueError: The stores differ in what must be the same (each difference is named with both sides), two have
            different texts for one prompt, or something is at `out` already.
    """
    if len(stores) < 2:
        raise ValueError(f"a merge takes two stores or more, got {len(stores)}")
    target = free_storage(out)
    urls = [storage_for(place).url for place in stores]
    if len(set(urls)) < len(urls):
        raise ValueError(f"a store is named twice: {', '.join(urls)}")
    opened = [open_store(place) for place in stores]
    places = list(zip(urls, opened, strict=True))
    for (url, store), (other_url, other) in combinations(places, 2):
        _check_alike(url, store.settings, other_url, other.settings, renumber)
    if renumber:
        settings = _joint_settings([store.settings for store in opened])
        return Merged(write_whole_store(target, settings, _renumbered(opened)), 0)
    union = _Union(opened, urls)
    return Merged(write_whole_store(target, opened[0].settings, union), union.duplicates)


def merge_buffers(config: MergeConfig) -> None:
    """Merge stores and say what came of it.

    Raises:
        ValueError: See `merge_stores`.
    """
    merged = merge_stores(config.stores, config.out, config.renumber)
    repeated = f"; {merged.duplicates:,} were in several stores and are kept once" if merged.duplicates else ""
    print(f"{merged.prompts:,} prompts written to {config.out}{repeated}")


def _check_alike(url: str, settings: StoreSettings, other_url: str, other: StoreSettings, renumber: bool) -> None:
    lines = settings.differences(other)
    of_collection = [line for line in lines if line.split(":")[0] in OF_A_COLLECTION]
    odd = [line for line in lines if line not in of_collection] if renumber else lines
    if odd:
        only = (
            ""
            if len(odd) > len(of_collection) or renumber
            else (
                ". They are other collections of the same model: renumbering (--renumber) lays them one after the other"
            )
        )
        raise ValueError(
            f"{url} and {other_url} can't be merged, they differ ({url} / {other_url}): {'; '.join(odd)}{only}"
        )
    if renumber and not of_collection:
        raise ValueError(
            f"{url} and {other_url} are parts of one collection, whose prompts have their numbers: leave out renumber"
        )


def _joint_settings(settings: Sequence[StoreSettings]) -> StoreSettings:
    digest = hashlib.sha256(" ".join(each.prompts_digest for each in settings).encode()).hexdigest()
    first = settings[0]
    explorers = dict.fromkeys(each.explore for each in settings if each.explore is not None)
    return replace(
        first,
        prompts_digest=digest,
        explore=" + ".join(explorers) or None,
        epsilon=first.epsilon if len({each.epsilon for each in settings}) == 1 else None,
    )


def _renumbered(stores: Sequence[AnyStore]) -> Iterator[PromptTrace | PromptRollout]:
    n = 0
    for store in stores:
        for record in store:
            yield replace(record, prompt_index=n)
            n += 1


class _Union:
    """The records of all stores by ascending prompt index, each prompt once.

    Args:
        stores: The stores.
        urls: Where they are, for messages.
    """

    def __init__(self, stores: Sequence[AnyStore], urls: Sequence[str]) -> None:
        self._stores, self._urls = stores, urls
        self.duplicates = 0

    def __iter__(self) -> Iterator[PromptTrace | PromptRollout]:
        streams = [_numbered(store, place) for place, store in enumerate(self._stores)]
        kept: tuple[int, PromptTrace | PromptRollout] | None = None
        for index, place, record in merge_sorted(*streams, key=lambda each: each[:2]):
            if kept is not None and kept[1].prompt_index == index:
                if not _same_text(kept[1], record):
                    raise ValueError(
                        f"{self._urls[kept[0]]} and {self._urls[place]} have different texts for prompt {index}"
                    )
                self.duplicates += 1
                continue
            kept = (place, record)
            yield record


def _numbered(store: AnyStore, place: int) -> Iterator[tuple[int, int, PromptTrace | PromptRollout]]:
    for record in store:
        yield record.prompt_index, place, record


def _same_text(a: PromptTrace | PromptRollout, b: PromptTrace | PromptRollout) -> bool:
    return np.array_equal(a.prompt_ids, b.prompt_ids) and np.array_equal(a.token_ids, b.token_ids)
