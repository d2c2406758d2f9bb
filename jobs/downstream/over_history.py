"""Compute windows and rules over a history in one batch pass, with the code of the live queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pandas as pd
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.core.report import Report, format_count
from jobs.downstream.rule_operator import (
    OUTPUT,
    RulePlan,
    build_alert_rows,
    build_event_columns,
    build_rule_packets,
    update_bucket,
)
from jobs.downstream.rules import NEVER
from jobs.downstream.windows import Windows
from jobs.spark.warehouse import Warehouse, format_ddl
from jobs.specs.model_spec import ModelSpec
from jobs.specs.monitor import Monitor
from jobs.state.encoding.keys import build_key_kind
from jobs.storage.tables import alerts_history, estimates_history, windows_history

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS_A_BUCKET = 1_000_000


def monitor_history(warehouse: Warehouse, spec: ModelSpec, monitor: Monitor) -> Report:
    """Compute the windows and alerts over a model's history, and replace the rows of the same definition.

    Raises:
        UserError: the model has no history.
    """
    rows, table = read_history(warehouse, spec.name), estimates_history(spec.name)
    lines, data = [], {"model": spec.name, "table": table, "version": warehouse.latest_version(table)}
    if monitor.windows:
        name = windows_history(spec.name)
        found = Windows(warehouse, spec, monitor, "").complete(rows)
        replace(warehouse, found, name, monitor.definition("windows"))
        lines.append(f"windows over {table} -> {name}")
    if monitor.rules:
        name, kind = alerts_history(spec.name), build_key_kind(spec.key, rows.schema)
        found = build_alert_rows(compute_events(spec, monitor, rows), monitor, kind)
        replace(warehouse, found, name, monitor.definition("rules"))
        mine = warehouse.read(name).filter(F.col("definition") == monitor.definition("rules"))
        counts = {row["status"]: row["count"] for row in mine.groupBy("status").count().collect()}
        raised, cleared = (int(counts.get(status, 0)) for status in ("raised", "cleared"))
        lines.append(f"{format_count(raised, 'alert')} raised and {cleared:,} cleared -> {name}")
        data |= {"raised": raised, "cleared": cleared}
    return Report(lines, data)


def read_history(warehouse: Warehouse, model: str) -> DataFrame:
    """Return the estimates of a model's history.

    Raises:
        UserError: the history has no estimates.
    """
    table = estimates_history(model)
    if not warehouse.exists(table):
        raise UserError(
            f"model {model} has no history in {warehouse.root}: make it with "
            f"`kalman-pipeline estimate --model {model}`"
        )
    return warehouse.read(table)


def compute_events(spec: ModelSpec, monitor: Monitor, estimates: DataFrame) -> DataFrame:
    """Return alerts raised and cleared by estimates (`rule_operator.OUTPUT`)."""
    buckets = max(1, -(-estimates.count() // ROWS_A_BUCKET))
    plan, packed = build_rule_packets(spec, monitor, estimates, buckets)
    return packed.repartition(buckets, "bucket").mapInPandas(_build_event_worker(plan), OUTPUT)


def _build_event_worker(plan: RulePlan) -> Callable[[Iterator[pd.DataFrame]], Iterator[pd.DataFrame]]:
    def work(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        payloads: dict[int, list[bytes]] = {}
        clock = NEVER
        for frame in frames:
            for bucket, payload in zip(frame["bucket"], frame["payload"], strict=True):
                if payload is not None:
                    payloads.setdefault(bucket, []).append(payload)
            clock = max(clock, int(frame["clock"].max()))
        for bucket in sorted(payloads):
            records, events = update_bucket(plan, plan.layout.empty(), payloads[bucket], clock)
            if len(events.key):
                yield pd.DataFrame(build_event_columns(records, events))

    return work


def replace(warehouse: Warehouse, rows: DataFrame, table: str, definition: str) -> None:
    """Replace a definition's rows in a table in one commit; create the table if it is missing."""
    warehouse.create(table, format_ddl(rows.schema))
    warehouse.replace(rows, table, [[("definition", "=", definition)]])
