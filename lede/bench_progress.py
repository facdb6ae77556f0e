"""How far a benchmark is: a bar on a terminal, a line now and then elsewhere.

Both are drawn when they are told something, by who tells it, between two decodes: no thread draws while one is timed.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_EVERY = 10.0
"""Seconds between two lines when there is no terminal."""


class BenchProgress:
    """Shows decodes done, who is at work and the time left.

    Args:
        what: What is done, such as the name of a suite.
        total: Decodes in all.
        done: Decodes of an earlier run.
        console: Where to show it.
        line_every: Seconds between two lines when the console is no terminal.
    """

    def __init__(self, what: str, total: int, done: int, console: Console, line_every: float = LINE_EVERY) -> None:
        self.what, self.total, self.done, self.failed = what, total, done, 0
        self.line_every = line_every
        self._before, self._console = done, console
        self._start = self._last = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
            left = (TextColumn("left"), TimeRemainingColumn())
            self._bar = Progress(*columns, *left, console=console, auto_refresh=False)
            self._task = self._bar.add_task("", total=total, completed=done, note="")

    def __enter__(self) -> Self:
        """Start the clock."""
        self._start = self._last = time.monotonic()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Show the final state."""
        if self._bar is not None:
            self._bar.stop()
        else:
            self._print()

    def decoded(self, name: str, failed: bool) -> None:
        """Count a decode."""
        self.done += 1
        self.failed += failed
        now = time.monotonic()
        if self._bar is not None:
            note = name + (f", {self.failed} failed" if self.failed else "")
            self._bar.update(self._task, completed=self.done, note=note, refresh=True)
        elif now - self._last >= self.line_every:
            self._print()

    def line(self) -> str:
        """The state in one line."""
        seconds = time.monotonic() - self._start
        text = f"{self.what}: {self.done}/{self.total} decodes"
        if self.failed:
            text += f", {self.failed} failed"
        if self._before < self.done < self.total:
            text += f", {seconds * (self.total - self.done) / (self.done - self._before):.0f} s left"
        return text

    def _print(self) -> None:
        self._last = time.monotonic()
        self._console.print(self.line(), highlight=False, markup=False, soft_wrap=True)


class Notes:
    """Shows what is being prepared: on a terminal in a line that changes, elsewhere a line now and then.

    Args:
        console: Where to show it.
        line_every: Seconds between two lines when the console is no terminal.
    """

    def __init__(self, console: Console, line_every: float = LINE_EVERY) -> None:
        self._console, self._line_every = console, line_every
        self._last = -line_every
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        """Begin to show."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Show nothing any more."""
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def tell(self, line: str) -> None:
        """Show what is going on, unless that was just shown."""
        now = time.monotonic()
        if self._live is not None:
            self._live.update(Text(line), refresh=True)
        elif now - self._last >= self._line_every:
            self._last = now
            self.say(line)
