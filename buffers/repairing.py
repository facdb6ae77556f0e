"""`lede buffer repair`: take a store back to what is certain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import tyro

from lede.buffers.checking import Damage, check_store
from lede.buffers.commits import FOLDER, Commit, record_files
from lede.buffers.records import StoreError
from lede.buffers.storage import Place, Storage, storage_for
from lede.buffers.writer import PARTIAL
from lede.buffers.writer_name import is_abandoned, writer_name

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class RepairConfig:
    """Settings of `lede buffer repair`."""

    store: tyro.conf.Positional[str]
    """Folder or URL of the store."""
    dry_run: bool = False
    """Say what would be dropped, and change nothing."""
    leftovers: bool = False
    """Remove uncommitted shards of other machines too. Only while nobody writes to the store: they may be theirs."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class RepairReport:
    """What `repair_store` did, or would do."""

    path: str
    """The store."""
    dropped: tuple[str, ...]
    """Damaged shards that are no longer part of the store."""
    damage: tuple[Damage, ...]
    """What was wrong with them."""
    prompts: tuple[int, ...]
    """Prompts of dropped shards and of no other, ascending; those of a damaged commit record are not known."""
    removed: tuple[str, ...]
    """Files and folders of interrupted writers that are gone."""
    kept: tuple[str, ...]
    """Uncommitted shards that may belong to writers at work."""
    dry_run: bool
    """Whether nothing was changed."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        lines = [str(each) for each in self.damage]
        would = "would be " if self.dry_run else ""
        lines.append(
            f"{self.path}: {len(self.dropped):,} damaged shards {would}dropped, {len(self.removed):,} leftovers "
            f"{would}removed"
        )
        if self.prompts:
            lines.append(f"{len(self.prompts):,} prompts are lost: the collection's own command records them anew")
        if self.kept:
            lines.append(f"{len(self.kept):,} uncommitted shards may belong to writers at work and stay")
        return Text("\n".join(lines), overflow="fold")


def repair_store(place: Place, dry_run: bool = False, leftovers: bool = False) -> RepairReport:
    """Drop every damaged shard whole, and what interrupted writers left.

    Nothing is guessed: a shard with a damaged byte goes with all its rows, since which of them are right is not known,
    and one whose commit record is damaged goes though its files may be whole. What stays is what was committed. A
    shard's commit record goes first, so that a crash in between leaves a shard that nobody reads. Uncommitted shards
    of writers on this machine that have ended are removed; those of writers that still run are not.

    Args:
        place: Folder or URL of the store.
        dry_run: Whether to change nothing.
        leftovers: Whether to remove the uncommitted shards of other machines, and all on object stores, too. A writer
            that is at work there would commit a shard without files.

    Raises:
        StoreError: There is no store, it is from a newer lede, its settings are damaged, or the place refuses; what it
            doesn't hand out is not taken for damaged, and nothing is dropped.
    """
    storage = storage_for(place)
    report = check_store(storage)
    for each in report.damage:
        if each.shard is None:
            raise StoreError(
                f"{storage.url}: the settings are damaged and stand nowhere else, so the store can't be repaired: put "
                f"its {each.file} back from a copy ({each.message})"
            )
        if each.unreadable:
            raise StoreError(
                f"{storage.url}: {each}. What lies there may be whole, so nothing was dropped: repair when it can be "
                "read; a file that the disk has lost is dropped with its shard once it is deleted"
            )
    dropped = report.damaged_shards
    try:
        lost = _prompts(storage, dropped)
        removed, kept = _uncommitted(storage, leftovers)
        if not dry_run:
            for name in dropped:
                storage.remove([f"{FOLDER}/{name}.json"])
                storage.remove_folder(f"shards/{name}")
            for path in removed:
                storage.remove_folder(path) if path.startswith("shards/") else storage.remove([path])
    except OSError as error:
        raise StoreError(
            f"{storage.url}: the repair stopped ({error}); nothing whole was lost, run it again"
        ) from error
    return RepairReport(storage.url, dropped, report.damage, lost, tuple(removed), tuple(kept), dry_run)


def repair_buffer(config: RepairConfig) -> None:
    """Repair a store and say what was dropped.

    Raises:
        ValueError: See `repair_store`.
    """
    from rich.console import Console

    report = repair_store(config.store, config.dry_run, config.leftovers)
    if config.json:
        print(json.dumps(report.to_json()))
    else:
        Console(soft_wrap=True, highlight=False).print(report)


def _prompts(storage: Storage, dropped: tuple[str, ...]) -> tuple[int, ...]:
    """Prompts of dropped shards that no other shard has."""
    lost: set[int] = set()
    safe: set[int] = set()
    for commit in _readable_commits(storage):
        (lost if commit.name in dropped else safe).update(commit.prompts)
    return tuple(sorted(lost - safe))


def _readable_commits(storage: Storage) -> Iterator[Commit]:
    for file, content in storage.read(f"{FOLDER}/{name}" for name in record_files(storage)).items():
        try:
            yield Commit.from_bytes(file.removeprefix(f"{FOLDER}/").removesuffix(".json"), content)
        except (TypeError, ValueError, AttributeError):
            continue


def _uncommitted(storage: Storage, everything: bool) -> tuple[list[str], list[str]]:
    """Paths to remove of what has no commit record, and names of the shards to keep."""
    machine = writer_name().split("-")[0]
    shards = storage.names("shards")  # before the records, or a shard committed in between would look left over
    partial = [f"{FOLDER}/{name}" for name in storage.names(FOLDER) if name.startswith(".") and name.endswith(PARTIAL)]
    partial += [name for name in storage.names() if name.startswith(".") and name.endswith(PARTIAL)]
    committed = {name.removesuffix(".json") for name in record_files(storage)}

    def is_over(name: str) -> bool:
        at_work = storage.is_local and name.split("-")[0] == machine and not is_abandoned(name)
        return (storage.is_local and is_abandoned(name)) or (everything and not at_work)

    removed = [f"shards/{name}" for name in shards if name not in committed and is_over(name)]
    kept = [name for name in shards if name not in committed and not is_over(name)]
    removed += [path for path in partial if is_over(path.rpartition("/")[2].removeprefix("."))]
    return removed, kept
