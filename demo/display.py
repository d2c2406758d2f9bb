"""Show the progress of the demo's phases: live on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

LINE_SECONDS = 3.0


class Phase:
    """A running phase: `note` is its current work, `result` its outcome."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.started = time.monotonic()
        self.detail: str | Callable[[], str] = ""
        self.outcome = ""

    def note(self, detail: str | Callable[[], str]) -> None:
        """Set the current work: a text, or a function called at each refresh."""
        self.detail = detail

    def result(self, outcome: str) -> None:
        """Set the outcome of the phase; shown when it ends."""
        self.outcome = outcome

    @property
    def seconds(self) -> float:
        """Return the seconds since the phase began."""
        return time.monotonic() - self.started

    def told(self) -> str:
        """Return the current work."""
        return self.detail() if callable(self.detail) else self.detail


class Display:
    """All phases of the demo, one after the other, each with its time."""

    def __init__(self, phases: int) -> None:
        self.phases = phases
        self.seconds: dict[str, float] = {}
        self._live = sys.stdout.isatty()
        self._started = time.monotonic()

    @property
    def total(self) -> float:
        """Return the total time so far."""
        return time.monotonic() - self._started

    @contextmanager
    def phase(self, title: str) -> Iterator[Phase]:
        """Run one phase: its title and detail are shown while it runs, its time and outcome when it ends."""
        phase = Phase(title)
        head = f"[{len(self.seconds) + 1}/{self.phases}] {title}"
        mark = "✗"
        try:
            with _Live(head, phase) if self._live else _Lines(head, phase):
                yield phase
            mark = "✓"
        finally:
            self.seconds[title] = phase.seconds
            outcome = f" · {phase.outcome}" if phase.outcome and mark == "✓" else ""
            self.say(f"{mark} {head} · {phase.seconds:.1f} s{outcome}")

    def say(self, line: str = "") -> None:
        """Print a line."""
        print(line, flush=True)


class _Lines:
    """Print a line now, and one every few seconds."""

    def __init__(self, head: str, phase: Phase) -> None:
        self.head, self.phase = head, phase
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        print(f"  {self.head}", flush=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LINE_SECONDS):
            detail = self.phase.told()
            print(f"    {self.phase.seconds:4.0f} s{' · ' + detail if detail else ''}", flush=True)


class _Live:
    """Show a spinner with the detail; when the phase ends the line of its outcome takes its place."""

    def __init__(self, head: str, phase: Phase) -> None:
        from rich.live import Live

        self.head, self.phase = head, phase
        self._live = Live(get_renderable=self._line, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        from rich.spinner import Spinner

        self._spinner = Spinner("dots")
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _line(self) -> Any:
        from rich.text import Text

        if not hasattr(self, "_spinner"):
            return Text(self.head)
        detail = self.phase.told()
        text = f"{self.head} · {self.phase.seconds:.0f} s{' · ' + detail if detail else ''}"
        self._spinner.update(text=Text(text, overflow="ellipsis", no_wrap=True))
        return self._spinner
