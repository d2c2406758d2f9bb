"""Let go what a model's monitor and forecast skill have left and nothing needs: former definitions, and old rows.

A checkpoint is first renamed, which happens at once: from then on its definition would begin anew. Then it goes, with
its notes and its rows. A run that was killed in between is ended by the next one, which finds what has been renamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from jobs.core.times import duration_us
from jobs.downstream.queries import (
    CHECKPOINTS,
    MONITOR,
    SKILL,
    VERBS,
    Query,
    forget,
    lease_log,
    queries_of,
    query_of,
)
from jobs.observability.lag import table_lag
from jobs.specs.model_spec import ModelSpec
from jobs.specs.retention import span_of
from jobs.warehouse.checkpoints import Checkpoint
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.files import Folder, hadoop_files
from jobs.warehouse.tables import estimates, forecast_skill, windows

if TYPE_CHECKING:
    from pyspark.sql import Column

REMOVED = "removed-"
"""Put before the name of a checkpoint that is going."""


@dataclass
class Followers:
    """One run for one model; `dry`: only say what would go."""

    warehouse: Warehouse
    spec: ModelSpec
    dry: bool

    def run(self) -> dict[str, Any]:
        """Return what has gone, or would: `definitions`, and how many `rows` of each table."""
        going = self._former()
        rows = {}
        for query in going:
            count = self._remove(query)
            if count:
                rows[query.table] = rows.get(query.table, 0) + count
        for table, old in self._old():
            count = self.warehouse.delete(table, old, self.dry)
            if count:
                rows[table] = rows.get(table, 0) + count
        return {"definitions": sorted(query.name for query in going), "rows": rows}

    def _former(self) -> list[Query]:
        """Return queries that the spec asks for no more, nothing runs, and whose last micro-batch is long ago.

        And those that an earlier run has begun to remove.
        """
        folders = hadoop_files(self.warehouse, CHECKPOINTS).names("")
        begun = [name.removeprefix(REMOVED) for name in folders if name.startswith(REMOVED)]
        asked = {query.name for verb in VERBS for query in queries_of(self.spec, verb)}
        running = {name for verb in VERBS for name in self._running(verb)}
        found = {query.name: query for query in map(self._query, begun) if query is not None}
        for name in folders:
            query = self._query(name)
            if query is not None and name not in asked | running and self._old_enough(query):
                found[name] = query
        return list(found.values())

    def _query(self, folder: str) -> Query | None:
        return query_of(self.spec.name, folder)

    def _running(self, verb: str) -> list[str]:
        """Return the queries of a driver that runs, whatever the spec says by now."""
        last = lease_log(self.warehouse, verb, self.spec.name).last(verb)
        if last is None or last.ended_at is not None or not last.owner.alive(last.beat_at):
            return []
        return last.queries or []

    def _old_enough(self, query: Query) -> bool:
        checkpoint = Checkpoint(self.warehouse, query.checkpoint)
        last = checkpoint.last_commit()
        if last is None:
            return True  # it has done nothing
        return datetime.now(UTC) - checkpoint.committed_at(last) > span_of(self.spec.retention.definitions)

    def _remove(self, query: Query) -> int:
        """Remove a query's checkpoint, notes and rows; return how many rows."""
        if self.dry:
            return self.warehouse.delete(query.table, F.col("definition") == query.definition, dry=True)
        going = Folder(self.warehouse, f"{CHECKPOINTS}/{REMOVED}{query.name}")
        begun, there = going.exists(), Folder(self.warehouse, query.checkpoint)
        if there.exists() and begun:  # it has begun anew since a run that was killed: its rows are of that
            going.remove()
            return 0
        if not begun:
            there.rename(going)
        rows = forget(self.warehouse, query)
        going.remove()
        return rows

    def _old(self) -> list[tuple[str, Column]]:
        """Return the rows that are too old, by table: as far behind the newest event time as the spec says."""
        kept, found = self.spec.retention, []
        monitor = self.spec.monitor
        open_us = 0 if monitor is None else duration_us(monitor.watermark)
        for table, column, span, least_us in (
            (windows(self.spec.name), "window_end", kept.windows, open_us),
            (forecast_skill(self.spec.name), "event_time", kept.skill, 0),
        ):
            if span is None or not self.warehouse.exists(table):
                continue
            newest = self.warehouse.read(table).agg(F.max(F.unix_micros(column)).alias("at")).first()
            if newest is not None and newest["at"] is not None:
                # A window that is still open would begin anew: what is counted in it stays.
                cut = newest["at"] - max(duration_us(span), least_us)
                found.append((table, F.unix_micros(column) < cut))
        return found


def furthest_behind(warehouse: Warehouse, spec: ModelSpec) -> tuple[str, timedelta]:
    """Return which of a spec's queries is furthest behind the estimates, and for how long some have waited for it.

    One that has not begun will begin with the table as it is, and waits for nothing.
    """
    found = [("", timedelta(0))]
    for verb in VERBS:
        for query in queries_of(spec, verb):
            done = Checkpoint(warehouse, query.checkpoint).progressed()
            if done is not None:
                lag = table_lag(warehouse, estimates(spec.name), done.version)
                found.append((verb, timedelta(seconds=lag.seconds or 0.0)))
    return max(found, key=lambda one: one[1])


def lines_of(found: dict[str, Any], would: str) -> list[str]:
    """Say what has gone, or would."""
    lines = []
    names = {MONITOR: "the monitor", SKILL: "forecast skill"}
    for verb, text in names.items():
        former = [name for name in found["definitions"] if name.startswith(f"{verb}-")]
        if former:
            lines.append(f"{would} former definitions of {text}: {', '.join(former)}")
    return [*lines, *(f"{would} {count:,} rows of {table}" for table, count in found["rows"].items())]
