"""Remove former definitions and old rows of a model's monitor and forecast skill.

A checkpoint is first renamed, which is atomic: from then on its definition would start anew. Then the checkpoint, its
files and its rows are removed. After a crash in between, the next run finds the renamed checkpoint and completes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs.core.times import parse_duration_us
from jobs.downstream.queries import (
    MONITOR,
    SKILL,
    VERBS,
    Query,
    find_query,
    list_queries,
    open_driver_log,
    open_monitor_files,
    remove_exports,
    remove_results,
)
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.specs.retention import parse_span
from jobs.storage.checkpoints import CHECKPOINTS, Checkpoint, checkpoint_of
from jobs.storage.files import remove_folder, rename_folder
from jobs.storage.positions import to_datetime
from jobs.storage.row_changes import delete_rows
from jobs.storage.table_rows import Filter, read_parts
from jobs.storage.tables import estimates, forecast_skill, forecasts, windows
from jobs.storage.warehouse import Tables
from jobs.supervision.progress import measure_table_lag

REMOVED = "removed-"
"""Prefix of a renamed checkpoint."""


@dataclass
class DownstreamCleanup:
    """Cleanup run for one model; `dry`: only report what would be removed."""

    warehouse: Warehouse
    spec: ModelSpec
    dry: bool

    def run(self) -> dict[str, Any]:
        """Remove, or report if `dry`, former definitions and old rows: `definitions`, and number of `rows` by table."""
        former = find_former_queries(self.warehouse, self.spec)
        rows = {}
        for query in former:
            count = self._remove(query)
            if count:
                rows[query.table] = rows.get(query.table, 0) + count
        for table, old in self._old_rows():
            count = delete_rows(self.warehouse, table, old, self.dry)
            if count:
                rows[table] = rows.get(table, 0) + count
        return {"definitions": sorted(query.name for query in former), "rows": rows}

    def _remove(self, query: Query) -> int:
        """Remove a query's checkpoint, files and rows; return the number of rows."""
        if self.dry:
            return delete_rows(self.warehouse, query.table, query.rows, dry=True)
        files, renamed = self.warehouse.files(""), checkpoint_of(f"{REMOVED}{query.name}")
        is_renamed = files.exists(renamed)
        if files.exists(query.checkpoint) and is_renamed:
            # Restarted after a crash in between: the rows belong to the new checkpoint.
            remove_folder(self.warehouse, renamed)
            return 0
        if not is_renamed:
            rename_folder(self.warehouse, query.checkpoint, renamed)
        rows = remove_results(self.warehouse, query)
        open_monitor_files(self.warehouse, query.model).remove(query.adopted_file)
        remove_exports(self.warehouse, query)
        remove_folder(self.warehouse, renamed)
        return rows

    def _old_rows(self) -> list[tuple[str, Filter]]:
        """Return a filter of old rows for each table."""
        found: list[tuple[str, Filter]] = []
        for table, column, span_us in _kept_spans(self.spec):
            newest = _newest(self.warehouse, table, column)
            if newest is not None:
                found.append((table, [[(column, "<", newest - timedelta(microseconds=span_us))]]))
        return found


def find_former_queries(warehouse: Tables, spec: ModelSpec) -> list[Query]:
    """Return queries that the spec no longer defines, that do not run, and whose last micro-batch is old enough.

    Also return queries whose removal an earlier run has started.
    """
    folders = warehouse.files(CHECKPOINTS).names("")
    renamed = [name.removeprefix(REMOVED) for name in folders if name.startswith(REMOVED)]
    defined = {query.name for verb in VERBS for query in list_queries(spec, verb)}
    running = {name for verb in VERBS for name in _running(warehouse, verb, spec.name)}
    started = [query for name in renamed if (query := find_query(spec.name, name)) is not None]
    found = {query.name: query for query in started}
    for name in folders:
        query = find_query(spec.name, name)
        if query is not None and name not in defined | running and _old_enough(warehouse, spec, query):
            found[name] = query
    return list(found.values())


def _running(warehouse: Tables, verb: str, model: str) -> list[str]:
    """Return the queries of a running driver, which may have started with another version of the spec."""
    last = open_driver_log(warehouse, verb, model).last(verb)
    return [] if last is None or not last.runs else last.queries or []


def _old_enough(warehouse: Tables, spec: ModelSpec, query: Query) -> bool:
    checkpoint = Checkpoint(warehouse, query.checkpoint)
    last = checkpoint.find_last_commit()
    if last is None:
        return True  # no micro-batch yet
    return datetime.now(UTC) - checkpoint.committed_at(last) > parse_span(spec.retention.definitions)


def _kept_spans(spec: ModelSpec) -> list[tuple[str, str, int]]:
    """Return the retention of each table: table, time column, microseconds before the newest time."""
    kept, monitor = spec.retention, spec.monitor
    # An open window would start anew, so its counts stay.
    open_us = 0 if monitor is None else parse_duration_us(monitor.watermark)
    return [
        (table, column, max(parse_duration_us(span), least_us))
        for table, column, span, least_us in (
            (windows(spec.name), "window_end", kept.windows, open_us),
            (forecast_skill(spec.name), "event_time", kept.skill, 0),
            (forecasts(spec.name), "event_time", kept.forecasts, 0),
        )
        if span is not None
    ]


def _newest(tables: Tables, table: str, column: str) -> datetime | None:
    """Return the newest time in a column of a table; None without rows."""
    newest: Any = pc.max  # type: ignore[attr-defined]
    parts = (part[column] for part in read_parts(tables.root, table, [column]) if column in part.column_names)
    times = [to_datetime(newest(one.cast(pa.int64())).as_py()) for one in parts]
    return max((one for one in times if one is not None), default=None)


def find_largest_lag(warehouse: Tables, spec: ModelSpec) -> tuple[str, timedelta]:
    """Return the verb whose query lags the estimates most, and that lag.

    A query without a micro-batch does not lag: it will start with the whole table.
    """
    found = [("", timedelta(0))]
    for verb in VERBS:
        for query in list_queries(spec, verb):
            done = Checkpoint(warehouse, query.checkpoint).find_progress()
            if done is not None:
                lag = measure_table_lag(warehouse, estimates(spec.name), done.version)
                found.append((verb, timedelta(seconds=lag.seconds or 0.0)))
    return max(found, key=lambda one: one[1])


def format_cleanup(found: dict[str, Any], would: str) -> list[str]:
    """Return report lines for the result of `DownstreamCleanup.run`; each starts with `would`."""
    lines = []
    names = {MONITOR: "the monitor", SKILL: "forecast skill"}
    for verb, text in names.items():
        former = [name for name in found["definitions"] if name.startswith(f"{verb}-")]
        if former:
            lines.append(f"{would} former definitions of {text}: {', '.join(former)}")
    return [*lines, *(f"{would} {count:,} rows of {table}" for table, count in found["rows"].items())]
