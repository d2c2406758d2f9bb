"""Say which process drives a stream, and tell if it still runs."""

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
"""How often a driver gives a sign of life in the log of drivers, and looks there if it is to stop."""

ORPHAN_SECONDS = 60.0
"""How long a start waits for the Spark process of a driver that was killed."""


@dataclass(frozen=True, slots=True)
class DriverIdentity:
    """A driver: its machine, its process and Spark's, when they started, and a token that no other driver has."""

    host: str
    pid: int
    started: float
    jvm: int
    jvm_started: float
    token: str

    @classmethod
    def this_process(cls, jvm: int) -> DriverIdentity:
        """Return this very process, whose Spark runs in process `jvm`."""
        pid = os.getpid()
        return cls(machine(), pid, started_at(pid) or 0.0, jvm, started_at(jvm) or 0.0, uuid.uuid4().hex)

    @classmethod
    def parse(cls, text: str | None) -> DriverIdentity | None:
        """Read an owner as `generations` holds it; None where there is none."""
        return None if not text else cls(**json.loads(text))

    def text(self) -> str:
        """Return the owner as `generations` holds it."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def here(self) -> bool:
        """Tell if it is a process of this machine."""
        return self.host == machine()

    def alive(self, heartbeat: datetime | None) -> bool:
        """Tell if the driver still runs: by its processes on this machine, else by its heartbeat."""
        if self.here:
            return started_at(self.pid) == self.started or started_at(self.jvm) == self.jvm_started
        return heartbeat is not None and is_fresh(heartbeat, LEASE_SECONDS)

    def alive_after_waiting(self, heartbeat: datetime | None) -> bool:
        """Tell if the driver still runs, once a driver that was killed has had the time to be gone altogether.

        Spark's process notices that its Python is gone and ends by itself; until then it could still write.
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


def is_fresh(beat: datetime, seconds: float) -> bool:
    """Tell if a sign of life is of the last seconds.

    One that seems to come from as far in the future is not: the clock was put back since, and whoever still lives has
    given a sign by the new one. Should that be wrong, because two machines' clocks differ so much, a driver is replaced
    that need not be, and the fence keeps it from writing.
    """
    return abs((clock.now() - beat).total_seconds()) < seconds


def started_at(pid: int) -> float | None:
    """Return when a process was started, or None if it has ended: a number that it keeps for life.

    On Linux in seconds since the machine was: the time of day moves when somebody sets the clock.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        began = process.create_time()
        return round(began - psutil.boot_time(), 2) if psutil.LINUX else began
    except psutil.NoSuchProcess:
        return None
