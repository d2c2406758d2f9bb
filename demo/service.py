"""A program that runs beside: started and ended by a `with`, and ended in good order or, if it does not, by force."""

from __future__ import annotations

import signal
import subprocess
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Service(ABC):
    """Something that runs from the beginning of a `with` to its end; what has begun is ended if the rest does not."""

    @abstractmethod
    def start(self) -> None:
        """Start it, and return once it can be used."""

    @abstractmethod
    def stop(self) -> None:
        """End what of it runs."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def end(process: subprocess.Popen[bytes], seconds: float, how: signal.Signals = signal.SIGTERM) -> None:
    """Send a process a signal, if it runs, and kill it if it has not ended so many seconds later."""
    if process.poll() is None:
        process.send_signal(how)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
