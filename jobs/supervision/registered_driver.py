"""The registration of this process as a driver: in the log of drivers from its start to its end. Spark-free.

The driver of a generation and the driver of the queries over its estimates are registered alike. A driver of a
generation also has a lease on it (`jobs.lineage.leases`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jobs.core import times
from jobs.core.errors import describe_error, extract_first_line
from jobs.core.processes import identify_command
from jobs.core.redaction import show_name
from jobs.supervision.driver_log import (
    CAUGHT_UP,
    FAILED,
    HEARTBEAT_SECONDS,
    LAUNCH_VARIABLE,
    LIVENESS_SECONDS,
    LOST,
    STOPPED,
    DriverIdentity,
    DriverLog,
    DriverRecord,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class RegisteredDriver:
    """This process as a driver in the log of drivers.

    lost: set once a later driver has taken over, or the generation is retired.
    """

    log: DriverLog
    record: DriverRecord
    lost: threading.Event = field(default_factory=threading.Event, kw_only=True)

    def overtaken(self) -> bool:
        """Return whether a later driver has taken over."""
        if self.log.overtaken(self.record.generation, self.record.epoch):
            self.lost.set()
        return self.lost.is_set()

    def report_alive(self) -> bool:
        """Record a sign of life; return whether the log has a request to stop."""
        self.record = replace(self.record, beat_at=times.now())
        self.log.write(self.record)
        return self.log.read_stop_request(self.record) is not None

    def record_end(self, how: str, error: str | None = None) -> None:
        """Record how the driver ended, and its error."""
        at = times.now()
        self.log.write(replace(self.record, beat_at=at, ended_at=at, how=how, error=error))


def identify_driver(spark: SparkSession) -> DriverIdentity:
    """Return the identity of this process and its Spark."""
    jvm: Any = spark._jvm
    return DriverIdentity.identify_process(int(jvm.java.lang.ProcessHandle.current().pid()))


def register(
    log: DriverLog,
    generation: str,
    epoch: int,
    status: str,
    owner: DriverIdentity,
    rules: dict[str, Any] | None,
    suspect: int | None = None,
) -> DriverRecord:
    """Write the record of a driver that begins, remove old records, and return it; arguments as in `DriverRecord`."""
    launch, began_at, now = os.environ.get(LAUNCH_VARIABLE), log.compute_next_time(), times.now()
    record = DriverRecord(
        log.model, generation, epoch, status, owner, began_at, now, launch, rules=rules, suspect=suspect
    )
    commands = [identify_command(pid) or "" for pid in (owner.pid, owner.jvm)]
    record = replace(record, commands=commands)
    log.write(record)
    log.prune(generation)
    return record


@contextmanager
def driving(
    driver: RegisteredDriver,
    stop: threading.Event,
    renew: Callable[[], bool] = lambda: True,
    release: Callable[[str, str | None], None] | None = None,
    done: str = CAUGHT_UP,
) -> Iterator[None]:
    """Report in a thread that the driver is alive, and record at the end of the block how it ended.

    A request to stop in the log, and the loss of the driver's claim, set `stop`.

    Args:
        driver: the driver of this process.
        stop: event that ends the driver's queries.
        renew: called every `HEARTBEAT_SECONDS`; returns False if the driver has lost its claim.
        release: called with how the driver ended and its error; the default only writes to the log of drivers.
        done: how a driver ends that was not stopped and has not failed.
    """
    ended, error = threading.Event(), None
    report = partial(_report_until, ended, driver, stop, renew)
    thread = threading.Thread(target=report, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as problem:
        error = show_name((describe_error(problem)[0] or [extract_first_line(problem)])[0], 500)
        raise
    finally:
        ended.set()
        thread.join()
        how = FAILED if error is not None else STOPPED if stop.is_set() else done
        try:
            (release or driver.record_end)(LOST if driver.lost.is_set() else how, error)
        except Exception:
            if error is None:
                raise  # otherwise report the first error, which may have caused this one (a full disk)


def _report_until(
    ended: threading.Event, driver: RegisteredDriver, stop: threading.Event, renew: Callable[[], bool]
) -> None:
    due = time.monotonic() + HEARTBEAT_SECONDS
    while not ended.wait(LIVENESS_SECONDS):
        try:
            if not driver.overtaken() and driver.report_alive():
                stop.set()
            if not driver.lost.is_set() and time.monotonic() >= due:
                due = time.monotonic() + HEARTBEAT_SECONDS
                if not renew():
                    driver.lost.set()
        except Exception:  # a failed report must not end the queries; the next one may succeed
            continue
        if driver.lost.is_set():
            stop.set()
            return
