"""The log of drivers.

For each driver that has held the lease of a stream, the log has a small file with its identity, even after its end.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter

from jobs.core import times
from jobs.core.errors import UserError
from jobs.core.processes import read_start_time
from jobs.storage.files import SmallFiles, open_records

LEASE_SECONDS = float(os.environ.get("KALMAN_LEASE_SECONDS") or 90.0)
"""Age of a heartbeat from which a driver on another machine is treated as dead."""

HEARTBEAT_SECONDS = LEASE_SECONDS / 3
LIVENESS_SECONDS = min(5.0, LEASE_SECONDS / 6)
"""Interval, in seconds, at which a driver records a sign of life in the log and looks for a request to stop."""

ORPHAN_SECONDS = 60.0
"""Maximum time that a start waits for the Spark process of a killed driver to end."""


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
        """Return the identity of the current process, whose Spark runs in the process `jvm`."""
        own, its = ((pid, read_start_time(pid) or 0.0) for pid in (os.getpid(), jvm))
        return cls(read_machine_name(), *own, *its, uuid.uuid4().hex)

    @classmethod
    def parse(cls, text: str | None) -> DriverIdentity | None:
        """Parse the column `owner` of the table of generations; None if it is empty."""
        return None if not text else cls(**json.loads(text))

    def text(self) -> str:
        """Return the value of the column `owner` of the table of generations."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def here(self) -> bool:
        """Return whether the driver's process runs on this machine."""
        return self.host == read_machine_name()

    def alive(self, heartbeat: datetime | None) -> bool:
        """Return whether the driver runs, by its processes on this machine, or by its heartbeat on another machine."""
        if self.here:
            return read_start_time(self.pid) == self.started or read_start_time(self.jvm) == self.jvm_started
        return heartbeat is not None and is_fresh(heartbeat, LEASE_SECONDS)

    def is_alive_after_waiting(self, heartbeat: datetime | None) -> bool:
        """Return whether the driver runs, after waiting for the processes of a killed driver to end.

        Spark's process ends by itself after the driver's Python process, and could still write until then.
        """
        deadline = time.monotonic() + ORPHAN_SECONDS
        while self.alive(heartbeat):
            orphan = self.here and read_start_time(self.pid) != self.started
            if not orphan or time.monotonic() > deadline:
                return True
            time.sleep(0.2)
        return False


def read_machine_name() -> str:
    """Return this machine's name: KALMAN_HOST if it is set (containers may share a name), else the host's name."""
    return os.environ.get("KALMAN_HOST") or socket.gethostname()


def is_fresh(heartbeat: datetime, seconds: float) -> bool:
    """Return whether a heartbeat is less than `seconds` old.

    A heartbeat more than `seconds` in the future is stale, because the clock was set back, and a live driver would have
    written a newer heartbeat. If the clocks of two machines really differ that much, a live driver is replaced, and the
    fence (`jobs.lineage.fencing`) keeps it from writing.
    """
    return abs((times.now() - heartbeat).total_seconds()) < seconds


FOLDER = "_leases"
LAUNCHES = "launches"
LAUNCH_VARIABLE = "KALMAN_LAUNCH"
"""The environment variable that has the token of a driver's launch."""
HOLD, CRASHES = "hold.json", "crashes.json"
KEPT = 100
"""Number of drivers per generation, and number of launches, that the log keeps."""

STOPPED, CAUGHT_UP, FAILED, LOST = "stopped", "caught up", "failed", "lost"
"""How a driver ends: by a request (stopped); with nothing left to do (caught up); by an error (failed); because another
driver has its lease or its generation is retired (lost). A killed driver records no end."""

QUERIES = "queries"
"""Entry of a driver's rules with the names of its queries, for a driver that runs no generation's query."""

LARGEST = 1 << 20
"""Maximum bytes of a record, which has a few kilobytes."""

_EPOCH = re.compile(r"\d{8,}\.(json|stop)")
"""Name of a file of one driver of a generation."""

R = TypeVar("R", bound="Record")


class Record:
    """A file of the log, with the fields of a dataclass as JSON."""

    def text(self) -> bytes:
        """Return the file's content."""
        return json.dumps(asdict(self), default=_convert_to_json, sort_keys=True).encode()  # pyright: ignore[reportArgumentType]

    @classmethod
    def parse(cls: type[R], content: bytes | None) -> R | None:
        """Parse the content of a file; return None if the file is missing, incomplete or not a record."""
        if content is None:
            return None
        try:
            found = _make_parser(cls).validate_json(content, strict=True)
        except ValueError:
            return None
        instants = [value for value in asdict(found).values() if isinstance(value, datetime)]
        # Other times cannot be compared, or have no next one (`compute_next_time`).
        return found if all(at.tzinfo is not None and 1970 <= at.year < 9000 for at in instants) else None


@dataclass(frozen=True, slots=True)
class DriverRecord(Record):
    """One driver of a generation, from the time when it got the lease.

    beat_at: last sign of life of the driver. how: the kind of its end (`STOPPED`, ...). rules: the fields of the spec
    that decide how rows are processed (`jobs.lineage.compatibility.collect_row_rules`), or `QUERIES`. suspect: the
    latest earlier epoch without a recorded end when this driver began (`jobs.lineage.leases`); 0 if there is none; None
    in records of earlier releases. commands: hashes of the command lines of the owner's two processes.
    """

    model: str
    generation: str
    epoch: int
    status: str
    owner: DriverIdentity
    began_at: datetime
    beat_at: datetime
    launch: str | None = None
    ended_at: datetime | None = None
    how: str | None = None
    error: str | None = None
    rules: dict[str, Any] | None = None
    suspect: int | None = None
    commands: list[str] | None = None

    @property
    def name(self) -> str:
        """Return the name of the driver's file."""
        return f"{self.generation}/{self.epoch:08d}.json"

    @property
    def queries(self) -> list[str] | None:
        """Return the names of the driver's queries and their checkpoints; None if it runs its generation's query."""
        found = (self.rules or {}).get(QUERIES)
        return found if isinstance(found, list) and all(isinstance(one, str) for one in found) else None

    @property
    def runs(self) -> bool:
        """Return whether the driver has not ended and gives signs of life."""
        return self.ended_at is None and self.owner.alive(self.beat_at)

    def runs_after_waiting(self) -> bool:
        """Return whether the driver runs, after a wait in which the processes of a killed driver can end."""
        return self.ended_at is None and self.owner.is_alive_after_waiting(self.beat_at)


@dataclass(frozen=True, slots=True)
class LaunchRecord(Record):
    """The launcher's record of a driver's process: its start, before it has a lease, and its exit code.

    keeper: id of the process that writes this record, the launcher.
    """

    token: str
    host: str
    began_at: datetime
    pid: int | None = None
    started: float | None = None
    keeper: int | None = None
    keeper_started: float | None = None
    log: str | None = None
    about: str | None = None
    exit_code: int | None = None
    ended_at: datetime | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        """Return the name of the launch's file."""
        return f"{LAUNCHES}/{self.token}.json"


@dataclass(frozen=True, slots=True)
class Hold(Record):
    """A request that no driver be started automatically, until a time or until the command `resume`.

    crashes: number of consecutive crashed drivers, if the hold was made because of crashes. run: the Airflow run that
    made such a hold.
    """

    reason: str
    began_at: datetime
    until: datetime | None = None
    crashes: int | None = None
    run: str | None = None

    def over(self, now: datetime) -> bool:
        """Return whether the hold has expired."""
        return self.until is not None and now >= self.until


@dataclass(frozen=True, slots=True)
class Crashes(Record):
    """The count of consecutive drivers that crashed before they committed a micro-batch.

    done: the newest micro-batch of each checkpoint after the last crash.
    """

    count: int
    done: dict[str, int]
    error: str


@dataclass(frozen=True, slots=True)
class Stop(Record):
    """A request that a driver stop."""

    reason: str
    asked_at: datetime


class DriverLog:
    """The log of one model's drivers."""

    def __init__(self, files: SmallFiles, model: str) -> None:
        self.files, self.model = files, model

    @classmethod
    def at(cls, root: str, model: str) -> Self:
        """Open the log of a model below a warehouse's root."""
        return cls(open_records(root, f"{FOLDER}/{model}"), model)

    def list_drivers(self) -> list[DriverRecord]:
        """Return the latest driver of each generation, ordered by start time."""
        generations = [name for name in self.files.names("") if name != LAUNCHES]
        latest = [names[-1] for one in generations if (names := self._list_records(one))]
        found = [self._read_record(DriverRecord, name) for name in latest]
        return sorted((one for one in found if one is not None), key=lambda one: one.began_at)

    def compute_next_time(self) -> datetime:
        """Return the current time, or a later time if any known driver or launch would otherwise have started later.

        So the driver that starts last is the last driver in the log, even if the clock was set back.
        """
        began = [one.began_at for one in (*self.list_drivers(), *self.list_launches())]
        return max([times.now(), *(at + timedelta(microseconds=1) for at in began)])

    def history(self, generation: str) -> list[DriverRecord]:
        """Return a generation's drivers, oldest first."""
        return self._read_records(DriverRecord, generation)

    def last(self, generation: str) -> DriverRecord | None:
        """Return a generation's last driver, or None."""
        return next(reversed(self.history(generation)), None)

    def list_launches(self) -> list[LaunchRecord]:
        """Return the launches in the log, oldest first."""
        return sorted(self._read_records(LaunchRecord, LAUNCHES), key=lambda one: one.began_at)

    def _read_records(self, kind: type[R], folder: str) -> list[R]:
        """Return the records in a folder, ordered by their names."""
        found = [self._read_record(kind, name) for name in self._list_records(folder)]
        return [one for one in found if one is not None]

    def _read_record(self, kind: type[R], name: str) -> R | None:
        """Return a file's record, unless it has another name: by its name it is written, and removed."""
        found = kind.parse(self._read_file(name))
        return found if getattr(found, "name", None) == name else None

    def _list_records(self, folder: str) -> list[str]:
        """Return the paths of the records in a folder; none if it is a link, or this user may not read it."""
        try:
            return [f"{folder}/{name}" for name in self.files.names(folder) if name.endswith(".json")]
        except PermissionError:
            return []

    def _read_file(self, name: str) -> bytes | None:
        """Return a file's content; None if it cannot be read, is too large, or is a folder, a pipe or a link."""
        try:
            return self.files.read(name, LARGEST)
        except (UserError, PermissionError, IsADirectoryError):
            return None

    def launch(self, token: str) -> LaunchRecord | None:
        """Return the launch with this token."""
        return self._read_record(LaunchRecord, f"{LAUNCHES}/{token}.json")

    def overtaken(self, generation: str, epoch: int) -> bool:
        """Return whether a driver of a later epoch has the generation's lease."""
        return any(name > f"{epoch:08d}.stop" for name in self.files.names(generation))

    def write(self, record: DriverRecord | LaunchRecord) -> None:
        """Write the file of a driver or a launch."""
        self.files.write(record.name, record.text())

    def ask_to_stop(self, record: DriverRecord | LaunchRecord, reason: str) -> None:
        """Write a request that a driver stop."""
        stop = Stop(reason, times.now())
        self.files.write(record.name.removesuffix("json") + "stop", stop.text())

    def read_stop_request(self, record: DriverRecord | LaunchRecord) -> Stop | None:
        """Return the request that a driver stop, or None."""
        return Stop.parse(self._read_file(record.name.removesuffix("json") + "stop"))

    def hold(self) -> Hold | None:
        """Return the hold that is in force, or None."""
        found = Hold.parse(self._read_file(HOLD))
        return None if found is None or found.over(times.now()) else found

    def put_hold(self, hold: Hold | None) -> None:
        """Begin a hold; None ends the hold and resets the count of crashes."""
        if hold is None:
            self.files.remove(CRASHES)
            self.files.remove(HOLD)
        else:
            self.files.write(HOLD, hold.text())

    def crashes(self) -> Crashes | None:
        """Return the count of consecutive crashes."""
        return Crashes.parse(self._read_file(CRASHES))

    def put_crashes(self, crashes: Crashes | None) -> None:
        """Write the count of consecutive crashes; None resets the count."""
        if crashes is None:
            self.files.remove(CRASHES)
        else:
            self.files.write(CRASHES, crashes.text())

    def prune(self, folder: str, keep: int = KEPT) -> None:
        """Remove all files but the last `keep` files of a folder, which has a generation's drivers, or the launches."""
        if folder == LAUNCHES:
            old = [one.name.removesuffix(".json") for one in self.list_launches()][:-keep]
        else:
            found = {name.partition(".")[0] for name in self.files.names(folder) if _EPOCH.fullmatch(name)}
            old = [f"{folder}/{stem}" for stem in sorted(found)[:-keep]]
        for stem in old:
            for ending in ("json", "stop"):
                self.files.remove(f"{stem}.{ending}")


@cache
def _make_parser(cls: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _convert_to_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(type(value).__name__)
