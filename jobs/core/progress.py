"""Show progress on standard error, on a terminal as a bar, elsewhere as an occasional line after a change."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from jobs.core.errors import print_note
from jobs.core.redaction import escape_unprintable
from jobs.core.report import format_count, format_rate, format_span

LINE_SECONDS = 3.0
"""Minimum seconds between two lines if there is no terminal."""
BAR_SECONDS = 1.0
"""Seconds between updates of the rate and the remaining time on a terminal."""
RATED_SECONDS = 1.0
"""Minimum seconds of work before a rate or a remaining time is shown."""
FEWEST_PARTS = 4
"""Minimum number of parts of an activity; with fewer parts, the parts are not shown."""

Counts = Callable[[], tuple[int, int]]
"""Function that returns the number of finished parts of the current activity, and the number of all parts."""


class Progress:
    """The number of finished steps of a command, of `total` steps (None if unknown), and the current activity.

    `noun` and `ending` form the name of a step, as in `3 of 24 files · 1.5 files/s · 14 s left`.
    """

    def __init__(
        self, title: str, total: int | None, quiet: bool = False, noun: str = "step", ending: str = "s"
    ) -> None:
        self.title, self.total, self.quiet = escape_unprintable(title), total, quiet
        self.noun, self.ending = noun, ending
        self.done = 0
        self._detail = ""
        self._told = ""
        self._started = time.monotonic()
        self._parts: Counts | None = None
        self._activity_began = self._started
        self._finished = threading.Event()
        self._bar = None
        self._task = None
        self._printer: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self.quiet:
            return self
        if sys.stderr.isatty():
            columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
            columns += [BarColumn()] if self.total else []
            columns += [TextColumn("{task.fields[text]}", markup=False), TimeElapsedColumn()]
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, text=self.text())
        self._printer = threading.Thread(target=self._lines, daemon=True)
        self._printer.start()
        return self

    def advance(self, steps: int = 1, detail: str = "") -> None:
        """Add to the number of finished steps."""
        self.done += steps
        self.note(detail)

    def note(self, detail: str) -> None:
        """Show the current activity."""
        if detail != self._detail:
            self._detail, self._activity_began = detail, time.monotonic()
        self._show()

    def follow(self, parts: Counts) -> None:
        """From now on show the finished parts of the current activity, such as the tasks of Spark's stages."""
        self._parts = parts

    def _show(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, text=self.text())

    def text(self) -> str:
        """Return a line with the finished and total steps, the rate, the remaining time and the activity."""
        seconds = time.monotonic() - self._started
        parts: list[str] = []
        if self.total is not None:
            parts.append(f"{self.done:,} of {format_count(self.total, self.noun, self.ending)}")
        elif self.done:
            parts.append(format_count(self.done, self.noun, self.ending))
        if self.total is not None and 0 < self.done < self.total and seconds >= RATED_SECONDS:
            parts.append(format_rate(self.done, seconds, self.noun + self.ending))
            parts.append(f"{format_span(seconds * (self.total - self.done) / self.done)} left")
        return " · ".join([*parts, *filter(None, [escape_unprintable(self._detail)]), *self._format_parts()])

    def _format_parts(self) -> list[str]:
        """Return the finished share of the current activity, and its remaining time."""
        if self._parts is None or not self._detail:
            return []
        try:
            done, total = self._parts()
        except Exception:  # Spark may be stopping; the display must not end the work
            return []
        if total < FEWEST_PARTS:
            return []
        seconds = time.monotonic() - self._activity_began
        left = (
            [f"{format_span(seconds * (total - done) / done)} left"]
            if done and seconds >= RATED_SECONDS
            else []
        )
        return [f"{done:,} of {total:,} tasks", *left]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.set()
        if self._printer is not None:
            self._printer.join()
        if self._bar is not None:
            self._bar.stop()

    def _lines(self) -> None:
        while not self._finished.wait(LINE_SECONDS if self._bar is None else BAR_SECONDS):
            self._line() if self._bar is None else self._show()

    def _line(self) -> None:
        """Print a line if the text has changed since the last line."""
        parts = self._format_parts()[:1]
        state = f"{self.done} {self._detail} {parts}"
        if state == self._told or not (self.done or self._detail):
            return
        self._told = state
        seconds = time.monotonic() - self._started
        print_note(f"{self.title}: {self.text()} · {seconds:.0f} s")


class BytesRead:
    """Progress display of the bytes that a command has read, from any of its threads."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._read = progress, max(total, 1), 0
        self._lock = threading.Lock()

    def __call__(self, size: int) -> None:
        with self._lock:
            self._read += size
            # A file that is read again, because another file of its group could not be landed, counts twice.
            self._progress.note(
                f"read {min(100, 100 * self._read // self._total)} % of {format_megabytes(self._total)}"
            )


def format_megabytes(size: int) -> str:
    """Return a number of bytes as text."""
    return f"{max(size / 1e6, 0.1):,.{0 if size >= 1e7 else 1}f} MB"
