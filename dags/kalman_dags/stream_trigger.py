"""The trigger of streams that run for ever: watch a driver, or wait for the moment to start one. No Spark, no slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from jobs.supervision.driver_log import DriverLog
from jobs.supervision.driver_status import driver_status
from jobs.supervision.stopping import request_stop

PATH = "dags.kalman_dags.stream_trigger.StreamTrigger"
"""Where the triggerer finds this class: it has the installed package, not the folder of the DAGs, on its path."""

POLL_SECONDS = 5.0

GONE, DUE, WATCHED = "gone", "due", "watched"
"""What it tells: there is no driver (any more); a driver may be started now; this run has watched long enough."""


class StreamTrigger(BaseTrigger):
    """Fire when a model's driver is gone, or, without one, when the next may be started.

    It reads the log of drivers and keeps nothing, so that it may be killed and begun again anywhere.

    Args:
        root: of the warehouse.
        model: whose driver.
        until: ISO 8601; then watching ends, and the driver, if there is one, goes on.
        due: ISO 8601; wait until then, and for the end of a hold, to start a driver. None: watch the one that there is.
        poll: seconds between two looks.
    """

    def __init__(
        self, root: str, model: str, until: str, due: str | None = None, poll: float = POLL_SECONDS
    ) -> None:
        super().__init__()
        self.root, self.model, self.until, self.due, self.poll = root, model, until, due, poll

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return what makes this trigger again."""
        values = {name: getattr(self, name) for name in ("root", "model", "until", "due", "poll")}
        return PATH, values

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until there is something to tell, and tell it."""
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
        """Ask the driver to end, or begin anew what was given up: somebody has cleared the task or marked its state."""
        await asyncio.to_thread(self._stop)

    def told(self) -> str | None:
        """Return what there is to tell now."""
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
        request_stop(log, driver_status(log), "its task was cleared, or marked")
