"""Request that a driver stop, and wait for its end."""

from __future__ import annotations

import time
from datetime import timedelta

from jobs.core.errors import RUN_FAILED, UserError
from jobs.supervision.driver_log import DriverLog
from jobs.supervision.driver_status import SILENT, DriverStatus, read_driver_status

POLL_SECONDS = 0.5


def end_driver(log: DriverLog, longest: timedelta, reason: str) -> DriverStatus:
    """Stop the driver of a model's stream, monitor or skill query, and wait; return its former status. Idempotent.

    Raises:
        UserError: the driver has not ended in time, or gives no sign of life.
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
            request_stop(log, status, reason)  # it has only now got its lease, or another driver has begun
    return before


def is_there(status: DriverStatus) -> bool:
    """Return whether a driver runs or starts, with or without a sign of life."""
    return status.driven or status.state == SILENT


def request_stop(log: DriverLog, status: DriverStatus, reason: str) -> None:
    """Write a request to stop for a driver that runs or starts, unless there is a request."""
    for record in (status.driver, status.launch):
        if status.driven and record is not None and log.read_stop_request(record) is None:
            log.ask_to_stop(record, reason)
