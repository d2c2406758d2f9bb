"""The operator of continuous streams: one driver at any time, which outlives task, worker, scheduler and triggerer.

It starts a driver, or finds the running one, and defers: no worker slot is held. Its trigger wakes it when the
driver is gone.
"""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from jobs.core import clock
from jobs.core.errors import ALREADY_RUNNING, UserError
from jobs.supervision import crash_count
from jobs.supervision.driver_log import CAUGHT_UP, LOST, STOPPED, DriverLog, Hold
from jobs.supervision.driver_status import (
    ENDED,
    NONE,
    SILENT,
    DriverStatus,
    driver_status,
    processes,
    resume_command,
)
from jobs.supervision.launcher import tail
from jobs.supervision.stopping import ask
from kalman_dags.launchers import Work, about, launcher
from kalman_dags.operator import place
from kalman_dags.stream_trigger import WATCHED, StreamTrigger

WATCH = timedelta(hours=1)
"""How long one task watches. The task of the next run finds the driver, so runs and their logs stay short."""
LOST_TRIGGER = timedelta(minutes=10)
"""A trigger that is overdue by this much was lost by a fault of Airflow's: the task fails, and its retry finds the
driver."""
STEADY_SECONDS = 600.0
"""A driver that lived so long was healthy: its failure starts a new count of consecutive failures."""
MAX_FAILURES = 6
FIRST_DELAY = timedelta(seconds=5)
MAX_DELAY = timedelta(minutes=5)
TAKEN_DELAY = timedelta(seconds=15)


class StreamForeverOperator(BaseOperator):
    """An operator that keeps a model's stream, monitor or skill query running continuously.

    Args:
        model: its name.
        verb: stream, monitor or skill.
        seconds: between micro-batches.
        kafka: its driver needs Spark's connector for Kafka (`ModelSpec.speaks_to_kafka`).
        give_up_after: number of consecutive drivers that crash before committing a micro-batch; None: no limit.

    After a driver that was stopped, or whose generation was retired, the next one starts at once, or after the hold.
    After one that failed or was killed, the next one resumes from its checkpoint after 5 s, then 10 s, and so on
    up to 5 minutes; the sixth consecutive failure fails the task, and its retries try again. Drivers that crash without
    progress are also counted over tasks and runs: after `give_up_after` of them the task fails for good, and
    none is started until somebody removes the hold that it leaves (`resume`), or clears the task.
    """

    ui_color = "#e8f1fb"

    def __init__(
        self,
        *,
        model: str,
        seconds: float,
        verb: str = "stream",
        kafka: bool = False,
        give_up_after: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.model, self.seconds, self.verb, self.kafka = model, seconds, verb, kafka
        self.give_up_after = give_up_after
        self._run: str | None = None

    def execute(self, context: Context) -> None:
        """Find the driver or start one, then watch it."""
        self._run = context.get("run_id")
        log = self._log()
        hold = log.hold()
        if hold is not None and hold.crashes is not None and hold.run == self._run:
            self.log.info("This run had given up (%s), and is resumed", hold.reason)
            log.put_hold(None)
        self._drive(0, self._until())

    def resume(self, context: Context, event: str, failures: int, until: str) -> None:
        """Continue after the trigger has fired."""
        self._run = context.get("run_id")
        if event == WATCHED:
            self._fail_if_given_up()
            self.log.info("%s; the next run continues to watch it", self._look().text())
            return
        sight = self._look()
        if sight.driven:
            self._watch(failures, until)
        if event == "due":
            self._drive(failures, until)
        self._after(sight, failures, until)

    def on_kill(self) -> None:
        """Stop a driver that this task is just starting."""
        log = self._log()
        ask(log, driver_status(log), "its task was killed")

    def _drive(self, failures: int, until: str) -> NoReturn:
        """Watch the running driver, or start one."""
        sight = self._look()
        if sight.driven:
            self.log.info("%s", sight.text())
            self._watch(failures, until)
        hold = self._log().hold()
        if hold is not None:
            if hold.crashes is not None:
                self.log.error("Not started, as given up: %s; resume by %s", hold.reason, self._resume_hint)
            else:
                end = hold.until or f"`{resume_command(self.verb, self.model)}`"
                self.log.info("Not started: %s, until %s", hold.reason, end)
            self._wait(timedelta(0), failures, until)
        if sight.state == SILENT:
            self._kill(sight)
        crash_count.about_to_start(self._root, self._log())
        try:
            started = launcher().start(self._root, self._work, about(seconds=self.seconds))
        except UserError as error:
            self._count(DriverStatus(ENDED, error=error.message))
            raise AirflowException(error.message) from error
        self.log.info("Started a driver: process %s on %s, log %s", started.pid, started.host, started.log)
        self._watch(failures, until)

    def _after(self, sight: DriverStatus, failures: int, until: str) -> NoReturn:
        """Start the next driver, wait, or fail, depending on how the last one ended."""
        self.log.info("%s", sight.text())
        if sight.state == NONE:
            self._drive(failures, until)
        if self._meant(sight):
            self._log().put_crashes(None)
            self._drive(0, until)
        if sight.exit_code == ALREADY_RUNNING:  # it may not be in the log yet
            self._wait(TAKEN_DELAY, failures, until)
        self._show_log(sight)
        self._count(sight)
        failures = 1 if sight.seconds > STEADY_SECONDS else failures + 1
        if failures >= MAX_FAILURES:
            raise AirflowException(f"{failures} drivers in a row have failed, the last: {sight.text()}")
        self._wait(min(MAX_DELAY, FIRST_DELAY * 2 ** (failures - 1)), failures, until)

    def _meant(self, sight: DriverStatus) -> bool:
        """Return whether a driver ended on purpose: by request, by retirement, or by its own report."""
        if sight.state == SILENT:
            return False
        log = self._log()
        asked = any(log.asked_to_stop(one) for one in (sight.drive, sight.launch) if one is not None)
        if (
            sight.exit_code is None
        ):  # killed, or in a cluster, where what it wrote itself is all that is known
            return asked or sight.how in (LOST, STOPPED, CAUGHT_UP)
        return asked or sight.how == LOST or sight.exit_code == 0

    def _count(self, sight: DriverStatus) -> None:
        """Count a crash, and give up when the limit is reached."""
        log = self._log()
        number = crash_count.count(self._root, log, sight.text(), sight.seconds)
        if self.give_up_after is None or number < self.give_up_after:
            return
        if log.hold() is None:
            log.put_hold(Hold(crash_count.said(number, sight), clock.now(), None, number, self._run))
        self._fail_if_given_up()

    def _fail_if_given_up(self) -> None:
        hold = self._log().hold()
        if hold is not None and hold.crashes is not None:
            raise AirflowFailException(
                f"given up: {hold.reason}; correct that, then resume by {self._resume_hint}"
            )

    @property
    def _resume_hint(self) -> str:
        return f"`{resume_command(self.verb, self.model)}`, or by clearing this task"

    def _kill(self, sight: DriverStatus) -> None:
        """Kill a driver of this machine that gives no sign of life; the next one resumes from the checkpoint."""
        assert sight.drive is not None
        for pid in processes(sight.drive.owner):
            self.log.warning("Killing process %s: %s", pid, sight.text())
            os.kill(pid, signal.SIGKILL)

    def _watch(self, failures: int, until: str) -> NoReturn:
        self._defer(StreamTrigger(self._root, self._work.name, until), failures, until)

    def _wait(self, delay: timedelta, failures: int, until: str) -> NoReturn:
        due = (datetime.now(UTC) + delay).isoformat()
        self._defer(StreamTrigger(self._root, self._work.name, until, due), failures, until)

    def _defer(self, trigger: StreamTrigger, failures: int, until: str) -> NoReturn:
        left = datetime.fromisoformat(until) - datetime.now(UTC)
        self.defer(
            trigger=trigger,
            method_name="resume",
            kwargs={"failures": failures, "until": until},
            timeout=max(left, timedelta(0)) + LOST_TRIGGER,
        )
        raise AssertionError("deferring raises")

    def _show_log(self, sight: DriverStatus) -> None:
        if sight.launch is not None and sight.launch.log:
            self.log.info("The end of %s:\n%s", sight.launch.log, tail(Path(sight.launch.log)))

    def _until(self) -> str:
        return (datetime.now(UTC) + WATCH).isoformat()

    def _look(self) -> DriverStatus:
        return driver_status(self._log())

    def _log(self) -> DriverLog:
        try:
            return DriverLog.at(self._root, self._work.name)
        except UserError as error:
            raise AirflowFailException(error.message) from error

    @property
    def _work(self) -> Work:
        return Work(self.model, self.seconds, self.verb, self.kafka)

    @property
    def _root(self) -> str:
        return place("KALMAN_WAREHOUSE", "warehouse")
