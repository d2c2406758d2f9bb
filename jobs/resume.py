"""Take back a stop: Airflow may start the stream again."""

from __future__ import annotations

from jobs.lease_log import LeaseLog
from jobs.report import Report
from jobs.settings import Settings
from jobs.spec import load_spec


def run(settings: Settings, model: str) -> Report:
    """End the hold that `stop` has put on a model's stream. Again it changes nothing."""
    name = load_spec(model, settings.models).name
    log = LeaseLog.at(settings.warehouse, name)
    held = log.hold()
    log.put_hold(None)
    line = f"the stream of {name} may run again" if held else f"the stream of {name} was not held"
    return Report([line], {"model": name, "held": held is not None})


if __name__ == "__main__":
    from jobs.cli import main

    main("resume")
