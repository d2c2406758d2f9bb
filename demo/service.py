"""A program that runs during a `with`: stopped gracefully at its end or, if that fails, by force."""

from __future__ import annotations

import signal
import subprocess
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Service(ABC):
    """A service that runs from the beginning of a `with` to its end; its processes are ended if starting one fails."""

    @abstractmethod
    def start(self) -> None:
        """Start the service, and return once it is ready."""

    @abstractmethod
    def stop(self) -> None:
        """End its running processes."""

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
    """Send a signal to a process, if it runs, and kill it if it has not ended after `seconds`."""
    if process.poll() is None:
        process.send_signal(how)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
