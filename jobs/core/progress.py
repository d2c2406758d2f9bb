"""Show progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

LINE_SECONDS = 3.0


class Progress:
    """A bar, or lines, for `total` steps (None: unknown); without a terminal one line every `LINE_SECONDS`."""

    def __init__(self, title: str, total: int | None, quiet: bool = False) -> None:
        self.title, self.total, self.quiet = title, total, quiet
        self.done = 0
        self._detail = ""
        self._started = time.monotonic()
        self._finished = threading.Event()
        self._bar = None
        self._task = None
        self._printer: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self.quiet:
            return self
        if sys.stderr.isatty():
            columns = (
                SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TimeElapsedColumn(), TextColumn("{task.fields[detail]}"),
            )  # fmt: skip
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, detail="")
        else:
            self._printer = threading.Thread(target=self._lines, daemon=True)
            self._printer.start()
        return self

    def advance(self, steps: int = 1, detail: str = "") -> None:
        """Count finished steps."""
        self.done += steps
        self.note(detail)

    def note(self, detail: str) -> None:
        """Show the current activity."""
        self._detail = detail
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, detail=detail)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.set()
        if self._bar is not None:
            self._bar.stop()
        elif self._printer is not None:
            self._printer.join()

    def _lines(self) -> None:
        while not self._finished.wait(LINE_SECONDS):
            count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
            line = f"{self.title}: {count}" + (f" · {self._detail}" if self._detail else "")
            seconds = time.monotonic() - self._started
            print(f"{line} · {seconds:.0f} s", file=sys.stderr, flush=True)
