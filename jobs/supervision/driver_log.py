"""The log of drivers: a small file for each driver that has held a stream's lease, kept after its end.

The lease is in the table of generations. These files give the same facts, cheaply, to processes without Spark: the
driver, its last sign of life, and how it ended. Each driver writes only the file with its epoch in the name, so that no
driver overwrites the record of a later driver. A driver has lost its lease if there is a file of a later epoch.

    <warehouse>/_leases/<model>/<generation>/<epoch>.json    a driver from start to end
    <warehouse>/_leases/<model>/<generation>/<epoch>.stop    a request that it finish its micro-batch and stop
    <warehouse>/_leases/<model>/launches/<token>.json|stop   the same of a process that may not have a lease yet
    <warehouse>/_leases/<model>/hold.json                    no driver is to be started automatically
    <warehouse>/_leases/<model>/crashes.json                 consecutive drivers that crashed without progress

The names of the records' fields are the keys of the JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

from jobs.core import clock
from jobs.storage.files import SmallFiles, open_files
from jobs.supervision.driver_identity import DriverIdentity

if TYPE_CHECKING:
    from jobs.storage.warehouse import Tables

FOLDER = "_leases"
LAUNCHES = "launches"
HOLD, CRASHES = "hold.json", "crashes.json"
KEPT = 100
"""Number of drivers per generation that the log keeps."""

STOPPED, CAUGHT_UP, FAILED, LOST = "stopped", "caught up", "failed", "lost"
"""How a driver ends: by a request; with nothing left to do; by an error; because another driver has its lease or its
generation is retired. A killed driver records nothing."""

QUERIES = "queries"
"""The entry of a driver's rules that lists its queries, if it drives other queries than its generation's."""

R = TypeVar("R", bound="Record")


class Record:
    """The content of a file: the fields of a dataclass as JSON."""

    def text(self) -> bytes:
        """Return the file's content."""
        return json.dumps(asdict(self), default=_convert_to_json, sort_keys=True).encode()  # pyright: ignore[reportArgumentType]

    @classmethod
    def parse(cls: type[R], content: bytes | None) -> R | None:
        """Parse a file's content; return None if the file is missing or not yet complete."""
        try:
            values: dict[str, Any] = json.loads(content or b"")
            known = [one for one in fields(cls) if one.name in values]  # pyright: ignore[reportArgumentType]
            return cls(**{one.name: _parse_field(str(one.type), values[one.name]) for one in known})
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class DriverRecord(Record):
    """One driver of a generation, from the time when it got the lease.

    beat_at: its last sign of life; how: the kind of its end (`STOPPED`, ...); rules: the fields of the spec that decide
    how rows are processed (`jobs.lineage.compatibility.collect_row_rules`), or `QUERIES`; suspect: the latest earlier epoch
    without a recorded end when this driver began (`jobs.lineage.leases`), 0 if none, None in old records.
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

    @property
    def name(self) -> str:
        """Return the name of its file."""
        return f"{self.generation}/{self.epoch:08d}.json"

    @property
    def queries(self) -> list[str] | None:
        """Return the names of its queries and their checkpoints; None: it drives the query of its generation."""
        return (self.rules or {}).get(QUERIES)


@dataclass(frozen=True, slots=True)
class LaunchRecord(Record):
    """The launcher's record of a driver's process: its start, before it has a lease, and its exit code.

    keeper: id of the process that writes this record.
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
        """Return the name of its file."""
        return f"{LAUNCHES}/{self.token}.json"


@dataclass(frozen=True, slots=True)
class Hold(Record):
    """A request that no driver be started automatically, for a time or until `resume`.

    crashes: number of consecutive crashed drivers if restarts were given up; run: the Airflow run that gave up.
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
    """Consecutive drivers that crashed before committing a micro-batch.

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
        """Open the log of a model below a warehouse's root, without Spark."""
        return cls(open_files(f"{root}/{FOLDER}/{model}"), model)

    @classmethod
    def of(cls, warehouse: Tables, model: str) -> Self:
        """Open the log of a model through Spark's file system."""
        return cls(warehouse.files(f"{FOLDER}/{model}"), model)

    def list_drivers(self) -> list[DriverRecord]:
        """Return the latest driver of each generation, in the order of their start."""
        found = []
        for generation in self.files.names(""):
            if generation in (LAUNCHES, HOLD, CRASHES):
                continue
            epochs = [name for name in self.files.names(generation) if name.endswith(".json")]
            if epochs:
                found.append(DriverRecord.parse(self.files.read(f"{generation}/{epochs[-1]}")))
        return sorted((one for one in found if one is not None), key=lambda one: one.began_at)

    def compute_next_time(self) -> datetime:
        """Return the current time, or a later time after the start of every known driver and launch.

        So the driver that starts last stays last in the log even if the clock was set back.
        """
        began = [one.began_at for one in (*self.list_drivers(), *self.list_launches())]
        return max([clock.now(), *(at + timedelta(microseconds=1) for at in began)])

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
        """Return the records of a folder, in the order of their names."""
        names = (name for name in self.files.names(folder) if name.endswith(".json"))
        found = (kind.parse(self.files.read(f"{folder}/{name}")) for name in names)
        return [one for one in found if one is not None]

    def launch(self, token: str) -> LaunchRecord | None:
        """Return a launch by its token."""
        return LaunchRecord.parse(self.files.read(f"{LAUNCHES}/{token}.json"))

    def overtaken(self, generation: str, epoch: int) -> bool:
        """Return whether a driver of a later epoch has the generation's lease."""
        return any(name > f"{epoch:08d}.stop" for name in self.files.names(generation))

    def write(self, record: DriverRecord | LaunchRecord) -> None:
        """Write a driver's or a launch's file."""
        self.files.write(record.name, record.text())

    def ask_to_stop(self, record: DriverRecord | LaunchRecord, reason: str) -> None:
        """Write a request that a driver stop."""
        stop = Stop(reason, clock.now())
        self.files.write(record.name.removesuffix("json") + "stop", stop.text())

    def read_stop_request(self, record: DriverRecord | LaunchRecord) -> Stop | None:
        """Return the request that a driver stop, or None."""
        return Stop.parse(self.files.read(record.name.removesuffix("json") + "stop"))

    def hold(self) -> Hold | None:
        """Return the hold in force, or None."""
        found = Hold.parse(self.files.read(HOLD))
        return None if found is None or found.over(clock.now()) else found

    def put_hold(self, hold: Hold | None) -> None:
        """Begin a hold, or with None end it and reset the count of crashes."""
        if hold is None:
            self.files.remove(CRASHES)
            self.files.remove(HOLD)
        else:
            self.files.write(HOLD, hold.text())

    def crashes(self) -> Crashes | None:
        """Return the count of consecutive crashes."""
        return Crashes.parse(self.files.read(CRASHES))

    def put_crashes(self, crashes: Crashes | None) -> None:
        """Write the count of consecutive crashes, or with None reset it."""
        if crashes is None:
            self.files.remove(CRASHES)
        else:
            self.files.write(CRASHES, crashes.text())

    def prune(self, folder: str, keep: int = KEPT) -> None:
        """Remove all but the last `keep` drivers of a generation, or launches."""
        if folder == LAUNCHES:
            old = [one.name.removesuffix(".json") for one in self.list_launches()][:-keep]
        else:
            stems = sorted({name.split(".")[0] for name in self.files.names(folder)})
            old = [f"{folder}/{stem}" for stem in stems[:-keep]]
        for stem in old:
            for ending in ("json", "stop"):
                self.files.remove(f"{stem}.{ending}")


def _parse_field(kind: str, value: Any) -> Any:
    """Parse a JSON value by the annotation of its field."""
    kind = kind.removesuffix(" | None")
    if value is None or kind not in ("datetime", "DriverIdentity"):
        return value
    return datetime.fromisoformat(value) if kind == "datetime" else DriverIdentity(**value)


def _convert_to_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(type(value).__name__)
