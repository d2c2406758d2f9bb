"""Watch a model's live estimates: windows over event time, and rules over each key's sequence that raise alerts.

Two streams over the estimates table, each with a checkpoint of its own. What they write is in transactions of (that
stream, micro-batch), so that a monitor that is killed and started again changes nothing that was there.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.errors import RUN_FAILED, UserError
from jobs.progress import Progress
from jobs.report import Report
from jobs.settings import Settings
from jobs.spec import ModelSpec, load_spec
from jobs.spec_monitor import Monitor
from jobs.tables import Warehouse, estimates
from jobs.triggers import AVAILABLE_NOW, trigger_seconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from jobs.monitor_rules import Alerts
    from jobs.monitor_windows import Windows

POLL_SECONDS = 0.2
SWITCH_SECONDS = 10.0
"""How often a monitor that runs on looks if another generation has become the live one."""


def run(settings: Settings, model: str, trigger: str = AVAILABLE_NOW) -> Report:
    """Watch the live estimates of a model, as its spec's section `monitor` says.

    Args:
        settings: of the command.
        model: name or path of its spec.
        trigger: `available-now` (take what is there, then end), or seconds between micro-batches (until SIGTERM).

    Raises:
        UserError: the spec has no such section, nothing is live, another monitor runs, or a query failed.
    """
    from jobs.leases import stream_lock
    from jobs.monitor_lease import held
    from jobs.session import spark_session
    from jobs.spark_conf import interpreted_conf
    from jobs.stream import stop_signal

    began = time.monotonic()
    spec, seconds = load_spec(model, settings.models), trigger_seconds(trigger)
    if spec.monitor is None:
        raise UserError(
            f"{spec.source_path}: there is nothing to monitor: add `monitor` with windows or rules (docs/streaming.md)"
        )
    title = f"monitor {spec.name}"
    with stream_lock(settings.warehouse, title.replace(" ", "-")), stop_signal() as stop:
        spark = spark_session(settings, title, interpreted_conf(), spec.speaks_to_kafka)
        warehouse = Warehouse(spark, settings.warehouse)
        watcher = _Watcher(warehouse, spec, spec.monitor, seconds, stop)
        with held(warehouse, spec.name, stop), Progress(title, None, quiet=settings.quiet) as progress:
            watcher.run(progress)
    return watcher.report(time.monotonic() - began)


@dataclass
class _Watcher:
    """One run of a monitor."""

    warehouse: Warehouse
    spec: ModelSpec
    monitor: Monitor
    seconds: float | None
    stop: threading.Event
    windows: Windows | None = None
    alerts: Alerts | None = None

    def run(self, progress: Progress) -> None:
        """Run the queries to their end; begin them again when another generation has become the live one."""
        from jobs.live import chain

        while not self.stop.is_set():
            links = chain(self.warehouse, self.spec.name)
            if not links or not self.warehouse.exists(estimates(self.spec.name)):
                raise UserError(
                    f"model {self.spec.name} has no live estimates: start its stream with `kalman-pipeline stream "
                    f"--model {self.spec.name}`"
                )
            queries = self._start()
            try:
                if self._await(queries, links[0].generation, progress):
                    return
            finally:
                self._end(queries)

    def _start(self) -> list[StreamingQuery]:
        from jobs.checkpoints import Checkpoint
        from jobs.kafka import bounds
        from jobs.keys import key_kind
        from jobs.monitor_rules import Alerts, buckets_of, start_rules
        from jobs.monitor_windows import Windows

        spec, monitor, warehouse = self.spec, self.monitor, self.warehouse
        if monitor.kafka is not None:
            bounds(warehouse.spark, monitor.kafka.topic)
        queries = []
        for part in ("windows", "rules"):
            if not getattr(monitor, part):
                continue
            name = f"monitor-{spec.name}-{part}-{monitor.definition(part)}"
            checkpoint = Checkpoint(warehouse, f"checkpoints/{name}")
            source = self._source()
            if part == "windows":
                self.windows = self.windows or Windows(warehouse, spec, monitor, name)
                sink, rows = self.windows, source
            else:
                kind = key_kind(spec.key, source.schema)
                self.alerts = self.alerts or Alerts(warehouse, spec, monitor, name, kind)
                buckets = buckets_of(warehouse, spec, name)
                sink, rows = self.alerts, start_rules(spec, monitor, source, buckets)
            writer = rows.writeStream.queryName(name).foreachBatch(sink)
            writer = writer.option("checkpointLocation", checkpoint.path)
            writer = (
                writer.trigger(availableNow=True)
                if self.seconds is None
                else writer.trigger(processingTime=f"{self.seconds} seconds")
            )
            queries.append(writer.start())
        return queries

    def _source(self) -> DataFrame:
        """Return the live estimates as a stream, from the first one on that the table's log still knows of."""
        from jobs.live import is_live

        table = estimates(self.spec.name)
        reader = self.warehouse.spark.readStream.format("delta")
        reader = reader.option("startingVersion", self.warehouse.first_version(table))
        rows = reader.load(self.warehouse.path(table))
        return rows.filter(is_live(self.warehouse, self.spec.name))

    def _await(self, queries: list[StreamingQuery], live: str, progress: Progress) -> bool:
        """Wait for the queries' end; False if they are to begin again with another live generation."""
        from jobs.generations import live as live_now

        due = time.monotonic() + SWITCH_SECONDS
        while any(query.isActive for query in queries):
            if self.stop.wait(POLL_SECONDS):
                return True
            if any(not query.isActive and query.exception() is not None for query in queries):
                return True
            progress.note(self._told())
            if self.seconds is not None and time.monotonic() >= due:
                due = time.monotonic() + SWITCH_SECONDS
                now = live_now(self.warehouse, self.spec.name)
                if now is not None and now.generation != live:
                    return False
        return True

    def _end(self, queries: list[StreamingQuery]) -> None:
        """Let the running micro-batches finish, and raise what went wrong in one."""
        from pyspark.errors import PySparkException

        from jobs.query import await_end, cause_of

        stop = threading.Event()
        stop.set()
        problems = []
        for query in queries:
            try:
                await_end(query, stop)
            except PySparkException as error:
                problems.append(cause_of(error))
        if problems:
            raise UserError(f"the monitor of {self.spec.name} failed: {problems[0]}", RUN_FAILED)

    def _told(self) -> str:
        parts = []
        if self.windows is not None:
            parts.append(f"{self.windows.rows:,} rows in windows")
        if self.alerts is not None:
            parts.append(f"{self.alerts.raised:,} alerts raised, {self.alerts.cleared:,} cleared")
        return ", ".join(parts)

    def report(self, seconds: float) -> Report:
        """Say what this run has done."""
        lines, data = [], {}
        if self.windows is not None:
            rows, late = self.windows.rows, self.windows.late
            lines.append(f"added {rows:,} rows to the windows of {self.spec.name}, {late:,} were late")
            data |= {"window_rows": rows, "late": late}
        if self.alerts is not None:
            lines.append(f"raised {self.alerts.raised:,} alerts and cleared {self.alerts.cleared:,}")
            data |= {"raised": self.alerts.raised, "cleared": self.alerts.cleared}
        return Report(lines, {"model": self.spec.name, **data, "seconds": seconds})


if __name__ == "__main__":
    from jobs.cli import main

    main("monitor")
