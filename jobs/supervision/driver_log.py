"""The log of drivers: a small file for each that has held a stream's lease, kept while it drives and after.

The lease itself is in `generations`. These files say the same, cheaply and to processes without Spark: who drives, when
it last gave a sign, how it ended. Each driver writes only its own file, named by its epoch, so nobody can overwrite
what a later driver says, and a file of a later epoch tells a driver that its lease is lost.

    <warehouse>/_leases/<model>/<generation>/<epoch>.json    a driver's life
    <warehouse>/_leases/<model>/<generation>/<epoch>.stop    a request that it finish its micro-batch and end
    <warehouse>/_leases/<model>/launches/<token>.json|stop   the same of a process that may not have a lease yet
    <warehouse>/_leases/<model>/hold.json                    nothing is to start a driver by itself now
    <warehouse>/_leases/<model>/crashes.json                 drivers in a row that have crashed and done nothing
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

from jobs.core import clock
from jobs.supervision.driver_identity import DriverIdentity
from jobs.warehouse.files import Files, files_of, hadoop_files

if TYPE_CHECKING:
    from jobs.warehouse.delta import Warehouse

FOLDER = "_leases"
LAUNCHES = "launches"
HOLD, CRASHES = "hold.json", "crashes.json"
KEPT = 100
"""Drivers of a generation that the log remembers."""

STOPPED, CAUGHT_UP, FAILED, LOST = "stopped", "caught up", "failed", "lost"
"""How a driver ends: asked to; nothing left to do; by an error; its lease is another's, or its generation retired. One
that is killed says nothing."""

R = TypeVar("R", bound="Record")


class Record:
    """What a file holds: the fields of a dataclass as JSON."""

    def text(self) -> bytes:
        """Return the file's content."""
        return json.dumps(asdict(self), default=_json, sort_keys=True).encode()  # pyright: ignore[reportArgumentType]

    @classmethod
    def parse(cls: type[R], content: bytes | None) -> R | None:
        """Read a file's content; None where there is no file, or one that is not whole yet."""
        try:
            values: dict[str, Any] = json.loads(content or b"")
            known = {one.name for one in fields(cls)}  # pyright: ignore[reportArgumentType]
            return cls(**{name: cls._value(name, value) for name, value in values.items() if name in known})
        except (ValueError, TypeError):
            return None

    @staticmethod
    def _value(name: str, value: Any) -> Any:
        if value is not None and name.endswith(("_at", "until")):
            return datetime.fromisoformat(value)
        if name == "owner" and value is not None:
            return DriverIdentity(**value)
        return value


@dataclass(frozen=True, slots=True)
class DriverRecord(Record):
    """A driver's hold on a generation, from the moment that it had the lease.

    rules: what decided what becomes of rows (`compatibility.row_rules`).
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

    @property
    def name(self) -> str:
        """Return the name of its file."""
        return f"{self.generation}/{self.epoch:08d}.json"


@dataclass(frozen=True, slots=True)
class LaunchRecord(Record):
    """A driver's process as whoever started it saw it: before it has a lease, and how it ended.

    keeper: the process that writes this.
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
    """A wish that nothing start a driver by itself, for a time or until it is taken back.

    crashes: of something that was given up, how many drivers in a row had crashed; run: Airflow's that gave it up.
    """

    reason: str
    began_at: datetime
    until: datetime | None = None
    crashes: int | None = None
    run: str | None = None

    def over(self, now: datetime) -> bool:
        """Tell if it has run out."""
        return self.until is not None and now >= self.until


@dataclass(frozen=True, slots=True)
class Crashes(Record):
    """Drivers in a row that have crashed before they had committed a micro-batch.

    done: the newest micro-batch of each checkpoint after the last of them.
    """

    count: int
    done: dict[str, int]
    error: str


@dataclass(frozen=True, slots=True)
class Stop(Record):
    """A request to end."""

    reason: str
    asked_at: datetime


class DriverLog:
    """The log of one model's drivers."""

    def __init__(self, files: Files, model: str) -> None:
        self.files, self.model = files, model

    @classmethod
    def at(cls, root: str, model: str) -> Self:
        """Open the log of a model below a warehouse's root, without Spark."""
        return cls(files_of(f"{root}/{FOLDER}/{model}"), model)

    @classmethod
    def of(cls, warehouse: Warehouse, model: str) -> Self:
        """Return the log of a model in a warehouse, reached as Spark reaches it."""
        return cls(hadoop_files(warehouse, f"{FOLDER}/{model}"), model)

    def drives(self) -> list[DriverRecord]:
        """Return every generation's latest driver, the one that began last at the end."""
        found = []
        for generation in self.files.names(""):
            if generation in (LAUNCHES, HOLD, CRASHES):
                continue
            epochs = [name for name in self.files.names(generation) if name.endswith(".json")]
            if epochs:
                found.append(DriverRecord.parse(self.files.read(f"{generation}/{epochs[-1]}")))
        return sorted((one for one in found if one is not None), key=lambda one: one.began_at)

    def next_time(self) -> datetime:
        """Return the time, but later than when any known driver or launch began, whatever the clock says.

        The last one to begin is the one that counts, also after the clock was put back.
        """
        began = [one.began_at for one in (*self.drives(), *self.launches())]
        return max([clock.now(), *(at + timedelta(microseconds=1) for at in began)])

    def history(self, generation: str) -> list[DriverRecord]:
        """Return a generation's drivers, oldest first."""
        names = [name for name in self.files.names(generation) if name.endswith(".json")]
        found = (DriverRecord.parse(self.files.read(f"{generation}/{name}")) for name in names)
        return [one for one in found if one is not None]

    def last(self, generation: str) -> DriverRecord | None:
        """Return a generation's last driver, None if it has had none."""
        return next(reversed(self.history(generation)), None)

    def launches(self) -> list[LaunchRecord]:
        """Return the launches that are still known, oldest first."""
        names = (name for name in self.files.names(LAUNCHES) if name.endswith(".json"))
        found = (LaunchRecord.parse(self.files.read(f"{LAUNCHES}/{name}")) for name in names)
        return sorted((one for one in found if one is not None), key=lambda one: one.began_at)

    def launch(self, token: str) -> LaunchRecord | None:
        """Return a launch."""
        return LaunchRecord.parse(self.files.read(f"{LAUNCHES}/{token}.json"))

    def overtaken(self, generation: str, epoch: int) -> bool:
        """Tell if a driver of a later epoch has taken the generation."""
        return any(name > f"{epoch:08d}.stop" for name in self.files.names(generation))

    def write(self, record: DriverRecord | LaunchRecord) -> None:
        """Write a driver's or a launch's file."""
        self.files.write(record.name, record.text())

    def ask_to_stop(self, record: DriverRecord | LaunchRecord, reason: str) -> None:
        """Leave a request that a driver end."""
        stop = Stop(reason, clock.now())
        self.files.write(record.name.removesuffix("json") + "stop", stop.text())

    def asked_to_stop(self, record: DriverRecord | LaunchRecord) -> Stop | None:
        """Return the request that a driver end, if there is one."""
        return Stop.parse(self.files.read(record.name.removesuffix("json") + "stop"))

    def hold(self) -> Hold | None:
        """Return the hold that is in force."""
        found = Hold.parse(self.files.read(HOLD))
        return None if found is None or found.over(clock.now()) else found

    def put_hold(self, hold: Hold | None) -> None:
        """Begin a hold, or end the one that is there: then crashes are counted anew."""
        if hold is None:
            self.files.remove(CRASHES)
            self.files.remove(HOLD)
        else:
            self.files.write(HOLD, hold.text())

    def crashes(self) -> Crashes | None:
        """Return how many drivers in a row have crashed."""
        return Crashes.parse(self.files.read(CRASHES))

    def put_crashes(self, crashes: Crashes | None) -> None:
        """Write down how many drivers in a row have crashed, None: none."""
        if crashes is None:
            self.files.remove(CRASHES)
        else:
            self.files.write(CRASHES, crashes.text())

    def prune(self, folder: str, keep: int = KEPT) -> None:
        """Forget all but the last drivers of a generation, or launches."""
        if folder == LAUNCHES:
            old = [one.name.removesuffix(".json") for one in self.launches()][:-keep]
        else:
            stems = sorted({name.split(".")[0] for name in self.files.names(folder)})
            old = [f"{folder}/{stem}" for stem in stems[:-keep]]
        for stem in old:
            for ending in ("json", "stop"):
                self.files.remove(f"{stem}.{ending}")


def _json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(type(value).__name__)
