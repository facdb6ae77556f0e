"""How far a collection is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 10.0
"""Seconds between two lines when there is no terminal."""


class CollectProgress:
    """Shows prompts done, tokens a second and the time left.

    Args:
        total: Prompts in all.
        done: Prompts that an earlier run has done.
        console: Where to show it; None for the standard output.
        line_every: Seconds between two lines when the console is no terminal.
    """

    def __init__(self, total: int, done: int, console: Console | None = None, line_every: float = LINE_EVERY) -> None:
        self.total = total
        self.done = done
        self.n_tokens = 0
        self.line_every = line_every
        self._done_before = done
        self._console = console or Console()
        self._start = self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("collecting"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
            self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task("", total=total, completed=done, speed="")

    def tokens(self, n_tokens: int) -> None:
        """Count new tokens."""
        self.n_tokens += n_tokens
        self._show()

    def prompt(self, n_prompts: int = 1) -> None:
        """Count prompts that are done, or, below 0, that were lost with a worker."""
        self.done += n_prompts
        self._show()

    def begin(self) -> None:
        """Start the clock, once more if it runs: what came before was no collecting."""
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        """Start the clock."""
        self.begin()
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

    def line(self) -> str:
        """The state in one line."""
        if self._done_before == self.total:
            return f"{self.done}/{self.total} prompts, all of them collected before"
        seconds = max(time.monotonic() - self._start, 1e-9)
        text = f"{self.done}/{self.total} prompts, {self.n_tokens / seconds:.1f} tokens/s"
        if self._done_before < self.done < self.total:
            left = seconds * (self.total - self.done) / (self.done - self._done_before)
            text += f", {left:.0f} s left"
        return text

    def _show(self) -> None:
        now = time.monotonic()
        if self._bar is not None:
            speed = f"{self.n_tokens / max(now - self._start, 1e-9):.1f} tokens/s"
            self._bar.update(self._task, completed=self.done, speed=speed)
        elif now - self._last_line >= self.line_every:
            self._print()

    def _print(self) -> None:
        self._last_line = time.monotonic()
        self._console.print(self.line(), highlight=False, soft_wrap=True)
