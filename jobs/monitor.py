"""Watch a model's live estimates: windows over event time, and rules over each key's sequence that raise alerts.

Two streams over the estimates table, each with a checkpoint of its own. What they write is in transactions of (that
stream, micro-batch), so that a monitor that is killed and started again changes nothing that was there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from jobs.downstream_monitor import Watcher
from jobs.errors import UserError
from jobs.followers import MONITOR
from jobs.live_queries import following
from jobs.loading import load_spec
from jobs.report import Report
from jobs.settings import Settings
from jobs.times import AVAILABLE_NOW, trigger_seconds

if TYPE_CHECKING:
    pass


def run(settings: Settings, model: str, trigger: str = AVAILABLE_NOW) -> Report:
    """Watch the live estimates of a model, as its spec's section `monitor` says.

    Args:
        settings: of the command.
        model: name or path of its spec.
        trigger: `available-now` (take what is there, then end), or seconds between micro-batches (until SIGTERM).

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
    from jobs.cli import main

    main("monitor")
