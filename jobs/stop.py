"""Stop a stream that runs: its driver finishes its micro-batch and ends. And let it be started again."""

from __future__ import annotations

import getpass
import time
from datetime import UTC, datetime, timedelta

from jobs.errors import ALREADY_RUNNING, RUN_FAILED, UserError
from jobs.lease_log import Hold, LeaseLog
from jobs.owners import machine
from jobs.report import Report
from jobs.settings import Settings
from jobs.spec import load_spec
from jobs.times import duration_us
from jobs.watch import SILENT, Sight, log_name, look, resume_command

POLL_SECONDS = 0.5


def run(
    settings: Settings,
    model: str,
    hold: str | None = None,
    restart: bool = False,
    wait: str = "10min",
    needed: bool = False,
    what: str = "stream",
) -> Report:
    """Ask the driver of a model's stream, or of what follows it, to end, and wait for that. Again it changes nothing.

    Args:
        settings: of the command.
        model: name or path of its spec.
        hold: how long Airflow is not to start the stream again, such as 30min; by default until `resume`.
        restart: put no such hold, so that Airflow starts it again at once.
        wait: how long to wait for the end.
        needed: end with exit code 3 if nothing drives it.
        what: stream, monitor or skill.

    Raises:
        UserError: it has not ended in time, or gives no sign of life.
    """
    name = load_spec(model, settings.models).name
    longest = _duration("--wait", wait)
    log = LeaseLog.at(settings.warehouse, log_name(what, name))
    if not restart:
        until = None if hold is None else datetime.now(UTC) + _duration("--hold", hold)
        log.put_hold(Hold(f"stopped by {getpass.getuser()} on {machine()}", datetime.now(UTC), until))
    if needed and not _there(look(log)):
        raise UserError(f"nothing drives the {what} of {name}", ALREADY_RUNNING)
    was = end_driver(log, longest, "by command")
    return _report(name, what, was, log)


def end_driver(log: LeaseLog, longest: timedelta, reason: str) -> Sight:
    """Ask the driver of a stream, or of what follows it, to end, wait until it has; return what was seen of it before.

    Raises:
        UserError: it has not ended in time, or gives no sign of life.
    """
    was = sight = look(log)
    ask(log, sight, reason)
    deadline = time.monotonic() + longest.total_seconds()
    while _there(sight):
        if sight.state == SILENT:
            raise UserError(f"{sight.text()}: kill it, nothing is lost by that", RUN_FAILED)
        if time.monotonic() > deadline:
            waited = f"{longest.total_seconds() / 60:g} min"
            raise UserError(
                f"{sight.text()}, after {waited} still: it may be in a long micro-batch", RUN_FAILED
            )
        time.sleep(POLL_SECONDS)
        sight = look(log)
        if sight.launch != was.launch or sight.drive is not None and was.drive is None:
            ask(log, sight, reason)  # it had no lease yet, or another has begun
    return was


def _there(sight: Sight) -> bool:
    return sight.driven or sight.state == SILENT


def ask(log: LeaseLog, sight: Sight, reason: str) -> None:
    """Leave a request to end for a driver that runs or starts, once."""
    for record in (sight.drive, sight.launch):
        if sight.driven and record is not None and log.asked_to_stop(record) is None:
            log.ask_to_stop(record, reason)


def _report(name: str, what: str, was: Sight, log: LeaseLog) -> Report:
    held = log.hold()
    lines = [f"the {what} of {name} has stopped" if was.driven else f"nothing drove the {what} of {name}"]
    if held is not None:
        end = (
            f"until {held.until:%Y-%m-%d %H:%M} UTC"
            if held.until
            else f"until `{resume_command(what, name)}`"
        )
        lines.append(f"Airflow does not start it again {end}")
    return Report(
        lines,
        {
            "model": name,
            "stopped": was.driven,
            "generation": was.drive and was.drive.generation,
            "held_until": held and held.until and held.until.isoformat(),
            "held": held is not None,
        },
    )


def _duration(option: str, text: str) -> timedelta:
    try:
        return timedelta(microseconds=duration_us(text))
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}; write such as 30min or 2h") from error


if __name__ == "__main__":
    from jobs.cli import main

    main("stop")
