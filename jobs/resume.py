"""Take back a stop: Airflow may start the stream again."""

from __future__ import annotations

from jobs.lease_log import LeaseLog
from jobs.report import Report
from jobs.settings import Settings
from jobs.spec import load_spec
from jobs.watch import log_name


def run(settings: Settings, model: str, monitor: bool = False) -> Report:
    """End the hold that `stop` has put on a model's stream, or on its monitor. Again it changes nothing."""
    name = load_spec(model, settings.models).name
    what = "monitor" if monitor else "stream"
    log = LeaseLog.at(settings.warehouse, log_name(what, name))
    held = log.hold()
    log.put_hold(None)
    line = f"the {what} of {name} may run again" if held else f"the {what} of {name} was not held"
    return Report([line], {"model": name, "held": held is not None})


if __name__ == "__main__":
    from jobs.cli import main

    main("resume")
