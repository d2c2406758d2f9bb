"""Processes of this machine: how they are identified, and the signals that end a command or stop a stream."""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from jobs.core.errors import Terminated


def read_start_time(pid: int) -> float | None:
    """Return the start time of a process, or None if there is none; id and start time together identify a process.

    On Linux the time is in seconds since the machine's boot, because setting the clock changes the time of day.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        began = process.create_time()
        return round(began - psutil.boot_time(), 2) if psutil.LINUX else began
    except (psutil.Error, ValueError):  # also an id that no process has
        return None


def identify_command(pid: int) -> str | None:
    """Return a hash of a process's command line, which may contain secrets; None if it cannot be read."""
    try:
        words = psutil.Process(pid).cmdline()
    except (psutil.Error, ValueError):
        return None
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest() if words else None


def read_variable(pid: int, name: str) -> str | None:
    """Return a variable with which a process was started; None if it has none, or is another user's."""
    try:
        return psutil.Process(pid).environ().get(name)
    except (psutil.Error, ValueError, OSError):
        return None


@contextmanager
def _handle_signals(
    handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals
) -> Iterator[None]:
    """Handle signals in the block, which only the main thread can do; in another thread, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command by an exception, so that `finally` blocks run; a verb may install another handler."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    with _handle_signals(end, signal.SIGTERM):
        yield


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """Turn SIGTERM and Ctrl-C into an event, so that the stream can finish its micro-batch first."""
    stop = threading.Event()
    with _handle_signals(lambda number, frame: stop.set(), signal.SIGTERM, signal.SIGINT):
        yield stop
