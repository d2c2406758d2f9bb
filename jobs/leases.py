"""The lease on a generation: one driver at a time.

A generation's row names the driver that holds it, an epoch that rises with every driver, and a heartbeat. Two drivers
that start at once both try to write themselves into the row; Delta commits one, and on a local file system a lock
that dies with its process decides even before that.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs.generations import LIVE, SHADOW, Generation, all_of, one_of_two, taken, update
from jobs.owners import HEARTBEAT_SECONDS, Owner
from jobs.tables import Warehouse


def acquire(warehouse: Warehouse, generation: Generation, owner: Owner) -> Generation:
    """Write `owner` into the generation's lease.

    Raises:
        UserError: another driver that still runs holds it, or took it at the same moment.
    """
    from pyspark.sql import functions as F

    refuse_if_driven(generation)
    mine = F.col("generation") == generation.generation
    same = F.col("epoch") == generation.epoch
    with one_of_two(generation.model):
        update(
            warehouse,
            mine & same & F.col("status").isin(LIVE, SHADOW),
            {
                "owner": F.lit(owner.text()),
                "epoch": F.lit(generation.epoch + 1).cast("bigint"),
                "heartbeat": F.current_timestamp(),
                "last_error": F.lit(None).cast("string"),
            },
        )
    now = next(one for one in all_of(warehouse, generation.model) if one.generation == generation.generation)
    if now.owner != owner.text():
        raise taken(generation.model, f"another driver has just taken generation {generation.generation}")
    return now


def refuse_if_driven(generation: Generation) -> None:
    """Refuse a generation that a driver still holds.

    Raises:
        UserError: it names that driver.
    """
    holder = Owner.parse(generation.owner)
    if holder is not None and holder.alive_after_waiting(generation.heartbeat):
        raise taken(
            generation.model,
            f"process {holder.pid} on {holder.host} drives generation {generation.generation}",
        )


def beat(warehouse: Warehouse, generation: Generation) -> bool:
    """Renew the heartbeat; False if the lease is no longer this driver's."""
    from pyspark.sql import functions as F

    mine = (F.col("generation") == generation.generation) & (F.col("epoch") == generation.epoch)
    update(warehouse, mine, {"heartbeat": F.current_timestamp()})
    now = next(
        (one for one in all_of(warehouse, generation.model) if one.generation == generation.generation), None
    )
    return now is not None and now.epoch == generation.epoch and now.owner == generation.owner


def release(warehouse: Warehouse, generation: Generation, error: str | None = None) -> None:
    """Give the lease back, with the error that ended the driver if one did."""
    from pyspark.sql import functions as F

    mine = (F.col("generation") == generation.generation) & (F.col("epoch") == generation.epoch)
    update(
        warehouse,
        mine,
        {
            "owner": F.lit(None).cast("string"),
            "heartbeat": F.current_timestamp(),
            "last_error": F.lit(error).cast("string"),
        },
    )


@contextmanager
def heartbeat(
    warehouse: Warehouse, generation: Generation, stop: threading.Event
) -> Iterator[threading.Event]:
    """Renew the lease from a thread of its own; a lease that was lost stops the stream."""
    done, lost = threading.Event(), threading.Event()

    def renew() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            try:
                held = beat(warehouse, generation)
            except Exception:  # one that fails must not end the stream; the next one tells
                continue
            if not held:
                lost.set()
                stop.set()
                return

    thread = threading.Thread(target=renew, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        done.set()
        thread.join()


@contextmanager
def stream_lock(root: str, model: str, generation: str | None = None) -> Iterator[None]:
    """Hold the model's stream, or that of one generation, on this machine; the lock dies with the process.

    Raises:
        UserError: another process holds it.
    """
    if "://" in root:
        yield
        return
    folder = Path(root, "_locks")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"stream-{generation or model}.lock", "a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            raise taken(model, f"process {holder} of this machine drives it") from error
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        yield
