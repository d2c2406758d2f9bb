"""One monitor of a model at a time: it says in a log of drivers of its own that it runs, and ends when asked there.

A monitor's state is its checkpoints, and what it writes is in transactions of their micro-batches, so two at once would
write nothing twice; one of them would fail. The log keeps them apart, and lets Airflow find the one that there is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jobs import clock
from jobs.errors import first_line
from jobs.generations import taken
from jobs.launch import LAUNCH_VARIABLE
from jobs.lease_log import CAUGHT_UP, FAILED, FOLDER, STOPPED, Drive, LeaseLog
from jobs.owners import SIGN_SECONDS, Owner
from jobs.small_files import hadoop_files
from jobs.watch import LIVE, log_name

if TYPE_CHECKING:
    from jobs.tables import Warehouse

MONITOR = "monitor"
"""The verb, and in the log the name of what is driven."""


@contextmanager
def held(warehouse: Warehouse, model: str, stop: threading.Event) -> Iterator[None]:
    """Be the model's monitor; a request in the log, or a later monitor, sets `stop`.

    Raises:
        UserError: another one runs.
    """
    name = log_name(MONITOR, model)
    log = LeaseLog(hadoop_files(warehouse, f"{FOLDER}/{name}"), name)
    before = next(iter(log.history(MONITOR)[-1:]), None)
    if before is not None and before.ended_at is None and before.owner.alive_after_waiting(before.beat_at):
        raise taken(model, f"process {before.owner.pid} on {before.owner.host} is its monitor")
    jvm: Any = warehouse.spark._jvm
    owner = Owner.this_process(int(jvm.java.lang.ProcessHandle.current().pid()))
    epoch = 1 if before is None else before.epoch + 1
    launch = os.environ.get(LAUNCH_VARIABLE)
    drive = Drive(name, MONITOR, epoch, LIVE, owner, log.next_time(), clock.now(), launch)
    log.write(drive)
    log.prune(MONITOR)
    done = threading.Event()

    def sign() -> None:
        while not done.wait(SIGN_SECONDS):
            try:
                log.write(replace(drive, beat_at=clock.now()))
                if log.asked_to_stop(drive) is not None or log.overtaken(MONITOR, epoch):
                    stop.set()
            except Exception:  # one that fails must not end the monitor; the next one tells
                continue

    thread = threading.Thread(target=sign, name="monitor", daemon=True)
    thread.start()
    how, error = FAILED, None
    try:
        yield
        how = STOPPED if stop.is_set() else CAUGHT_UP
    except BaseException as problem:
        error = first_line(problem, 500)
        raise
    finally:
        done.set()
        thread.join()
        at = clock.now()
        log.write(replace(drive, beat_at=at, ended_at=at, how=how, error=error))
