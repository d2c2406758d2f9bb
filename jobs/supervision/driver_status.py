"""The status of a model's driver, by the log of drivers; its consecutive crashes; and how it is stopped. Spark-free."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import psutil

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.processes import identify_command, read_start_time, read_variable
from jobs.storage.files import open_files
from jobs.supervision import driver_log
from jobs.supervision.driver_log import (
    LAUNCH_VARIABLE,
    Crashes,
    DriverIdentity,
    DriverLog,
    DriverRecord,
    LaunchRecord,
    read_machine_name,
)

START = timedelta(minutes=10)
"""Time without a sign of life after which a driver launched on another machine counts as failed to start."""

NONE, STARTING, RUNNING, SILENT, ENDED = "none", "starting", "running", "silent", "ended"
LIVE = "live"


def format_log_name(verb: str, model: str) -> str:
    """Return the name of the log of drivers of a model's stream, monitor or skill (`verb`)."""
    return model if verb == "stream" else f"{verb}-{model}"  # no model has a dash in its name


def resume_command(verb: str, model: str) -> str:
    """Return the command that ends a hold on a model's stream, monitor or skill (`verb`)."""
    return f"kalman-pipeline resume --model {model}" + ("" if verb == "stream" else f" --{verb}")


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """The status of a model's driver.

    state: none (there never was a driver), starting, running, silent (its process runs on this machine but shows no
    sign of life), or ended. exit_code: exit code of the driver; None if it was killed, or if no launcher recorded its
    end. how: as in `DriverRecord`. seconds: time from the driver's start to its last sign of life.
    """

    state: str
    driver: DriverRecord | None = None
    launch: LaunchRecord | None = None
    exit_code: int | None = None
    how: str | None = None
    error: str | None = None
    seconds: float = 0.0

    @property
    def driven(self) -> bool:
        """Return whether a driver runs or starts."""
        return self.state in (STARTING, RUNNING)

    @property
    def killed(self) -> bool:
        """Return whether the driver ended without a record of its end."""
        return self.state == ENDED and self.how is None and (self.exit_code is None or self.exit_code < 0)

    def text(self) -> str:
        """Return the status as text."""
        if self.state == NONE:
            return "there has been no driver"
        generation = self.driver.generation if self.driver else "its driver"
        if self.state == STARTING:
            return f"a driver is starting{_format_place(self.launch)}"
        if self.state in (RUNNING, SILENT):
            assert self.driver is not None
            what = "drives" if self.state == RUNNING else "gives no sign of life, and has the lease of"
            return f"process {self.driver.owner.pid} on {self.driver.owner.host} {what} {generation}"
        if self.killed:
            return (
                f"the driver of {generation} was killed"
                if self.driver
                else "the driver was killed before it had begun"
            )
        code = "" if self.exit_code is None else f" with exit code {self.exit_code}"
        return f"the driver ended{code}{f' ({self.how})' if self.how else ''}{f': {self.error}' if self.error else ''}"


def read_driver_status(log: DriverLog) -> DriverStatus:
    """Return the status of the driver of a model's live generation."""
    drivers = [one for one in log.list_drivers() if one.status == LIVE]
    launches = log.list_launches()
    driver, launch = (drivers or [None])[-1], (launches or [None])[-1]
    for one in reversed(drivers):
        its_launch, state = _launch_of(one.launch, launches), find_driver_state(one)
        if state == ENDED and its_launch is not None and _has_process(its_launch):
            state = RUNNING  # it is ending, because its process, or the launcher that records its exit code, still runs
        if state in (RUNNING, SILENT):
            return DriverStatus(state, one, its_launch)
    known = {one.launch for one in drivers}
    if launch is not None and launch.token not in known and _is_starting(launch):
        return DriverStatus(STARTING, None, launch)
    if launch is None and driver is None:
        return DriverStatus(NONE)
    if driver is not None and (launch is None or launch.began_at < driver.began_at):
        launch = _launch_of(driver.launch, launches)
    elif launch is not None:
        driver = next((one for one in drivers if one.launch == launch.token), None)
    return _describe_end(driver, launch)


def find_driver_state(driver: DriverRecord) -> str:
    """Return the state of a driver: running, silent or ended.

    A driver on another machine without a fresh heartbeat counts as ended, because the lease lets the next driver begin,
    and the fence keeps this driver from writing.
    """
    if driver.ended_at is not None:
        return ENDED
    fresh = driver_log.is_fresh(driver.beat_at, driver_log.LEASE_SECONDS)
    if driver.owner.here:
        if read_start_time(driver.owner.pid) != driver.owner.started:
            return ENDED
        return RUNNING if fresh else SILENT
    return RUNNING if fresh else ENDED


def list_processes(owner: DriverIdentity) -> list[int]:
    """Return the process ids of a driver's running processes."""
    pairs = ((owner.pid, owner.started), (owner.jvm, owner.jvm_started))
    return [pid for pid, started in pairs if read_start_time(pid) == started]


def list_killable_processes(status: DriverStatus) -> list[psutil.Process]:
    """Return the running processes of a driver that are proven to belong to its launch.

    The record lies in the warehouse, so it alone must not have a process killed: start time and command line must be
    those of the record, and the process must have been started with the launch's token.
    """
    driver, launch = status.driver, status.launch
    if driver is None or launch is None or not launch.token or driver.launch != launch.token:
        return []
    found: dict[int, psutil.Process] = {}
    for pid, command in zip((driver.owner.pid, driver.owner.jvm), driver.commands or (), strict=False):
        with suppress(psutil.Error, ValueError):  # it has ended, or no process has this id
            # Found before the checks, so that no later process with this id is killed.
            process = psutil.Process(pid)
            proven = identify_command(pid) == command and read_variable(pid, LAUNCH_VARIABLE) == launch.token
            if proven and pid in list_processes(driver.owner):
                found[pid] = process
    return list(found.values())


def _is_starting(launch: LaunchRecord) -> bool:
    if launch.ended_at is not None:
        return False
    if launch.host == read_machine_name() and launch.pid is not None:
        return _has_process(launch)
    return driver_log.is_fresh(launch.began_at, START.total_seconds())


def _has_process(launch: LaunchRecord) -> bool:
    """Return whether a launch has not ended, and its process or its launcher runs on this machine."""
    if launch.ended_at is not None or launch.host != read_machine_name():
        return False
    pairs = ((launch.pid, launch.started), (launch.keeper, launch.keeper_started))
    return any(pid is not None and read_start_time(pid) == started for pid, started in pairs)


def _describe_end(driver: DriverRecord | None, launch: LaunchRecord | None) -> DriverStatus:
    records = [one for one in (driver, launch) if one is not None]
    began = min(one.began_at for one in records)
    ends = [one.ended_at for one in records if one.ended_at is not None]
    last = max(ends, default=driver.beat_at if driver is not None else began)
    return DriverStatus(
        ENDED,
        driver,
        launch,
        exit_code=launch.exit_code if launch else None,
        how=driver.how if driver else None,
        error=(driver.error if driver else None) or (launch.error if launch else None),
        seconds=(last - began).total_seconds(),
    )


def _launch_of(token: str | None, launches: list[LaunchRecord]) -> LaunchRecord | None:
    return next((one for one in launches if token is not None and one.token == token), None)


def _format_place(launch: LaunchRecord | None) -> str:
    return "" if launch is None or launch.pid is None else f" (process {launch.pid} on {launch.host})"


POLL_SECONDS = 0.5


def end_driver(log: DriverLog, longest: timedelta, reason: str) -> DriverStatus:
    """Stop the driver of a model's stream, monitor or skill query, and wait; return its former status. Idempotent.

    Raises:
        UserError: the driver has not ended in time, or shows no sign of life.
    """
    before = status = read_driver_status(log)
    request_stop(log, status, reason)
    deadline = time.monotonic() + longest.total_seconds()
    while is_there(status):
        if status.state == SILENT:
            raise UserError(f"{status.text()}: kill it, nothing is lost by that", RUN_FAILED)
        if time.monotonic() > deadline:
            waited = f"{longest.total_seconds() / 60:g} min"
            raise UserError(
                f"{status.text()}, after {waited} still: it may be in a long micro-batch", RUN_FAILED
            )
        time.sleep(POLL_SECONDS)
        status = read_driver_status(log)
        if status.launch != before.launch or status.driver is not None and before.driver is None:
            request_stop(log, status, reason)  # it has just got its lease, or another has begun
    return before


def is_there(status: DriverStatus) -> bool:
    """Return whether a driver runs or starts, with or without a sign of life."""
    return status.driven or status.state == SILENT


def request_stop(log: DriverLog, status: DriverStatus, reason: str) -> None:
    """Ask a driver that runs or starts to stop, unless it has already been asked."""
    for record in (status.driver, status.launch):
        if status.driven and record is not None and log.read_stop_request(record) is None:
            log.ask_to_stop(record, reason)


SOUND = timedelta(hours=1)
"""Lifetime from which a driver did not crash at its start, even if it had no row to commit."""


class CrashCounter:
    """The crashes of the drivers in one log, for the warehouse at `root`."""

    def __init__(self, root: str, log: DriverLog) -> None:
        self.root, self.log = root, log

    def record_progress(self) -> None:
        """Record the progress of all checkpoints; called before a driver is started."""
        known = self.log.crashes()
        done = self.committed()
        if known is None or known.done != done:
            self.log.put_crashes(Crashes(0, done, ""))

    def count(self, error: str, lived: float = 0.0) -> int:
        """Count a crash; return how many consecutive drivers have crashed without progress.

        Args:
            error: text about the crash. The caller must have called `record_progress` before it started the driver.
            lived: seconds from the driver's start to its end.
        """
        known, done = self.log.crashes(), self.committed()
        progressed = known is not None and known.done != done or lived > SOUND.total_seconds()
        crashes = Crashes(0 if progressed else (known.count if known else 0) + 1, done, error)
        self.log.put_crashes(crashes)
        return crashes.count

    def committed(self) -> dict[str, int]:
        """Return, for each checkpoint of the last driver in the log, the newest committed micro-batch, or -1."""
        live = [one for one in self.log.list_drivers() if one.status == LIVE]
        if not live:
            return {}
        names = [live[-1].generation] if live[-1].queries is None else live[-1].queries
        found = {}
        for name in names:
            commits = open_files(f"{self.root}/checkpoints/{name}/commits").names("")
            found[name] = max((int(one) for one in commits if one.isdecimal()), default=-1)
        return found


def give_up_reason(crashes: int, status: DriverStatus) -> str:
    """Return a sentence that explains why no more drivers are started."""
    drivers = "a driver has" if crashes == 1 else f"{crashes} drivers in a row have"
    return f"{drivers} crashed before a micro-batch was committed, the last: {status.text()}"
