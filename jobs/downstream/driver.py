"""Register the driver of a model's monitor or forecast skill in the log of drivers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jobs.core import times
from jobs.core.errors import extract_first_line
from jobs.downstream.queries import list_queries, open_driver_log
from jobs.lineage.generations import stream_taken_error
from jobs.spark.warehouse import Warehouse
from jobs.supervision.driver_log import (
    CAUGHT_UP,
    FAILED,
    LIVENESS_SECONDS,
    QUERIES,
    STOPPED,
    DriverIdentity,
    DriverRecord,
)
from jobs.supervision.driver_status import LIVE
from jobs.supervision.launcher import LAUNCH_VARIABLE

if TYPE_CHECKING:
    from jobs.specs.model_spec import ModelSpec


@contextmanager
def register_driver(
    warehouse: Warehouse, spec: ModelSpec, verb: str, stop: threading.Event
) -> Iterator[None]:
    """Register this process as the model's only monitor or skill driver, and renew its liveness until the end.

    A stop request in the log, or a later driver, sets `stop`. The log stores the verb in place of a generation.

    Raises:
        UserError: another driver runs.
    """
    log = open_driver_log(warehouse, verb, spec.name)
    last = log.last(verb)
    if last is not None and last.ended_at is None and last.owner.is_alive_after_waiting(last.beat_at):
        raise stream_taken_error(spec.name, f"process {last.owner.pid} on {last.owner.host} runs it", verb)
    jvm: Any = warehouse.spark._jvm
    owner = DriverIdentity.identify_process(int(jvm.java.lang.ProcessHandle.current().pid()))
    epoch = 1 if last is None else last.epoch + 1
    launch = os.environ.get(LAUNCH_VARIABLE)
    rules = {QUERIES: [query.name for query in list_queries(spec, verb)]}
    record = DriverRecord(
        log.model, verb, epoch, LIVE, owner, log.compute_next_time(), times.now(), launch, rules=rules
    )
    log.write(record)
    log.prune(verb)
    done = threading.Event()

    def renew() -> None:
        while not done.wait(LIVENESS_SECONDS):
            try:
                log.write(replace(record, beat_at=times.now()))
                if log.read_stop_request(record) is not None or log.overtaken(verb, epoch):
                    stop.set()
            except Exception:  # a failed write must not end the run; the next write follows soon
                continue

    thread = threading.Thread(target=renew, name=verb, daemon=True)
    thread.start()
    how, error = FAILED, None
    try:
        yield
        how = STOPPED if stop.is_set() else CAUGHT_UP
    except BaseException as problem:
        error = extract_first_line(problem, 500)
        raise
    finally:
        done.set()
        thread.join()
        at = times.now()
        log.write(replace(record, beat_at=at, ended_at=at, how=how, error=error))
