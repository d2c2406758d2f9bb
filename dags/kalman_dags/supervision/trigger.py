"""Trigger of continuous streams: watch a driver, or wait until a driver may start. No Spark, no worker slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from jobs.supervision.driver_log import DriverLog
from jobs.supervision.driver_status import read_driver_status, request_stop

PATH = "dags.kalman_dags.supervision.trigger.StreamTrigger"
"""The import path of this class for the triggerer, with the installed package instead of the folder of the DAGs."""

POLL_SECONDS = 5.0


class StreamEvent(StrEnum):
    """The reason why the trigger fires. The values are stored in Airflow's database."""

    GONE = "gone"  # no driver runs
    DUE = "due"  # a driver may start now, or another process has started it
    WATCHED = "watched"  # the task has watched for the time of a run


class StreamTrigger(BaseTrigger):
    """Trigger that fires when a model's driver is gone, or, without a driver, when the next driver may start.

    It reads the log of drivers and stores no state, so it may be killed and restarted on any triggerer.

    Args:
        root: the root of the warehouse.
        model: the name of the model in the log of drivers.
        until: when watching ends, ISO 8601; a running driver continues to run.
        due: when a driver may start, ISO 8601, if no hold remains. None means to watch the running driver.
        poll: seconds between reads of the log.
    """

    def __init__(
        self, root: str, model: str, until: str, due: str | None = None, poll: float = POLL_SECONDS
    ) -> None:
        super().__init__()
        self.root, self.model, self.until, self.due, self.poll = root, model, until, due, poll

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments from which Airflow recreates this trigger."""
        values = {name: getattr(self, name) for name in ("root", "model", "until", "due", "poll")}
        return PATH, values

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Read the log of drivers until there is an event, and yield it."""
        while True:
            try:
                event = await asyncio.to_thread(self.event)
            except OSError as error:  # the store is unreachable, but the driver may be running
                self.log.warning("Cannot read the log of drivers: %s", error)
                event = None
            if event is not None:
                yield TriggerEvent(event.value)
                return
            await asyncio.sleep(self.poll)

    async def on_kill(self) -> None:
        """Ask the driver to stop, or release a stream that was given up, after the task was cleared or its state was
        set.
        """
        await asyncio.to_thread(self._stop)

    def event(self) -> StreamEvent | None:
        """Return the event that has occurred, if any."""
        log, now = DriverLog.at(self.root, self.model), datetime.now(UTC)
        status = read_driver_status(log)
        over = StreamEvent.WATCHED if now >= datetime.fromisoformat(self.until) else None
        if self.due is None:
            return over if status.driven else StreamEvent.GONE
        if status.driven:
            return StreamEvent.DUE  # another process has started a driver: watch it
        return over if now < datetime.fromisoformat(self.due) or log.hold() is not None else StreamEvent.DUE

    def _stop(self) -> None:
        log = DriverLog.at(self.root, self.model)
        hold = log.hold()
        if hold is not None and hold.crashes is not None:
            log.put_hold(None)
        request_stop(log, read_driver_status(log), "its task was cleared, or its state set")
