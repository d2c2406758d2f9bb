"""Watch a model's live estimates: windows over event time, and rules over each key's sequence that raise alerts.

Two streams over the estimates table, each with a checkpoint of its own. What they write is in transactions of (that
stream, micro-batch), so that a monitor that is killed and started again changes nothing that was there.
"""

from __future__ import annotations

import time

from jobs.core.command import Model, Trigger, command
from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.core.times import AVAILABLE_NOW, trigger_seconds
from jobs.downstream.monitor import Watcher
from jobs.downstream.queries import MONITOR
from jobs.downstream.runner import following
from jobs.specs.loading import load_spec


@command
def run(settings: Settings, model: Model, trigger: Trigger = AVAILABLE_NOW) -> Report:
    """Watch the live estimates: windows over time, and rules over keys that raise alerts.

    Raises:
        UserError: the spec has no such section, nothing is live, another monitor runs, or a query failed.
    """
    began = time.monotonic()
    spec, seconds = load_spec(model, settings.models), trigger_seconds(trigger)
    if spec.monitor is None:
        raise UserError(
            f"{spec.source_path}: there is nothing to monitor: add `monitor` with windows or rules (docs/streaming.md)"
        )
    with following(settings, spec, MONITOR, spec.speaks_to_kafka) as (warehouse, stop, progress):
        watcher = Watcher(warehouse, spec, seconds, stop, spec.monitor)
        watcher.run(progress)
    return watcher.report(time.monotonic() - began)


if __name__ == "__main__":
    run.main()
