"""`lede buffer check`: whether every byte of a store is what was committed, and every value one that can be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import tyro

from lede.buffers.columns import LENGTHS, branch_columns, no_branches, prompt_columns, row_columns
from lede.buffers.commits import FOLDER, Commit, digest, record_files
from lede.buffers.contents import odd_values
from lede.buffers.encoding import decode
from lede.buffers.records import StoreError
from lede.buffers.settings import FORMAT, READABLE_VERSIONS, StoreSettings
from lede.buffers.shards import ROOT, read_files, read_settings
from lede.buffers.storage import Place, Storage, storage_for

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class CheckConfig:
    """Settings of `lede buffer check`."""

    store: tyro.conf.Positional[str]
    """Folder or URL of the store."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong with a store."""

    shard: str | None
    """The shard; None for the store's root."""
    array: str | None
    """The array; None where it is no array's file."""
    file: str
    """The file within the store, the array's folder where the values are wrong and not the bytes."""
    message: str
    """What was found, and what was wanted."""
    unreadable: bool = False
    """Whether the place refused to hand it out, which says nothing about what lies there."""

    def __str__(self) -> str:
        where = [f"shard {self.shard}"] if self.shard else []
        where += [f"array '{self.array}'"] if self.array else []
        return f"{', '.join(where) or 'root'}: {self.message} ({self.file})"


@dataclass(frozen=True)
class CheckReport:
    """What `check_store` found."""

    path: str
    """The store."""
    damage: tuple[Damage, ...]
    """Everything that is wrong, shard by shard; a shard with altered files is named by all of them."""
    shards: int
    """Committed shards, damaged ones too."""
    rows: int
    """Decisions or decided tokens of the shards that are whole."""
    bytes: int
    """Bytes that were compared with their checksums."""
    duplicates: int
    """Copies of prompts that were committed more than once; readers keep one."""
    leftovers: int
    """Shards without commit record: interrupted, or being written; readers pass them over."""

    @property
    def exit_code(self) -> int:
        """1 with damage, else 0."""
        return 1 if self.damage else 0

    @property
    def damaged_shards(self) -> tuple[str, ...]:
        """Names of the shards with damage, ascending."""
        return tuple(sorted({each.shard for each in self.damage if each.shard is not None}))

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        lines = [str(each) for each in self.damage]
        whole = f"{self.shards - len(self.damaged_shards):,} of {self.shards:,} shards are whole"
        lines += [f"{self.path}: {whole}, {self.rows:,} rows, {self.bytes:,} bytes compared"]
        if self.duplicates:
            lines.append(f"{self.duplicates:,} repeated prompts, which readers pass over")
        if self.leftovers:
            lines.append(
                f"{self.leftovers:,} uncommitted shards, interrupted or being written, which readers pass over"
            )
        if any(not each.unreadable for each in self.damage):
            lines.append("`lede buffer repair` drops the damaged shards")
        return Text("\n".join(lines), overflow="fold")


def check_store(place: Place) -> CheckReport:
    """Compare every file of a store with its checksum, and every value with what it may be.

    Bytes: the settings, the commit records and each file that they name. Values, where the bytes are whole: lengths
    and counts, ranges, NaN and infinity, ids within the vocabulary, layers among the candidates, tokens in order. A
    writer may be at work: what is committed after the start is left out.

    Args:
        place: Folder or URL of the store.

    Raises:
        StoreError: There is no store, or it is from a newer lede.
    """
    storage = storage_for(place)
    settings: StoreSettings | None = None
    damage: list[Damage] = []
    try:
        settings = read_settings(storage)
    except StoreError as error:
        if not _is_altered(storage):
            raise
        damage.append(Damage(None, None, ROOT, str(error)))
    try:
        return _check_shards(storage, settings, damage)
    except OSError as error:
        raise StoreError(f"{storage.url} can't be read: {error}") from error


def check_buffer(config: CheckConfig) -> CheckReport:
    """Check a store and print what is wrong with it.

    Returns:
        The report, whose exit code is 1 when there is damage.

    Raises:
        ValueError: See `check_store`.
    """
    from rich.console import Console

    report = check_store(config.store)
    if config.json:
        print(json.dumps(report.to_json()))
    else:
        Console(soft_wrap=True, highlight=False).print(report)
    return report


def _check_shards(storage: Storage, settings: StoreSettings | None, damage: list[Damage]) -> CheckReport:
    found = set(storage.names("shards"))  # before the records, or a shard committed in between would look left over
    records = record_files(storage)
    rows = n_bytes = 0
    prompts: list[int] = []
    for record in records:
        name = record.removesuffix(".json")
        try:
            commit = Commit.from_bytes(name, storage.read([f"{FOLDER}/{record}"])[f"{FOLDER}/{record}"])
        except FileNotFoundError:
            continue  # dropped a moment ago
        except (TypeError, ValueError, AttributeError) as error:
            damage.append(Damage(name, None, f"{FOLDER}/{record}", f"the commit record is damaged: {error}"))
            continue
        odd = list(_check_shard(storage, commit, settings))
        damage += odd
        rows += 0 if odd else commit.rows
        n_bytes += commit.size
        prompts += commit.prompts
    committed = {record.removesuffix(".json") for record in records}
    return CheckReport(
        path=storage.url,
        damage=tuple(damage),
        shards=len(records),
        rows=rows,
        bytes=n_bytes,
        duplicates=len(prompts) - len(set(prompts)),
        leftovers=len(found - committed),
    )


def _check_shard(storage: Storage, commit: Commit, settings: StoreSettings | None) -> Iterator[Damage]:
    try:
        files = read_files(storage, commit, commit.files)
    except StoreError as error:
        altered = list(_altered_files(storage, commit))
        if altered or not isinstance(error.__cause__, OSError):
            yield from altered or [Damage(commit.name, None, commit.folder, str(error))]
            return
        try:  # the place refused a moment ago and has just handed out every file
            files = read_files(storage, commit, commit.files)
        except StoreError as again:
            yield Damage(commit.name, None, commit.folder, str(again), isinstance(again.__cause__, OSError))
            return
    if settings is None:
        return
    # from here on the bytes are those that were committed, so what is wrong was written wrongly
    columns = no_branches(settings, len(commit.prompts)) if _lacks_branches(commit, settings) else {}
    tables = (prompt_columns, row_columns, branch_columns)
    for name in ("prompt_ids", "token_ids", *(name for table in tables for name in table(settings))):
        if name not in columns:
            try:
                columns |= decode({file: files[file] for file in files if file.startswith(f"{name}/")}, [name])
            except ValueError as error:
                yield Damage(commit.name, name, f"{commit.folder}/{name}", str(error))
                return
    if int(columns["row_count"].sum()) != commit.rows or tuple(columns["prompt_index"].tolist()) != commit.prompts:
        yield Damage(commit.name, None, commit.record, "the shard holds other rows or prompts than the record says")
        return
    for array, message in odd_values(columns, settings):
        yield Damage(commit.name, array, f"{commit.folder}/{array}", message)


def _altered_files(storage: Storage, commit: Commit) -> Iterator[Damage]:
    sizes = storage.sizes(commit.folder)
    for name, (size, sha256) in commit.files.items():
        array = name.rpartition("/")[0] or None
        file = f"{commit.folder}/{name}"
        if name not in sizes:
            yield Damage(commit.name, array, file, "the file is lost")
        elif sizes[name] != size:
            yield Damage(commit.name, array, file, f"the file has {sizes[name]} bytes, {size} were committed")
        else:
            try:
                content = storage.read([file])[file]
            except OSError as error:
                yield Damage(commit.name, array, file, f"the file can't be read: {error}", unreadable=True)
                continue
            if digest(content) != sha256:
                yield Damage(commit.name, array, file, "the file was altered, its checksum differs")


def _lacks_branches(commit: Commit, settings: StoreSettings) -> bool:
    """Whether a shard of traces is from before there were branches."""
    old = settings.kind == "traces" and settings.schema_version == 1
    return old and f"{LENGTHS['branches']}/{ROOT}" not in commit.files


def _is_altered(storage: Storage) -> bool:
    """Whether a root that can't be used is one of ours that has come to harm, and not foreign or from a newer lede."""
    if storage.size(ROOT) is None:
        return False
    content = storage.read([ROOT])[ROOT]
    try:
        attributes = dict(json.loads(content)["attributes"])
        is_whole = attributes.pop("sha256") == digest(json.dumps(attributes).encode())
    except (KeyError, TypeError, ValueError):
        is_whole = False
    if is_whole and attributes.get("schema_version") not in READABLE_VERSIONS:
        return False
    return FORMAT.encode() in content or bool(record_files(storage))
