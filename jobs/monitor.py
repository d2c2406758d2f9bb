"""Monitor a model's live estimates: windows over event time, and rules over each key's readings that raise alerts.

The verb runs two queries over the estimates table, each with its own checkpoint. Each writes in Delta transactions
(query, micro-batch), so that a restart after a crash is idempotent.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

from typer import Option

from jobs.core.command import Model, Trigger, command
from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.core.times import AVAILABLE_NOW, trigger_seconds


@command
def run(
    settings: Settings,
    model: Model,
    trigger: Trigger = AVAILABLE_NOW,
    history: Annotated[
        bool,
        Option("--history", help="Read estimates_history/MODEL, all at once, instead of the live estimates."),
    ] = False,
    adopt: Annotated[
        str | None,
        Option(
            help="Start changed rules from an export of the former rules' states (`export --monitor`), with the "
            "estimates after it."
        ),
    ] = None,
) -> Report:
    """Watch the live estimates: windows over time, and rules over keys that raise alerts.

    Raises:
        UserError: the spec has no such section, nothing is live, another monitor runs, there is no such export, or a
            query failed.
    """
    from jobs.downstream.over_history import monitor_history
    from jobs.downstream.queries import MONITOR
    from jobs.downstream.rule_exports import MonitorQueries
    from jobs.downstream.rule_operator import list_read_columns
    from jobs.downstream.runner import start_exclusive_run
    from jobs.spark.conf import build_short_rows_conf
    from jobs.spark.session import spark_session
    from jobs.spark.warehouse import Warehouse
    from jobs.specs.loading import load_spec

    began = time.monotonic()
    spec, seconds = load_spec(model, settings.models), trigger_seconds(trigger)
    if spec.monitor is None:
        raise UserError(
            f"{spec.source_path}: has no section `monitor`: add it with windows or rules (docs/monitoring.md)"
        )
    if adopt is not None and (history or not spec.monitor.rules):
        raise UserError("--adopt is for rules over the live estimates")
    if history:
        warehouse = Warehouse(
            spark_session(settings, f"monitor {spec.name}", build_short_rows_conf()), settings.warehouse
        )
        found = monitor_history(warehouse, spec, spec.monitor)
        return replace(found, data={**found.data, "seconds": time.monotonic() - began})
    columns, kafka = list_read_columns(spec, spec.monitor), spec.speaks_to_kafka
    with start_exclusive_run(settings, spec, MONITOR, columns, kafka) as (warehouse, stop, progress):
        queries = MonitorQueries(warehouse, spec, seconds, stop, spec.monitor, adopt)
        queries.run(progress)
    return queries.report(time.monotonic() - began)


if __name__ == "__main__":
    run.main()
