"""Watch the greatest memory use of this process and its descendants."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import psutil

PERIOD = 0.5


class Peak:
    """The greatest sum of memory while it is open, in bytes; shared memory is counted once (PSS)."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._done.wait(PERIOD):
            self.bytes = max(self.bytes, total())


def total() -> int:
    """Return the bytes that this process and its descendants hold now."""
    me = psutil.Process()
    found = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            found += process.memory_full_info().pss
        except psutil.Error:  # the process has ended
            continue
    return found
