"""Tell from the log of drivers if a model's stream is being driven, and if not, how its last driver ended. No Spark."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from jobs.supervision import driver_identity
from jobs.supervision.driver_identity import DriverIdentity, machine, started_at
from jobs.supervision.driver_log import DriverLog, DriverRecord, LaunchRecord

START = timedelta(minutes=10)
"""A driver that was launched elsewhere and is not heard of for so long has not started."""

NONE, STARTING, RUNNING, SILENT, ENDED = "none", "starting", "running", "silent", "ended"
LIVE = "live"


def log_name(verb: str, model: str) -> str:
    """Return the name under which the log of drivers knows what a verb drives: stream, monitor or skill of a model."""
    return model if verb == "stream" else f"{verb}-{model}"  # no model's name has a dash


def resume_command(verb: str, model: str) -> str:
    """Return the command that ends a hold on what a verb drives."""
    return f"kalman-pipeline resume --model {model}" + ("" if verb == "stream" else f" --{verb}")


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """What is to be seen of a model's driver.

    state: none (there never was one), starting, running, silent (its process is here and gives no sign of life), ended.
    exit_code: None where it was killed, or ran where nobody saw it end.
    """

    state: str
    drive: DriverRecord | None = None
    launch: LaunchRecord | None = None
    exit_code: int | None = None
    how: str | None = None
    error: str | None = None
    seconds: float = 0.0

    @property
    def driven(self) -> bool:
        """Tell if there is a driver, or will be."""
        return self.state in (STARTING, RUNNING)

    @property
    def killed(self) -> bool:
        """Tell if it ended without a word."""
        return self.state == ENDED and self.how is None and (self.exit_code is None or self.exit_code < 0)

    def text(self) -> str:
        """Say it in words."""
        if self.state == NONE:
            return "there has been no driver"
        who = self.drive.generation if self.drive else "its driver"
        if self.state == STARTING:
            return f"a driver is starting{_where(self.launch)}"
        if self.state in (RUNNING, SILENT):
            assert self.drive is not None
            what = "drives" if self.state == RUNNING else "gives no sign of life, and has the lease of"
            return f"process {self.drive.owner.pid} on {self.drive.owner.host} {what} {who}"
        if self.killed:
            return (
                f"the driver of {who} was killed"
                if self.drive
                else "the driver was killed before it had begun"
            )
        code = "" if self.exit_code is None else f" with exit code {self.exit_code}"
        return f"the driver ended{code}{f' ({self.how})' if self.how else ''}{f': {self.error}' if self.error else ''}"


def driver_status(log: DriverLog) -> DriverStatus:
    """Look for the driver of a model's live generation."""
    drives = [one for one in log.drives() if one.status == LIVE]
    launches = log.launches()
    drive, launch = (drives or [None])[-1], (launches or [None])[-1]
    for one in reversed(drives):
        its, state = _of_token(launches, one.launch), state_of(one)
        if state == ENDED and its is not None and _kept(its):
            state = RUNNING  # it is just ending: its process, or who writes down how, is still there
        if state in (RUNNING, SILENT):
            return DriverStatus(state, one, its)
    known = {one.launch for one in drives}
    if launch is not None and launch.token not in known and _starting(launch):
        return DriverStatus(STARTING, None, launch)
    if launch is None and drive is None:
        return DriverStatus(NONE)
    if drive is not None and (launch is None or launch.began_at < drive.began_at):
        launch = _of_token(launches, drive.launch)
    elif launch is not None:
        drive = next((one for one in drives if one.launch == launch.token), None)
    return _ended(drive, launch)


def state_of(drive: DriverRecord) -> str:
    """Tell if a driver runs, is silent, or has ended.

    Of one on another machine that gives no sign nothing is known; the lease lets the next one begin, and the fence
    keeps this one from writing.
    """
    if drive.ended_at is not None:
        return ENDED
    fresh = driver_identity.is_fresh(drive.beat_at, driver_identity.LEASE_SECONDS)
    if drive.owner.here:
        if started_at(drive.owner.pid) != drive.owner.started:
            return ENDED
        return RUNNING if fresh else SILENT
    return RUNNING if fresh else ENDED


def processes(owner: DriverIdentity) -> list[int]:
    """Return the process ids of a driver that are still its."""
    pairs = ((owner.pid, owner.started), (owner.jvm, owner.jvm_started))
    return [pid for pid, started in pairs if started_at(pid) == started]


def _starting(launch: LaunchRecord) -> bool:
    if launch.ended_at is not None:
        return False
    if launch.host == machine() and launch.pid is not None:
        return _kept(launch)
    return driver_identity.is_fresh(launch.began_at, START.total_seconds())


def _kept(launch: LaunchRecord) -> bool:
    """Tell if a launch of this machine is not over."""
    if launch.ended_at is not None or launch.host != machine():
        return False
    pairs = ((launch.pid, launch.started), (launch.keeper, launch.keeper_started))
    return any(pid is not None and started_at(pid) == started for pid, started in pairs)


def _ended(drive: DriverRecord | None, launch: LaunchRecord | None) -> DriverStatus:
    records = [one for one in (drive, launch) if one is not None]
    began = min(one.began_at for one in records)
    ends = [one.ended_at for one in records if one.ended_at is not None]
    last = max(ends, default=drive.beat_at if drive is not None else began)
    return DriverStatus(
        ENDED,
        drive,
        launch,
        launch.exit_code if launch else None,
        drive.how if drive else None,
        (drive.error if drive else None) or (launch.error if launch else None),
        (last - began).total_seconds(),
    )


def _of_token(launches: list[LaunchRecord], token: str | None) -> LaunchRecord | None:
    return next((one for one in launches if token is not None and one.token == token), None)


def _where(launch: LaunchRecord | None) -> str:
    return "" if launch is None or launch.pid is None else f" (process {launch.pid} on {launch.host})"
