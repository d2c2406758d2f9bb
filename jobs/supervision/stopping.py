"""Ask a driver to stop, and wait until it has."""

from __future__ import annotations

import time
from datetime import timedelta

from jobs.core.errors import RUN_FAILED, UserError
from jobs.supervision.driver_log import DriverLog
from jobs.supervision.driver_status import SILENT, DriverStatus, driver_status

POLL_SECONDS = 0.5


def end_driver(log: DriverLog, longest: timedelta, reason: str) -> DriverStatus:
    """Ask the driver of a stream, or of what follows it, to end, wait until it has; return what was seen of it before.

    Raises:
        UserError: it has not ended in time, or gives no sign of life.
    """
    was = sight = driver_status(log)
    ask(log, sight, reason)
    deadline = time.monotonic() + longest.total_seconds()
    while is_there(sight):
        if sight.state == SILENT:
            raise UserError(f"{sight.text()}: kill it, nothing is lost by that", RUN_FAILED)
        if time.monotonic() > deadline:
            waited = f"{longest.total_seconds() / 60:g} min"
            raise UserError(
                f"{sight.text()}, after {waited} still: it may be in a long micro-batch", RUN_FAILED
            )
        time.sleep(POLL_SECONDS)
        sight = driver_status(log)
        if sight.launch != was.launch or sight.drive is not None and was.drive is None:
            ask(log, sight, reason)  # it had no lease yet, or another has begun
    return was


def is_there(sight: DriverStatus) -> bool:
    return sight.driven or sight.state == SILENT


def ask(log: DriverLog, sight: DriverStatus, reason: str) -> None:
    """Leave a request to end for a driver that runs or starts, once."""
    for record in (sight.drive, sight.launch):
        if sight.driven and record is not None and log.asked_to_stop(record) is None:
            log.ask_to_stop(record, reason)
