"""The lease on a generation: at most one driver holds it, and no driver holds it while a command pauses the stream."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

from jobs.core import times
from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.settings import find_local_path
from jobs.lineage import generations
from jobs.lineage.compatibility import refuse_half_written
from jobs.lineage.generations import (
    LIVE,
    SHADOW,
    Generation,
    raise_conflict_as_taken,
    stream_taken_error,
    update,
)
from jobs.spark.job_labels import set_label
from jobs.spark.warehouse import Warehouse
from jobs.storage.files import open_lock
from jobs.storage.row_changes import NOW
from jobs.supervision.driver_log import CAUGHT_UP, DriverIdentity, DriverLog, DriverRecord, Hold
from jobs.supervision.driver_status import DriverStatus, end_driver
from jobs.supervision.registered_driver import RegisteredDriver, driving, register

LOCK_POLL_SECONDS = 0.1


@dataclass
class Lease(RegisteredDriver):
    """A driver's lease on a generation.

    suspect: the latest earlier epoch whose driver may still run somewhere, or 0.
    """

    generation: Generation
    suspect: int

    @property
    def taken_over(self) -> bool:
        """Return whether an earlier driver may still run, because it did not release the lease."""
        return self.suspect > 0

    def check(self) -> None:
        """Check that this driver still holds the lease; the check is cheap enough for every micro-batch.

        Raises:
            UserError: a later driver holds the lease.
        """
        if self.overtaken():
            raise UserError(
                f"generation {self.generation.generation} is no longer this driver's: another has taken it over",
                RUN_FAILED,
            )


def acquire_lease(
    warehouse: Warehouse, generation: Generation, owner: DriverIdentity, rules: dict[str, Any] | None = None
) -> Lease:
    """Write `owner` into the generation's lease, then into the log of drivers.

    If the driver is killed between the two writes, only its epoch remains, and the next driver takes the next epoch.

    Args:
        warehouse: warehouse of the generation.
        generation: the generation to drive.
        owner: the driver.
        rules: fields that decide how rows are processed (`compatibility.collect_row_rules`), which may not change
            within a micro-batch.

    Raises:
        UserError: a running driver holds the lease, or another driver took the lease at the same moment.
    """
    log = DriverLog.at(warehouse.root, generation.model)
    before = next((one for one in log.list_drivers() if one.generation == generation.generation), None)
    refuse_if_driven(generation)
    if before is not None and before.runs_after_waiting():
        raise _build_driven_error(generation, before.owner)
    if rules is not None:
        refuse_half_written(warehouse, generation, before and before.rules, rules)
    with raise_conflict_as_taken(generation.model):
        update(
            warehouse,
            {**_match_lease(generation), "status": (LIVE, SHADOW)},
            {"owner": owner.text(), "epoch": generation.epoch + 1, "heartbeat": NOW, "last_error": None},
        )
    now = generations.read_named(warehouse, generation.model, generation.generation)
    if now.owner != owner.text():
        raise stream_taken_error(
            generation.model, f"another driver has just taken generation {generation.generation}"
        )
    suspect = _find_suspect_epoch(generation, before)
    record = register(log, now.generation, now.epoch, now.status, owner, rules, suspect)
    return Lease(log, record, now, suspect)


def _match_lease(generation: Generation) -> dict[str, Any]:
    """Return the columns that identify the row of a generation whose lease has not changed since the row was read."""
    return {"generation": generation.generation, "epoch": generation.epoch}


def _find_suspect_epoch(generation: Generation, before: DriverRecord | None) -> int:
    """Return the latest epoch whose driver may wake up and write, because it recorded no end; 0 means no such driver.

    Each record repeats the suspect epoch that its driver found, so that a later driver that ended does not hide it. A
    missing process on this machine proves nothing, because another container may have the same name.
    """
    if before is None or before.epoch != generation.epoch or before.ended_at is None:
        return generation.epoch
    return before.epoch - 1 if before.suspect is None else before.suspect


def refuse_if_driven(generation: Generation) -> None:
    """Refuse a generation whose lease a running driver holds.

    Raises:
        UserError: a driver holds the lease; the message names its process.
    """
    holder = DriverIdentity.parse(generation.owner)
    if holder is not None and holder.is_alive_after_waiting(generation.heartbeat):
        raise _build_driven_error(generation, holder)


def _build_driven_error(generation: Generation, holder: DriverIdentity) -> UserError:
    return stream_taken_error(
        generation.model,
        f"process {holder.pid} on {holder.host} drives generation {generation.generation}",
    )


def renew(warehouse: Warehouse, generation: Generation) -> Generation | None:
    """Renew the heartbeat and return the current row of the generation; None if this driver has lost the lease."""
    update(warehouse, _match_lease(generation), {"heartbeat": NOW})
    known = generations.read_generations(warehouse, generation.model)
    now = generations.find_named(known, generation.generation)
    held = now is not None and now.epoch == generation.epoch and now.owner == generation.owner
    return now if held else None


def release(warehouse: Warehouse, lease: Lease, how: str, error: str | None = None) -> None:
    """Release the lease, and record how the driver ended and its error."""
    set_label(warehouse.spark, f"stream {lease.generation.model}", "release the lease")
    try:
        update(
            warehouse, _match_lease(lease.generation), {"owner": None, "heartbeat": NOW, "last_error": error}
        )
    finally:
        lease.record_end(how, error)


@contextmanager
def holding(
    warehouse: Warehouse, lease: Lease, stop: threading.Event, done: str = CAUGHT_UP
) -> Iterator[None]:
    """Renew the lease in a thread during the block, then release it; arguments as in `driving`."""

    def renew_row() -> bool:
        set_label(warehouse.spark, f"{lease.generation.generation}: heartbeat")
        now = renew(warehouse, lease.generation)
        if now is not None:
            lease.record = replace(lease.record, status=now.status)  # a shadow may have been promoted
        return now is not None

    with driving(lease, stop, renew_row, partial(release, warehouse, lease), done):
        yield


@contextmanager
def stream_lock(
    root: str, model: str, generation: str | None = None, what: str = "stream", patience: float = 0.0
) -> Iterator[None]:
    """Lock the stream of a model, or of one generation, on this machine; the lock is released when the process ends.

    root: root of the warehouse; only a local warehouse is locked. what: stream, monitor or skill. patience: seconds to
    wait for the lock.

    Raises:
        UserError: another process holds the lock.
    """
    local = find_local_path(root)
    if local is None:
        yield
        return
    folder = local / "_locks"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"stream-{generation or model}" if what == "stream" else f"stream-{what}-{model}"
    with open_lock(folder / f"{name}.lock") as handle:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    handle.seek(0)
                    holder = handle.read().strip() or "unknown"
                    raise stream_taken_error(
                        model, f"process {holder} of this machine drives it", what
                    ) from error
                time.sleep(LOCK_POLL_SECONDS)
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        yield


HOLD = timedelta(minutes=5)
"""Time from the last renewal of a hold to its expiry."""
RENEW_SECONDS = 60.0
UNLOCK_SECONDS = 10.0
"""Maximum time from the recorded end of a driver to the release of the lock on its machine."""
WAIT = timedelta(minutes=30)
"""Maximum time that a command waits for a driver to finish its micro-batch."""


@contextmanager
def pause_stream(
    log: DriverLog, reason: str, on_progress: Callable[[str], None] = lambda text: None
) -> Iterator[DriverStatus]:
    """Stop a stream's driver, if there is one, and hold the stream; yield the driver's former status.

    A hold of another command is left unchanged, during the pause and after it.

    Raises:
        UserError: the driver has not stopped in time, or shows no sign of life.
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
    """Keep drivers from starting on a model's live generation; with `drain`, first stop the running driver.

    Raises:
        UserError: a driver holds the generation, or another command has made another generation live.
    """
    name = live.model
    log = DriverLog.at(warehouse.root, name)
    with (
        pause_stream(log, reason, on_progress) if drain else nullcontext(),
        stream_lock(warehouse.root, name, patience=UNLOCK_SECONDS if drain else 0.0),
    ):
        now = generations.read_named(warehouse, name)
        if now.generation != live.generation:
            raise generations.stream_taken_error(
                name, f"{now.generation} has just become the live generation"
            )
        refuse_if_driven(now)
        yield


class _PauseHold:
    """A hold that never replaces the hold of another command."""

    def __init__(self, log: DriverLog, reason: str) -> None:
        self.log, self.reason, self.began_at = log, reason, times.now()

    def renew(self, first: bool = False) -> None:
        there = self.log.hold()
        if there is None and first or self._is_mine(there):
            self.log.put_hold(Hold(self.reason, self.began_at, times.now() + HOLD))

    def end(self) -> None:
        if self._is_mine(self.log.hold()):
            self.log.put_hold(None)

    def _is_mine(self, hold: Hold | None) -> bool:
        return hold is not None and (hold.reason, hold.began_at) == (self.reason, self.began_at)
