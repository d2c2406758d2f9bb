"""Operator of continuous streams: one driver at any time, which outlives task, worker, scheduler and triggerer.

The operator starts a driver, or finds the running driver, and then defers, so it holds no worker slot. Its trigger
resumes it when the driver has ended.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from psutil import NoSuchProcess

from jobs.core import times
from jobs.core.errors import ALREADY_RUNNING, UserError
from jobs.core.redaction import escape_unprintable
from jobs.supervision.driver_log import CAUGHT_UP, LOST, STOPPED, DriverLog, Hold
from jobs.supervision.driver_status import (
    ENDED,
    NONE,
    SILENT,
    CrashCounter,
    DriverStatus,
    give_up_reason,
    list_killable_processes,
    read_driver_status,
    request_stop,
    resume_command,
)
from jobs.supervision.launcher import read_tail
from kalman_dags.asset_events import tell
from kalman_dags.outcome import VerbOutcome
from kalman_dags.places import find_warehouse_root
from kalman_dags.supervision.launchers import Work, build_launcher, format_settings, name_log_file
from kalman_dags.supervision.trigger import StreamEvent, StreamTrigger

WATCH = timedelta(hours=1)
"""How long one task watches a driver. The next run's task finds the driver, so runs and their logs stay short."""
LOST_TRIGGER = timedelta(minutes=10)
"""A trigger that is this late is lost by a fault of Airflow: the task fails, and its retry finds the driver."""
STEADY_SECONDS = 600.0
"""A driver that ran this long was healthy, so its failure does not count as a repetition of an earlier failure."""
MAX_FAILURES = 6
FIRST_DELAY = timedelta(seconds=5)
MAX_DELAY = timedelta(minutes=5)
TAKEN_DELAY = timedelta(seconds=15)


class StreamForeverOperator(BaseOperator):
    """Keep a model's stream, monitor or skill query running.

    Args:
        model: the name of the model.
        verb: stream, monitor or skill.
        seconds: the time between micro-batches.
        kafka: whether the driver needs Spark's connector for Kafka (`ModelSpec.speaks_to_kafka`).
        give_up_after: the number of consecutive drivers that may crash before committing a micro-batch; then the task
            gives up. None means that it never gives up.

    After a driver that was asked to stop, or whose generation was retired, the next driver starts at once, or when the
    hold ends. After a driver that failed or was killed, the next driver resumes from the checkpoint after 5 s, then 10
    s, and so on up to 5 minutes. After six consecutive failures the task fails, and Airflow retries it. Crashes without
    a committed micro-batch are also counted over tasks and runs: after `give_up_after` crashes the task fails for good
    and leaves a hold. No driver starts until the hold is released (`resume`) or the task is cleared.
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
            self.log.info("This run had given up (%s); its task was cleared, so it starts again", hold.reason)
            log.put_hold(None)
        self._drive(0, (datetime.now(UTC) + WATCH).isoformat())

    def resume(self, context: Context, event: str, failures: int, until: str) -> None:
        """Continue after the trigger has fired."""
        self._run = context.get("run_id")
        if event == StreamEvent.WATCHED:
            self._fail_if_given_up()
            status = self._look()
            drives = {} if status.driver is None else {"generation": status.driver.generation}
            tell(context, self.outlets, VerbOutcome([], drives))
            self.log.info("%s; the next run keeps watching it", status.text())
            return
        status = self._look()
        if status.driven:
            self._watch(failures, until)
        if event == StreamEvent.DUE:
            self._drive(failures, until)
        self._after(status, failures, until)

    def on_kill(self) -> None:
        """Ask a driver that this task is just starting to stop."""
        log = self._log()
        request_stop(log, read_driver_status(log), "its task was killed")

    def _drive(self, failures: int, until: str) -> NoReturn:
        """Watch the running driver, or start one."""
        status = self._look()
        if status.driven:
            self.log.info("%s", status.text())
            self._watch(failures, until)
        hold = self._log().hold()
        if hold is not None:
            if hold.crashes is not None:
                self.log.error(
                    "Not started, because it was given up: %s; start it again by %s",
                    hold.reason,
                    self._how_to_restart,
                )
            else:
                end = hold.until or f"`{resume_command(self.verb, self.model)}`"
                self.log.info("Not started: %s, until %s", hold.reason, end)
            self._wait(timedelta(0), failures, until)
        if status.state == SILENT:
            self._kill(status)
        CrashCounter(self._root, self._log()).record_progress()
        try:
            started = build_launcher().start(self._root, self._work, format_settings(seconds=self.seconds))
        except UserError as error:
            self._count(DriverStatus(ENDED, error=error.message))
            raise AirflowException(error.message) from error
        self.log.info("Started a driver: process %s on %s, log %s", started.pid, started.host, started.log)
        self._watch(failures, until)

    def _after(self, status: DriverStatus, failures: int, until: str) -> NoReturn:
        """Decide the next step after a driver has ended."""
        self.log.info("%s", status.text())
        if status.state == NONE:
            self._drive(failures, until)
        if self._is_intended_end(status):
            self._log().put_crashes(None)
            self._drive(0, until)
        if status.exit_code == ALREADY_RUNNING:  # the other driver may not be in the log yet
            self._wait(TAKEN_DELAY, failures, until)
        self._show_log(status)
        self._count(status)
        failures = 1 if status.seconds > STEADY_SECONDS else failures + 1
        if failures >= MAX_FAILURES:
            raise AirflowException(f"{failures} drivers in a row have failed, the last: {status.text()}")
        self._wait(min(MAX_DELAY, FIRST_DELAY * 2 ** (failures - 1)), failures, until)

    def _is_intended_end(self, status: DriverStatus) -> bool:
        """Return whether a driver ended as intended: on request, by retirement of its generation, or with success."""
        if status.state == SILENT:
            return False
        log = self._log()
        asked = any(log.read_stop_request(one) for one in (status.driver, status.launch) if one is not None)
        # A driver without an exit code was killed, or ran in a cluster, where only its record in the log is known.
        if status.exit_code is None:
            return asked or status.how in (LOST, STOPPED, CAUGHT_UP)
        return asked or status.how == LOST or status.exit_code == 0

    def _count(self, status: DriverStatus) -> None:
        """Count a crash, and give up at the limit."""
        log = self._log()
        number = CrashCounter(self._root, log).count(status.text(), status.seconds)
        if self.give_up_after is None or number < self.give_up_after:
            return
        if log.hold() is None:
            log.put_hold(Hold(give_up_reason(number, status), times.now(), None, number, self._run))
        self._fail_if_given_up()

    def _fail_if_given_up(self) -> None:
        hold = self._log().hold()
        if hold is not None and hold.crashes is not None:
            raise AirflowFailException(
                f"given up: {hold.reason}; fix the cause, then start it again by {self._how_to_restart}"
            )

    @property
    def _how_to_restart(self) -> str:
        return f"`{resume_command(self.verb, self.model)}`, or by clearing this task"

    def _kill(self, status: DriverStatus) -> None:
        """Kill a driver on this machine that shows no sign of life; the next driver resumes from the checkpoint."""
        found = list_killable_processes(status)
        for process in found:
            self.log.warning("Killing process %s: %s", process.pid, status.text())
            with suppress(NoSuchProcess):  # Spark's process ends with the driver's
                process.kill()
        if not found:
            raise AirflowException(
                f"{status.text()}, and nothing proves that Airflow started it: kill it, nothing is lost by that"
            )

    def _watch(self, failures: int, until: str) -> NoReturn:
        self._defer_until(StreamTrigger(self._root, self._work.name, until), failures, until)

    def _wait(self, delay: timedelta, failures: int, until: str) -> NoReturn:
        due = (datetime.now(UTC) + delay).isoformat()
        self._defer_until(StreamTrigger(self._root, self._work.name, until, due), failures, until)

    def _defer_until(self, trigger: StreamTrigger, failures: int, until: str) -> NoReturn:
        left = datetime.fromisoformat(until) - datetime.now(UTC)
        self.defer(
            trigger=trigger,
            method_name="resume",
            kwargs={"failures": failures, "until": until},
            timeout=max(left, timedelta(0)) + LOST_TRIGGER,
        )
        raise AssertionError("deferring raises")

    def _show_log(self, status: DriverStatus) -> None:
        if status.launch is not None and status.launch.log:
            log, folder = Path(status.launch.log), name_log_file(self._work.name).parent
            self.log.info("The end of %s:\n%s", escape_unprintable(str(log)), read_tail(log, folder))

    def _look(self) -> DriverStatus:
        return read_driver_status(self._log())

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
        try:
            return find_warehouse_root()
        except UserError as error:
            raise AirflowFailException(error.message) from error
