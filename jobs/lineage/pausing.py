"""Pause a stream while a command needs it stopped, and allow its start afterwards.

A hold in the log of drivers, renewed during the pause, keeps Airflow from starting the stream. If the command is
killed, the hold expires and the stream resumes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

from jobs.core import clock
from jobs.lineage import generations, leases
from jobs.supervision.driver_log import DriverLog, Hold
from jobs.supervision.driver_status import DriverStatus
from jobs.supervision.stopping import end_driver

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.spark.warehouse import Warehouse

HOLD = timedelta(minutes=5)
"""Duration of a hold after its last renewal."""
RENEW_SECONDS = 60.0
UNLOCK_SECONDS = 10.0
"""Maximum time from a driver's recorded end to the release of the machine's lock."""
WAIT = timedelta(minutes=30)
"""Maximum time in which a driver must finish its micro-batch."""


@contextmanager
def pause_stream(
    log: DriverLog, reason: str, on_progress: Callable[[str], None] = lambda text: None
) -> Iterator[DriverStatus]:
    """Stop a stream's driver, if there is one, and hold the stream; yield the driver's former status.

    A hold of another command is left unchanged, during the pause and after it.

    Raises:
        UserError: the driver has not stopped in time, or gives no sign of life.
    """
    done = threading.Event()
    mine = _PauseHold(log, reason)
    mine.renew(first=True)

    def renew() -> None:
        while not done.wait(RENEW_SECONDS):
            try:
                mine.renew()
            except Exception:  # a failed renewal must not end the command; the next one may succeed
                continue

    thread = threading.Thread(target=renew, name="hold", daemon=True)
    thread.start()
    try:
        on_progress("waiting for the driver to finish its micro-batch")
        yield end_driver(log, WAIT, reason)
    finally:
        done.set()
        thread.join()
        mine.end()


@contextmanager
def hold_stream(
    warehouse: Warehouse,
    live: Generation,
    reason: str,
    drain: bool,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Iterator[None]:
    """Keep drivers from a model's live generation; with `drain` its driver is stopped first.

    Raises:
        UserError: a driver holds the generation, or another command has made another generation live.
    """
    name = live.model
    log = DriverLog.of(warehouse, name)
    with (
        pause_stream(log, reason, on_progress) if drain else nullcontext(),
        leases.stream_lock(warehouse.root, name, patience=UNLOCK_SECONDS if drain else 0.0),
    ):
        now = generations.read_named(warehouse, name)
        if now.generation != live.generation:
            raise generations.stream_taken_error(
                name, f"{now.generation} has just become the live generation"
            )
        leases.refuse_if_driven(now)
        yield


class _PauseHold:
    """A hold that never replaces the hold of another command."""

    def __init__(self, log: DriverLog, reason: str) -> None:
        self.log, self.reason, self.began_at = log, reason, clock.now()

    def renew(self, first: bool = False) -> None:
        there = self.log.hold()
        if there is None and first or self._is_mine(there):
            self.log.put_hold(Hold(self.reason, self.began_at, clock.now() + HOLD))

    def end(self) -> None:
        if self._is_mine(self.log.hold()):
            self.log.put_hold(None)

    def _is_mine(self, hold: Hold | None) -> bool:
        return hold is not None and (hold.reason, hold.began_at) == (self.reason, self.began_at)
