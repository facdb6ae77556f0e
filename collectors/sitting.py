"""One sitting of a collection: what the store held before, what it holds now, and how long it took."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rich.console import Console

from lede.buffers.commits import read_commits
from lede.buffers.storage import place_url, storage_for
from lede.stopwatch import Stopwatch


class Sitting:
    """Runs from when it is made.

    Args:
        out: The store; it may come to exist later.

    Raises:
        StoreError: A commit record is damaged, or can't be read.
        ValueError: It is no place for a store.
    """

    def __init__(self, out: Path) -> None:
        self.store = place_url(out)
        """The store's place, for messages."""
        self._storage = storage_for(out)
        self._watch = Stopwatch(Path(self._storage.url)) if self._storage.is_local else None
        self._before = self.committed()

    def committed(self) -> frozenset[int]:
        """Indices of the prompts that are in the store now; none where there is no store yet."""
        return frozenset(index for commit in read_commits(self._storage) for index in commit.prompts)

    def write_seconds(self) -> None:
        """Write what this sitting took, and those before it, beside a store in a folder; a URL has no such file.

        Nothing depends on it, so a full disk is left to the shards to tell of.
        """
        if self._watch is not None:
            with suppress(OSError):
                self._watch.write()

    def end(self) -> None:
        """Write the seconds once more, if there is something to show for them."""
        if self.committed() > self._before:
            self.write_seconds()

    def tell_interrupted(self, console: Console) -> None:
        """Say what Ctrl-C left, and how to go on."""
        console.print(
            f"interrupted; {len(self.committed())} prompts are safe in {self.store}; "
            "the same `lede collect` goes on from there",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
