"""The status of a model's driver, from the log of drivers: running, or how the last driver ended. Spark-free."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from jobs.core.processes import read_start_time
from jobs.supervision import driver_identity
from jobs.supervision.driver_identity import DriverIdentity, read_machine_name
from jobs.supervision.driver_log import DriverLog, DriverRecord, LaunchRecord

START = timedelta(minutes=10)
"""A driver launched on another machine has failed to start if it gave no sign of life for this long."""

NONE, STARTING, RUNNING, SILENT, ENDED = "none", "starting", "running", "silent", "ended"
LIVE = "live"


def format_log_name(verb: str, model: str) -> str:
    """Return the name of the log of drivers of a model's stream, monitor or skill (`verb`)."""
    return model if verb == "stream" else f"{verb}-{model}"  # no model's name has a dash


def resume_command(verb: str, model: str) -> str:
    """Return the command that ends a hold on a model's stream, monitor or skill (`verb`)."""
    return f"kalman-pipeline resume --model {model}" + ("" if verb == "stream" else f" --{verb}")


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """The status of a model's driver.

    state: none (there never was a driver), starting, running, silent (its process runs on this machine but gives no
    sign of life), or ended; exit_code: None if it was killed, or no launcher recorded its end; how: as in
    `DriverRecord`; seconds: time from its start to its last sign of life.
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
        """Return the status in words."""
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
            state = (
                RUNNING  # it is ending: its process, or the launcher that records its exit code, still runs
            )
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

    A driver on another machine without a fresh heartbeat is treated as ended: the lease lets the next driver begin, and
    the fence keeps this driver from writing.
    """
    if driver.ended_at is not None:
        return ENDED
    fresh = driver_identity.is_fresh(driver.beat_at, driver_identity.LEASE_SECONDS)
    if driver.owner.here:
        if read_start_time(driver.owner.pid) != driver.owner.started:
            return ENDED
        return RUNNING if fresh else SILENT
    return RUNNING if fresh else ENDED


def list_processes(owner: DriverIdentity) -> list[int]:
    """Return the process ids of a driver's running processes."""
    pairs = ((owner.pid, owner.started), (owner.jvm, owner.jvm_started))
    return [pid for pid, started in pairs if read_start_time(pid) == started]


def _is_starting(launch: LaunchRecord) -> bool:
    if launch.ended_at is not None:
        return False
    if launch.host == read_machine_name() and launch.pid is not None:
        return _has_process(launch)
    return driver_identity.is_fresh(launch.began_at, START.total_seconds())


def _has_process(launch: LaunchRecord) -> bool:
    """Return whether a launch has not ended and its process or its launcher runs on this machine."""
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
