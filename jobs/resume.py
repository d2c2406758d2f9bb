"""Release a hold: Airflow may start the stream again."""

from __future__ import annotations

from jobs.core.command import Model, Monitor, Skill, answer, select_query
from jobs.core.report import Report
from jobs.core.settings import Settings


@answer
def run(settings: Settings, model: Model, monitor: Monitor = False, skill: Skill = False) -> Report:
    """Release a stream that `stop` holds or Airflow has given up: it may be started again. Idempotent."""
    from jobs.specs.loading import load_spec
    from jobs.supervision.driver_log import DriverLog
    from jobs.supervision.driver_status import format_log_name

    what = select_query(monitor, skill)
    name = load_spec(model, settings.models).name
    log = DriverLog.at(settings.warehouse, format_log_name(what, name))
    held = log.hold()
    log.put_hold(None)
    line = f"the {what} of {name} may run again" if held else f"the {what} of {name} was not held"
    return Report([line], {"model": name, "held": held is not None})


if __name__ == "__main__":
    run.main()
