"""Stop a running stream: its driver finishes its micro-batch and ends, and Airflow does not restart it."""

from __future__ import annotations

import getpass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.core.command import Model, Monitor, Skill, answer, parse_duration_option, select_query
from jobs.core.errors import ALREADY_RUNNING, UserError
from jobs.core.report import Report
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.supervision.driver_log import DriverLog
    from jobs.supervision.driver_status import DriverStatus


@answer
def run(
    settings: Settings,
    model: Model,
    hold: Annotated[
        str | None,
        Option(help="How long Airflow must not start it again, such as 30min; by default until `resume`."),
    ] = None,
    restart: Annotated[bool, Option("--restart", help="Airflow may start it again at once.")] = False,
    wait: Annotated[str, Option(help="How long to wait for the end.")] = "10min",
    needed: Annotated[bool, Option("--needed", help="Exit code 3 if nothing drives the stream.")] = False,
    monitor: Monitor = False,
    skill: Skill = False,
) -> Report:
    """Stop a running stream; it finishes its micro-batch. Idempotent.

    Raises:
        UserError: the driver has not stopped in time, or gives no sign of life.
    """
    from jobs.specs.loading import load_spec
    from jobs.supervision.driver_log import DriverLog, Hold, read_machine_name
    from jobs.supervision.driver_status import end_driver, format_log_name, is_there, read_driver_status

    what = select_query(monitor, skill)
    name = load_spec(model, settings.models).name
    longest = parse_duration_option("--wait", wait)
    log = DriverLog.at(settings.warehouse, format_log_name(what, name))
    if not restart:
        until = None if hold is None else datetime.now(UTC) + parse_duration_option("--hold", hold)
        log.put_hold(
            Hold(f"stopped by {getpass.getuser()} on {read_machine_name()}", datetime.now(UTC), until)
        )
    if needed and not is_there(read_driver_status(log)):
        raise UserError(f"the {what} of {name} has no driver", ALREADY_RUNNING)
    was = end_driver(log, longest, "by command")
    return _report(name, what, was, log)


def _report(name: str, what: str, was: DriverStatus, log: DriverLog) -> Report:
    from jobs.supervision.driver_status import resume_command

    held = log.hold()
    lines = [f"the {what} of {name} has stopped" if was.driven else f"the {what} of {name} had no driver"]
    if held is not None:
        end = (
            f"until {held.until:%Y-%m-%d %H:%M} UTC"
            if held.until
            else f"until `{resume_command(what, name)}`"
        )
        lines.append(f"Airflow does not restart it {end}")
    return Report(
        lines,
        {
            "model": name,
            "stopped": was.driven,
            "generation": was.driver and was.driver.generation,
            "held_until": held and held.until and held.until.isoformat(),
            "held": held is not None,
        },
    )


if __name__ == "__main__":
    run.main()
