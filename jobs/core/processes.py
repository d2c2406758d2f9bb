"""The identity of a process of this machine: its id and its start time."""

from __future__ import annotations

import psutil


def read_start_time(pid: int) -> float | None:
    """Return the start time of a process, or None if it has ended; id and start time identify a process.

    On Linux the time is in seconds since the machine's boot, as the time of day changes when the clock is set.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        began = process.create_time()
        return round(began - psutil.boot_time(), 2) if psutil.LINUX else began
    except psutil.NoSuchProcess:
        return None
