"""Stores changed by hand: as older versions wrote them, or with a lie whose checksum is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lede.buffers.commits import sealed


def old_root(path: Path, version: int, *dropped: str) -> None:
    """Give a store the attributes of an old version: its own number, no checksum, none that start with these."""
    root = json.loads((path / "zarr.json").read_text())
    kept = {k: v for k, v in root["attributes"].items() if k != "sha256" and not k.startswith(dropped or ("\0",))}
    root["attributes"] = {**kept, "schema_version": version}
    (path / "zarr.json").write_text(json.dumps(root))


def old_record(file: Path) -> None:
    """Turn a commit record into one of version 1 or 2, which has neither name nor checksum."""
    record = json.loads(file.read_text())
    file.write_text(json.dumps({name: record[name] for name in ("rows", "prompts", "files")}))


def change_record(file: Path, **changes: Any) -> None:
    """Change a commit record and its checksum with it."""
    record = {**json.loads(file.read_text()), **changes}
    del record["sha256"]
    file.write_bytes(sealed(record))


def forget(path: Path, shard: Path, *patterns: str) -> None:
    """Take arrays out of a shard and its commit record, as if they had never been."""
    record = path / "commits" / f"{shard.name}.json"
    files: dict[str, Any] = json.loads(record.read_text())["files"]
    arrays = [array for pattern in patterns for array in shard.glob(pattern)]
    for array in arrays:
        for file in array.iterdir():
            del files[f"{array.name}/{file.name}"]
            file.unlink()
        array.rmdir()
    change_record(record, files=files)
