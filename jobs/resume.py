"""Release a hold: Airflow may start the stream again."""

from __future__ import annotations

from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.specs.loading import load_spec
from jobs.supervision.driver_log import DriverLog
from jobs.supervision.driver_status import log_name


def run(settings: Settings, model: str, what: str = "stream") -> Report:
    """Release the hold on a model's stream, monitor or skill query. Idempotent.

    `stop` puts a hold, and so does Airflow after too many crashes; crashes are then counted from 0 again.
    """
    name = load_spec(model, settings.models).name
    log = DriverLog.at(settings.warehouse, log_name(what, name))
    held = log.hold()
    log.put_hold(None)
    line = f"the {what} of {name} may run again" if held else f"the {what} of {name} was not held"
    return Report([line], {"model": name, "held": held is not None})


if __name__ == "__main__":
    from jobs.cli import main

    main("resume")
