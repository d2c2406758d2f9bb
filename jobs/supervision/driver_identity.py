"""The identity of the process that drives a stream, and whether it is alive."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import datetime

from jobs.core import clock
from jobs.core.processes import read_start_time

LEASE_SECONDS = float(os.environ.get("KALMAN_LEASE_SECONDS") or 90.0)
"""A driver on another machine is treated as dead if its heartbeat is older than this."""

HEARTBEAT_SECONDS = LEASE_SECONDS / 3
LIVENESS_SECONDS = min(5.0, LEASE_SECONDS / 6)
"""Interval at which a driver renews its sign of life in the log of drivers and looks for a request to stop."""

ORPHAN_SECONDS = 60.0
"""Maximum time that a start waits for the end of a killed driver's Spark process."""


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
    def identify_process(cls, jvm: int) -> DriverIdentity:
        """Return the identity of the current process, whose Spark runs in process `jvm`."""
        pid = os.getpid()
        return cls(
            read_machine_name(),
            pid,
            read_start_time(pid) or 0.0,
            jvm,
            read_start_time(jvm) or 0.0,
            uuid.uuid4().hex,
        )

    @classmethod
    def parse(cls, text: str | None) -> DriverIdentity | None:
        """Parse the column `owner` of the table of generations; None if it is empty."""
        return None if not text else cls(**json.loads(text))

    def text(self) -> str:
        """Return the value of the column `owner` of the table of generations."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def here(self) -> bool:
        """Return whether the process runs on this machine."""
        return self.host == read_machine_name()

    def alive(self, heartbeat: datetime | None) -> bool:
        """Return whether the driver runs: by its processes on this machine, by its heartbeat on others."""
        if self.here:
            return read_start_time(self.pid) == self.started or read_start_time(self.jvm) == self.jvm_started
        return heartbeat is not None and is_fresh(heartbeat, LEASE_SECONDS)

    def is_alive_after_waiting(self, heartbeat: datetime | None) -> bool:
        """Return whether the driver runs, after a wait in which the processes of a killed driver can end.

        Spark's process ends by itself after its Python process; until then it could still write.
        """
        deadline = time.monotonic() + ORPHAN_SECONDS
        while self.alive(heartbeat):
            orphan = self.here and read_start_time(self.pid) != self.started
            if not orphan or time.monotonic() > deadline:
                return True
            time.sleep(0.2)
        return False


def read_machine_name() -> str:
    """Return this machine's name: KALMAN_HOST if set (containers may share a name), else the host's name."""
    return os.environ.get("KALMAN_HOST") or socket.gethostname()


def is_fresh(heartbeat: datetime, seconds: float) -> bool:
    """Return whether a heartbeat is less than `seconds` old.

    A heartbeat that is more than `seconds` in the future is stale: the clock was set back, and a live driver would have
    written a newer heartbeat. If the clocks of two machines really differ that much, a live driver is replaced, and the
    fence keeps it from writing.
    """
    return abs((clock.now() - heartbeat).total_seconds()) < seconds
