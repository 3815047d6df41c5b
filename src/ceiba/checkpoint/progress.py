"""A progress bar on standard error: owns how a long fetch shows itself. Must never print to standard output, which
carries results, and never fail the work it shows.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """On a terminal a bar with speed and time left; elsewhere one line at the beginning; silent when not enabled."""

    def __init__(self, title: str, total: int, *, enabled: bool = True) -> None:
        """``total`` in bytes."""
        self._title = title
        self._total = total
        self._enabled = enabled
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._enabled and sys.stderr.isatty():
            # Imported here: 0.1 s that a start with the model in place does not pay.
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as RichProgress

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = RichProgress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total)
        elif self._enabled:
            print(f"{self._title} ({self._total / 1e6:.0f} MB)", file=sys.stderr, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, total: int) -> None:
        """Absolute position, of a total that may have become known only now."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=count)

    def restart(self, title: str) -> None:
        """A second stage over the same bytes."""
        if self._bar is not None:
            self._bar.reset(self._task, total=self._total, description=title)
