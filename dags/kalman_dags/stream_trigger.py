"""The trigger of continuous streams: watch a driver, or wait until one may be started. No Spark, no worker slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from jobs.supervision.driver_log import DriverLog
from jobs.supervision.driver_status import driver_status
from jobs.supervision.stopping import ask

PATH = "dags.kalman_dags.stream_trigger.StreamTrigger"
"""The path by which the triggerer imports this class: the installed package is on its path, the DAGs folder is not."""

POLL_SECONDS = 5.0

GONE, DUE, WATCHED = "gone", "due", "watched"
"""Its events: there is no driver (any more); a driver may be started now; this run has watched long enough."""


class StreamTrigger(BaseTrigger):
    """A trigger that fires when a model's driver is gone, or, without a driver, when the next one may be started.

    It reads the log of drivers and has no state, so it may be killed and restarted anywhere.

    Args:
        root: of the warehouse.
        model: whose driver.
        until: ISO 8601; the end of watching; the driver, if there is one, continues.
        due: ISO 8601; wait until then, and for the end of a hold, to start a driver. None: watch the running one.
        poll: seconds between two looks.
    """

    def __init__(
        self, root: str, model: str, until: str, due: str | None = None, poll: float = POLL_SECONDS
    ) -> None:
        super().__init__()
        self.root, self.model, self.until, self.due, self.poll = root, model, until, due, poll

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the path and the arguments that recreate this trigger."""
        values = {name: getattr(self, name) for name in ("root", "model", "until", "due", "poll")}
        return PATH, values

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll until there is an event, and yield it."""
        while True:
            try:
                told = await asyncio.to_thread(self.told)
            except OSError as error:  # the store is out of reach: the driver may well run on
                self.log.warning("Cannot read the log of drivers: %s", error)
                told = None
            if told is not None:
                yield TriggerEvent(told)
                return
            await asyncio.sleep(self.poll)

    async def on_kill(self) -> None:
        """Stop the driver, or lift the hold of a stream that was given up: the task was cleared, or marked."""
        await asyncio.to_thread(self._stop)

    def told(self) -> str | None:
        """Return the event that has occurred; None if there is none yet."""
        log, now = DriverLog.at(self.root, self.model), datetime.now(UTC)
        sight = driver_status(log)
        over = WATCHED if now >= datetime.fromisoformat(self.until) else None
        if self.due is None:
            return over if sight.driven else GONE
        if sight.driven:
            return DUE  # somebody else has started one: it is found and watched
        return over if now < datetime.fromisoformat(self.due) or log.hold() is not None else DUE

    def _stop(self) -> None:
        log = DriverLog.at(self.root, self.model)
        hold = log.hold()
        if hold is not None and hold.crashes is not None:
            log.put_hold(None)
        ask(log, driver_status(log), "its task was cleared, or marked")
