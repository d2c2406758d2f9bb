"""One monitor, and one judge of forecasts, of a model at a time: each says in a log of drivers of its own that it runs.

Their state is in their checkpoints, and what they write is in transactions of their micro-batches, so two at once would
write nothing twice; one of them would fail. The log keeps them apart, lets Airflow find the one that there is, and is
where it is asked to end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jobs import clock
from jobs.crashes import QUERIES
from jobs.errors import first_line
from jobs.followers import lease_log, queries_of
from jobs.generations import taken
from jobs.launch import LAUNCH_VARIABLE
from jobs.lease_log import CAUGHT_UP, FAILED, STOPPED, Drive
from jobs.owners import SIGN_SECONDS, Owner
from jobs.watch import LIVE

if TYPE_CHECKING:
    from jobs.spec import ModelSpec
    from jobs.tables import Warehouse


@contextmanager
def held(warehouse: Warehouse, spec: ModelSpec, verb: str, stop: threading.Event) -> Iterator[None]:
    """Be the model's monitor, or its judge of forecasts; a request in the log, or a later one, sets `stop`.

    In the log the verb is the name of what is driven.

    Raises:
        UserError: another one runs.
    """
    log = lease_log(warehouse, verb, spec.name)
    before = log.last(verb)
    if before is not None and before.ended_at is None and before.owner.alive_after_waiting(before.beat_at):
        raise taken(spec.name, f"process {before.owner.pid} on {before.owner.host} runs it", verb)
    jvm: Any = warehouse.spark._jvm
    owner = Owner.this_process(int(jvm.java.lang.ProcessHandle.current().pid()))
    epoch = 1 if before is None else before.epoch + 1
    launch = os.environ.get(LAUNCH_VARIABLE)
    rules = {QUERIES: [query.name for query in queries_of(spec, verb)]}
    drive = Drive(log.model, verb, epoch, LIVE, owner, log.next_time(), clock.now(), launch, rules=rules)
    log.write(drive)
    log.prune(verb)
    done = threading.Event()

    def sign() -> None:
        while not done.wait(SIGN_SECONDS):
            try:
                log.write(replace(drive, beat_at=clock.now()))
                if log.asked_to_stop(drive) is not None or log.overtaken(verb, epoch):
                    stop.set()
            except Exception:  # one that fails must not end the run; the next one tells
                continue

    thread = threading.Thread(target=sign, name=verb, daemon=True)
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
