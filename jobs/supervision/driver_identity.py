"""The identity of the process that drives a stream, and whether it is alive."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import datetime

import psutil

from jobs.core import clock

LEASE_SECONDS = float(os.environ.get("KALMAN_LEASE_SECONDS") or 90.0)
"""A driver on another machine counts as dead when its heartbeat is older than this."""

HEARTBEAT_SECONDS = LEASE_SECONDS / 3
LIVENESS_SECONDS = min(5.0, LEASE_SECONDS / 6)
"""How often a driver renews its sign of life in the log of drivers, and reads there whether to stop."""

ORPHAN_SECONDS = 60.0
"""How long a start waits for the Spark process of a driver that was killed."""


@dataclass(frozen=True, slots=True)
class DriverIdentity:
    """A driver: its machine, its process and Spark's (`jvm`), their start times, and a token unique to the driver."""

    host: str
    pid: int
    started: float
    jvm: int
    jvm_started: float
    token: str

    @classmethod
    def this_process(cls, jvm: int) -> DriverIdentity:
        """Return the identity of the current process, whose Spark runs in process `jvm`."""
        pid = os.getpid()
        return cls(machine(), pid, started_at(pid) or 0.0, jvm, started_at(jvm) or 0.0, uuid.uuid4().hex)

    @classmethod
    def parse(cls, text: str | None) -> DriverIdentity | None:
        """Parse the column `owner` of the table of generations; None if it is empty."""
        return None if not text else cls(**json.loads(text))

    def text(self) -> str:
        """Return the value of the column `owner` of the table of generations."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def here(self) -> bool:
        """Tell whether the process is of this machine."""
        return self.host == machine()

    def alive(self, heartbeat: datetime | None) -> bool:
        """Tell whether the driver runs: by its processes on this machine, elsewhere by its heartbeat."""
        if self.here:
            return started_at(self.pid) == self.started or started_at(self.jvm) == self.jvm_started
        return heartbeat is not None and is_fresh(heartbeat, LEASE_SECONDS)

    def alive_after_waiting(self, heartbeat: datetime | None) -> bool:
        """Tell whether the driver runs, after giving the processes of a killed one the time to end.

        Spark's process ends by itself once its Python has gone; until then it could still write.
        """
        deadline = time.monotonic() + ORPHAN_SECONDS
        while self.alive(heartbeat):
            orphan = self.here and started_at(self.pid) != self.started
            if not orphan or time.monotonic() > deadline:
                return True
            time.sleep(0.2)
        return False


def machine() -> str:
    """Return this machine's name: KALMAN_HOST, where containers share a name, else the host's."""
    return os.environ.get("KALMAN_HOST") or socket.gethostname()


def is_fresh(heartbeat: datetime, seconds: float) -> bool:
    """Tell whether a heartbeat is less than `seconds` old.

    A heartbeat further in the future than that is stale: the clock was set back since, and a live driver has written
    another one by the new time. Where two machines' clocks really differ that much, a live driver is replaced, and the
    fence keeps the replaced one from writing.
    """
    return abs((clock.now() - heartbeat).total_seconds()) < seconds


def started_at(pid: int) -> float | None:
    """Return the start time of a process, or None if it has ended; with the process id it names one process.

    On Linux in seconds since the machine's own start, as setting the clock changes the time of day.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        began = process.create_time()
        return round(began - psutil.boot_time(), 2) if psutil.LINUX else began
    except psutil.NoSuchProcess:
        return None
